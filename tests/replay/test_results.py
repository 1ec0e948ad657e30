"""Totals, rates and percentiles of a replay run, its JSON form and its closing tables."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from agentcache.replay.results import (
    CallRecord,
    FileCounts,
    ReplayResult,
    VerifyTotals,
    percentile,
    summary_table,
    trajectory_table,
)

EXACT = {"positions": 20, "different_ids": 0, "max_logit_error": 2e-6, "max_state_error": 3e-7}
MISS = {"at_token": 90, "reason": "diverged", "message": [2, "tool"]}


def call(trajectory: str, idx: int, prompt: int, cached: int, **changes: Any) -> CallRecord:
    record = CallRecord(
        trajectory=trajectory,
        call=idx,
        prompt_tokens=prompt,
        cached_tokens=cached,
        computed_tokens=prompt - cached,
        output_tokens=10,
        ttft_s=0.001 * (prompt - cached),
        total_s=0.5,
        at_s=1.0 + idx,
        bytes_by_kind={"full": 1000 * (idx + 1), "state": 500},
    )
    return replace(record, **changes)


def run(*calls: CallRecord, **changes: Any) -> ReplayResult:
    result = ReplayResult(
        model="tiny-hybrid",
        policy="session-lru",
        budget_bytes=1 << 20,
        need_bytes=4096,
        calls=calls,
        num_trajectories=len({record.trajectory for record in calls}),
        ideal_cached_tokens=240,
        flops_computed=25_000,
        flops_total=100_000,
        peak_bytes=3 << 10,
        peak_bytes_by_kind={"state": 1 << 10, "full": 2 << 10},
        files=FileCounts(loaded=2, partial=1, skipped=3, rejected=4),
    )
    return replace(result, **changes)


def sample() -> ReplayResult:
    return run(
        call("a", 0, 100, 0, cold_ttft_s=0.2),
        call("b", 0, 100, 50, verify=EXACT),
        call("a", 1, 200, 150, miss=MISS, cold_ttft_s=0.4),
    )


def empty() -> ReplayResult:
    return run(
        ideal_cached_tokens=0, flops_computed=0, flops_total=0, peak_bytes=0, peak_bytes_by_kind={}
    )


def text(table: Any, width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_totals_are_the_sums_and_rates_over_all_calls() -> None:
    totals = sample().to_json()["totals"]
    assert totals["calls"] == 3
    assert totals["trajectories"] == 2
    assert totals["prompt_tokens"] == 400
    assert totals["cached_tokens"] == 200
    assert totals["computed_tokens"] == 200
    assert totals["output_tokens"] == 30
    assert totals["hit_rate"] == 0.5
    assert totals["ideal_hit_rate"] == 0.6
    assert totals["flops_saved"] == 0.75
    assert totals["peak_bytes"] == 3 << 10
    assert totals["budget_bytes"] == 1 << 20


def test_times_with_and_without_the_cache_are_nearest_rank_percentiles() -> None:
    totals = sample().to_json()["totals"]
    assert (totals["ttft_p50_s"], totals["ttft_p95_s"]) == (0.05, 0.1)
    assert (totals["cold_ttft_p50_s"], totals["cold_ttft_p95_s"]) == (0.2, 0.4)
    assert totals["cold_calls"] == 2


@pytest.mark.parametrize(
    ("count", "percent", "expected"),
    [(1, 50, 1), (2, 50, 1), (3, 50, 2), (20, 95, 19), (21, 95, 20), (100, 95, 95), (7, 100, 7)],
)
def test_percentile_is_the_smallest_value_with_that_share_at_or_below(
    count: int, percent: int, expected: int
) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    assert percentile(values, percent) == expected


def test_percentile_of_nothing_is_none() -> None:
    assert percentile([], 50) is None


def test_json_has_the_documented_keys() -> None:
    data = sample().to_json()
    assert {"totals", "verify", "files", "calls"} <= data.keys()
    assert data["files"] == {"loaded": 2, "partial": 1, "skipped": 3, "rejected": 4}
    assert {
        "trajectory",
        "call",
        "prompt_tokens",
        "cached_tokens",
        "computed_tokens",
        "ttft_s",
        "miss",
    } <= data["calls"][0].keys()
    assert data["calls"][0]["miss"] is None
    assert data["calls"][2]["miss"] == MISS
    assert [(entry["trajectory"], entry["call"]) for entry in data["calls"]] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
    ]


def test_json_is_strict_even_when_an_error_is_not_a_number() -> None:
    broken = {**EXACT, "max_logit_error": math.nan, "per_layer": [(0, math.inf)]}
    result = run(call("a", 0, 10, 5, verify=broken))
    data = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert data["verify"]["max_logit_error"] is None
    assert data["verify"]["passed"] is False
    assert data["calls"][0]["verify"]["per_layer"] == [[0, None]]


def test_rejected_and_skipped_inputs_keep_their_messages() -> None:
    data = replace(sample(), rejected=("x: bad",), notes=("y: empty",)).to_json()
    assert data["rejected"] == ["x: bad"]
    assert data["notes"] == ["y: empty"]


def test_an_empty_run_has_zero_rates_and_no_percentiles() -> None:
    totals = empty().to_json()["totals"]
    assert totals["hit_rate"] == totals["ideal_hit_rate"] == totals["flops_saved"] == 0.0
    assert totals["ttft_p50_s"] is totals["ttft_p95_s"] is totals["cold_ttft_p50_s"] is None
    assert empty().to_json()["verify"]["passed"] is None
    assert not empty().verify_failed


def test_verification_totals_add_up_and_keep_the_worst_error() -> None:
    worse = {**EXACT, "different_ids": 2, "max_logit_error": 0.5}
    totals = VerifyTotals.of([EXACT, worse, EXACT])
    assert totals == VerifyTotals(3, 60, 2, 0.5, 3e-7)


@pytest.mark.parametrize(
    "change",
    [
        {"different_ids": 1},
        {"max_logit_error": 2e-4},
        {"max_state_error": 2e-4},
        {"max_state_error": math.nan},
    ],
)
def test_verification_fails_on_any_difference(change: dict[str, float]) -> None:
    damaged = call("a", 1, 10, 5, verify={**EXACT, **change})
    assert not run(call("a", 0, 10, 5, verify=EXACT)).verify_failed
    for calls in ((damaged,), (call("a", 0, 10, 5, verify=EXACT), damaged)):
        assert run(*calls).verify_failed
        assert run(*reversed(calls)).verify_failed


def test_verification_tolerance_can_be_wider_for_a_family() -> None:
    loose = call("a", 0, 10, 5, verify={**EXACT, "max_logit_error": 9e-4})
    assert run(loose).verify_failed
    assert not run(loose, verify_tolerance=1e-3).verify_failed


def test_trajectories_are_summed_in_order_of_first_appearance() -> None:
    first, second = sample().by_trajectory()
    assert (first.name, first.calls, first.prompt_tokens, first.hit_rate) == ("a", 2, 300, 0.5)
    assert (second.name, second.calls, second.computed_tokens) == ("b", 1, 50)


@pytest.mark.parametrize("width", [80, 120])
def test_closing_table_shows_every_figure(width: int) -> None:
    shown = text(summary_table(sample()), width)
    for expected in (
        "3 in 2 trajectories",
        "50.00 %",
        "60.00 %",
        "75.00 % (75.00 KFLOP of 100.00 KFLOP)",
        "50 ms / 100 ms",
        "200 ms / 400 ms",
        "3.0 KiB (budget: 1.0 MiB)",
        "2.0 KiB",
        "4.0 KiB",
        "2 loaded, 1 partial, 3 skipped, 4 rejected",
        "ok: 0 differing ids at 20 positions of 1 call",
        "logits 2.0e-06",
    ):
        assert expected in shown
    assert max(map(len, shown.splitlines())) <= width


def test_closing_table_of_an_empty_run_says_what_was_not_measured() -> None:
    shown = text(summary_table(replace(empty(), budget_bytes=None)))
    assert "n/a / n/a" in shown
    assert "not measured" in shown
    assert "not run" in shown
    assert "no limit" in shown
    assert trajectory_table(empty()) is None


def test_closing_table_shows_a_failed_verification_and_an_early_stop() -> None:
    damaged = call("a", 0, 10, 5, verify={**EXACT, "different_ids": 3})
    shown = text(summary_table(run(damaged, stopped_early="interrupted")))
    assert "FAILED: 3 differing ids" in shown
    assert "interrupted" in shown


def test_tables_print_brackets_from_the_data_as_they_are() -> None:
    odd = run(call("[red]a[/b]", 0, 10, 5), model="[bold]m", stopped_early="[/x]")
    shown = text(summary_table(replace(odd, peak_bytes_by_kind={"[/y]": 1})))
    for expected in ("[bold]m", "[/x]", "[/y]"):
        assert expected in shown
    table = trajectory_table(odd)
    assert table is not None
    assert "[red]a[/b]" in text(table)


def test_trajectory_table_lists_few_trajectories_and_stays_away_for_many() -> None:
    table = trajectory_table(sample())
    assert table is not None
    assert "50.00 %" in text(table)
    assert trajectory_table(run(*(call(str(idx), 0, 10, 5) for idx in range(20)))) is not None
    assert trajectory_table(run(*(call(str(idx), 0, 10, 5) for idx in range(21)))) is None


def test_a_long_trajectory_name_does_not_push_the_figures_away() -> None:
    table = trajectory_table(run(call("x" * 300, 0, 10_000_000, 5_000_000)))
    assert table is not None
    shown = text(table)
    assert "10,000,000" in shown
    assert "50.00 %" in shown
    assert shown.count("x") == 300


def test_a_small_loss_is_not_rounded_away() -> None:
    shown = text(summary_table(run(call("a", 0, 10**6, 10**6 - 1))))
    assert "99.99 %" in shown
    assert "100.00 % (75" not in shown


def test_importing_results_loads_no_heavy_library() -> None:
    code = (
        "import sys, agentcache.replay.results\n"
        "print([name for name in ('torch', 'matplotlib', 'rich', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
