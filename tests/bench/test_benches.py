"""Every benchmark script in its shortest form: it runs, and its JSON has the agreed keys."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SAMPLE = str(Path(__file__).parents[2] / "agentcache" / "data" / "sample")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a script of bench/ with arguments; its exit status and what it printed as JSON."""

    def run_script(name: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "path", [*sys.path])  # scripts add their support folder
        main = runpy.run_path(str(BENCH / name))["main"]
        status = main([*arguments, "--json", "-"])
        return status, json.loads(capsys.readouterr().out)

    return run_script


def check(result: dict[str, Any], name: str, num_rows: int) -> None:
    assert result["name"] == name
    assert result["commit"]
    assert {"cpu", "cores", "torch_threads", "python", "torch"} <= result["machine"].keys()
    assert len(result["rows"]) == num_rows
    assert result["ratios"]


def goals(result: dict[str, Any]) -> dict[str, bool]:
    return {goal["name"]: goal["met"] for goal in result["goals"]}


def test_hit_rate_meets_its_goals_on_the_first_calls_of_a_run(run):
    status, result = run(
        "replay/hit_rate.py", SAMPLE, "--limit=1", "--max-turns=2", "--verify-every=2"
    )

    check(result, "bench/replay/hit_rate", num_rows=1)
    assert result["settings"]["verified_calls"] == 1
    assert set(goals(result).values()) == {True}
    assert status == 0


def test_ttft_compares_a_turn_with_a_bare_pass_over_the_same_tokens(run):
    status, result = run(
        "turns/ttft.py", "--model=tiny-hybrid", "--history=100", "--repetitions=1", "--cold=1"
    )

    check(result, "bench/turns/ttft", num_rows=2)
    assert {row["call"] for row in result["rows"]} == {"chat", "generate"}
    assert all(abs(row["computed_tokens"] - 32) <= 1 for row in result["rows"])
    assert all(row["cached_tokens"] >= 100 for row in result["rows"])
    assert status == int(not all(goals(result).values()))  # a matter of time: either is right


def test_engine_is_timed_against_stock_code_and_bare_passes(run):
    status, result = run(
        "turns/engine.py",
        *("--model=tiny-hybrid", "--prefill=100", "--new=3", "--repetitions=1"),
        *("--context", "48", "96"),
    )

    check(result, "bench/turns/engine", num_rows=6)
    assert [row["tokens"] for row in result["rows"]] == [48, 48, 96, 100, 100, 100]
    assert all(row["ours_s"] > 0 and row["other_s"] > 0 for row in result["rows"])
    assert status == int(not all(goals(result).values()))  # a matter of time: either is right


def test_decode_copies_the_same_bytes_whatever_the_history(run):
    status, result = run("turns/decode_bytes.py", "--shortest=64", "--longest=256", "--steps=1")

    check(result, "bench/turns/decode_bytes", num_rows=3)
    assert [row["history_tokens"] for row in result["rows"]] == [64, 128, 256]
    assert all(row["copied_bytes"] > 0 for row in result["rows"])
    assert status == 0


def test_decode_bytes_count_every_allocation_and_what_copies_write():
    traffic = runpy.run_path(str(BENCH / "turns" / "decode_bytes.py"))["traffic"]
    events = [
        {
            "name": "aten::copy_",
            "ts": 1.0,
            "dur": 1.0,
            "args": {"Input Dims": [[3, 4], [3, 4], []], "Input type": ["float", "float", ""]},
        },
        {"name": "aten::cat", "ts": 3.0, "dur": 2.0, "args": {}},
        {"name": "[memory]", "ts": 4.0, "args": {"Bytes": 100}},
        {"name": "aten::mul", "ts": 6.0, "dur": 1.0, "args": {}},
        {"name": "[memory]", "ts": 6.5, "args": {"Bytes": 7}},
        {"name": "[memory]", "ts": 8.0, "args": {"Bytes": -107}},
    ]

    found = traffic(events)

    assert (found.allocated, found.copied, found.copies) == (107, 148, 2)


def test_bookkeeping_times_every_composition_and_evicts_in_each(run):
    status, result = run("turns/bookkeeping.py", "--quick")

    rows = result["rows"]
    turns = [row for row in rows if row["series"] in ("1000 new, full", "1000 new, tight")]
    check(result, "bench/turns/bookkeeping", num_rows=2 * 6 * 5 + 2 * 6 + 4 + 6)
    assert {(row["composition"], row["page"]) for row in turns} == {
        (kinds, page)
        for kinds in ("FULL+STATE", "FULL+SWA", "FULL+SWA+STATE", "FULL", "STATE", "SWA")
        for page in (64, 1)
    }
    assert all(row["num_evictions"] > 0 for row in turns if row["series"].endswith("full"))
    assert all(row["ms_per_turn_last25"] > 0 for row in turns)
    # each of 20 turns reuses all that the one before it has computed: nothing live was evicted
    ideal = sum(1000 * t - 1 for t in range(1, 20)) / sum(1000 * t + 700 for t in range(20))
    assert all(row["hit_rate"] == pytest.approx(ideal) for row in turns)
    assert all(row["num_nodes"] == 60 for row in rows if row["series"] == "cold match")
    assert status == int(not all(goals(result).values()))  # a matter of time: either is right


