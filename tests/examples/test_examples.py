"""Every example runs, as a program of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[0-9]*.py"))


def test_there_are_examples_of_a_readable_size() -> None:
    assert EXAMPLES
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) < 60, f"{example.name} is too long to read"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(example)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
