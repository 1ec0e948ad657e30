"""Examples in docstrings run."""

import doctest
import importlib
from pathlib import Path

import pytest

import agentcache

ROOT = Path(agentcache.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    # rooms may be symbolic links, which a recursive pattern would not follow
    for folder in [ROOT, *(p for p in ROOT.iterdir() if p.is_dir())]
    for path in folder.glob("*.py" if folder == ROOT else "**/*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", [name.removesuffix(".__init__") for name in MODULES])
def test_docstring_examples_hold(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