def test_interleaved_runs_keep_the_budget_under_either_policy(run):
    status, result = run(
        "policy/interleaved.py", SAMPLE, "--limit=2", "--max-turns=2", "--share=80"
    )

    check(result, "bench/policy/interleaved", num_rows=2)
    assert [row["policy"] for row in result["rows"]] == ["session-lru", "lru"]
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in result["rows"])
    assert all(row["calls"] == 4 for row in result["rows"])
    assert status == 0


def test_interleaved_says_when_the_runs_cannot_fit(run, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("policy/interleaved.py", SAMPLE, "--limit=2", "--max-turns=1", "--share=1")

    assert stopped.value.code == 2
    assert "no 2 runs of which each fits into 1 %" in capsys.readouterr().err


def test_a_missed_goal_is_exit_status_one_and_an_error_without_number_is_null(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCH / "support"))
    from benchkit.results import Column, Goal, Result, emit

    result = Result(
        name="bench/x",
        rows=[{"value": float("nan")}],
        ratios={"r": float("inf")},
        goals=[Goal("error", float("nan"), 1e-4)],
    )

    status = emit(result, [Column("value", "value")], "-")

    printed = json.loads(capsys.readouterr().out)
    assert status == 1
    assert printed["rows"] == [{"value": None}]
    assert printed["ratios"] == {"r": None}


def test_commit_is_unknown_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH / "support"))
    from benchkit.results import commit

    assert commit(tmp_path) == "unknown"


def test_checkpoints_compares_formats_with_the_state_that_was_never_parked(run):
    status, result = run(
        "turns/checkpoints.py",
        *("--models", "mamba2", "--tokens", "60", "--steps", "6", "--turns", "2"),
        "--repetitions=1",
    )

    check(result, "bench/turns/checkpoints", num_rows=3)
    unchanged, half, int8 = result["rows"]
    assert unchanged["turns_logit_error"] == unchanged["state_error"] == 0
    assert unchanged["bytes"] > half["bytes"] > int8["bytes"]
    assert 0 < half["state_error"] < int8["state_error"]
    assert set(goals(result).values()) == {True}
    assert status == 0


def test_an_agent_computes_what_is_new_and_its_overhead_is_told(run):
    status, result = run(
        "agents/langgraph.py",
        *("--turns=1", "--short=200", "--long=400", "--messages=12", "--repetitions=2"),
    )

    check(result, "bench/agents/langgraph", num_rows=5)
    turns, *dropped, short, long = result["rows"]
    assert turns["computed_tokens"] <= 1.01 * turns["new_tokens"]
    for row in dropped:  # each call computes a token at least, and its reply header
        spare = 8 * row["calls"]
        assert row["computed_tokens"] <= row["new_tokens"] + row["repeated_tokens"] + spare
    assert long["history_tokens"] > short["history_tokens"]
    assert all(row["overhead_s"] > row["floor_s"] > 0 for row in (short, long))
    assert status == int(not all(goals(result).values()))  # a matter of time: either is right


def test_tiny_agent_is_scored_and_says_the_same_cold(run):
    status, result = run("tiny/evaluate.py", "--dialogues=3", "--at-once=2")

    check(result, "bench/tiny/evaluate", num_rows=15)
    totals = {row["kind"]: row["answers"] for row in result["rows"]}
    assert totals["all, dialogues of 1 and 2 turns"] == 1 + 2
    assert totals["all, dialogues of 3 to 7 turns"] == 3
    assert goals(result)["dialogues with other ids when cold"]
    assert result["ratios"]["prompt tokens cached"] > 0.5
    assert status == int(not all(goals(result).values()))  # how right it is, is not tested here


def test_policy_costs_are_printed_for_each_policy(run):
    status, result = run(
        "policy/cpu.py", "--entries=40", "--policy=lru", "--policy=auto", "--blocks=1"
    )

    check(result, "bench/policy/cpu", num_rows=2)
    assert result["ratios"]["auto over lru, 40 entries"] > 0
    assert all(row["evictions"] > 0 for row in result["rows"])
    assert status == 0  # the goal is for ten thousand entries
