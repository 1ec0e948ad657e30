"""The benchmark of the server in its shortest form: it runs, and its JSON has the agreed keys."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "bench" / "agents" / "http.py"


def test_http_is_timed_against_bare_passes_and_streams_leave_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds its support folder
    main = runpy.run_path(str(SCRIPT))["main"]
    status = main(
        ["--prompt=60", "--repetitions=1", "--streams=4", "--stream-tokens=2", "--json=-"]
    )
    result = json.loads(capsys.readouterr().out)

    assert result["name"] == "bench/agents/http"
    *hits, streams = result["rows"]
    assert [row["what"] for row in hits] == ["plain", "in a session", "streamed"]
    assert all(row["cached_tokens"] >= row["prompt_tokens"] - 8 for row in hits)
    assert all(row["measured_s"] > 0 for row in hits)
    assert streams["left_behind"] == 0
    met = [goal["met"] for goal in result["goals"]]
    assert status == int(not all(met))  # times are a matter of the machine: either is right
