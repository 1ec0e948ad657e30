"""The policy benchmarks in their shortest form."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from agentcache.policy.eviction import POLICIES
from agentcache.simulate.generate import trace_a, write_trace

BENCH = Path(__file__).parents[2] / "bench" / "policy"


@pytest.fixture
def run(monkeypatch, capsys):
    def run_script(name: str, *arguments: str):
        monkeypatch.setattr(sys, "path", [*sys.path])  # scripts add their support folder
        main = runpy.run_path(str(BENCH / name))["main"]
        status = main([*arguments, "--json", "-"])
        return status, json.loads(capsys.readouterr().out)

    return run_script


def test_reference_rows_have_goals_that_can_be_missed(run, tmp_path):
    write_trace(trace_a(seed=1, scale=0.1), tmp_path / "seed_a.jsonl")  # another trace by that name

    status, result = run(
        "simulate.py",
        *("--traces", str(tmp_path), "--trace=seed_a", "--share=0.1", "--entries=60"),
    )

    rates = {row["run"]: row["hit_rate"] for row in result["rows"] if row["trace"] == "seed_a"}
    met = {goal["name"]: goal["met"] for goal in result["goals"]}
    assert {"lru", "session-lru", "auto", "auto without hints", "clairvoyant"} < rates.keys()
    assert max(rates.values()) == rates["bound"]
    assert not met["seed_a 0.1: lru off its reference"]
    assert met["seed_a 0.1: clairvoyant above the bound"]
    timed = {row["run"] for row in result["rows"] if row["trace"] == "many entries"}
    assert timed == set(POLICIES)
    assert status == 1


def test_experiments_show_what_judgement_is_worth(run):
    status, result = run("experiments.py", "document", "--scale=0.1")

    rates = {
        (row["admission"], row["policy"], row["budget_share"]): row["hit_rate"]
        for row in result["rows"]
    }
    assert rates["structural", "lru", 0.5] > rates["marconi", "lru", 0.5]
    assert status == int(not all(goal["met"] for goal in result["goals"]))
    assert result["settings"] == {"seed": 0, "scale": 0.1}
