"""The benchmark of whole lists in its shortest form."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def test_complete_compares_a_call_with_encoding_all(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])  # scripts add their support folder
    main = runpy.run_path(str(BENCH / "agents" / "complete.py"))["main"]
    main(["--lengths", "300", "2000", "--repetitions", "2", "--json", "-"])
    result = json.loads(capsys.readouterr().out)
    assert result["name"] == "bench/agents/complete"
    short, long = result["rows"]
    assert short["history_tokens"] < long["history_tokens"]
    # What is new is the same, however much there was before.
    assert short["new_tokens"] == long["new_tokens"]
    assert len(result["ratios"]) == 2
    (goal,) = result["goals"]
    assert goal["limit"] == 2.0
