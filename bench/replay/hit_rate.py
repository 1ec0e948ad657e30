"""How near recorded runs come to the ideal hit rate without a limit, and whether answers change.

Replays the runs one after another, one session each, and computes every tenth call again without
the cache. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit, median
from benchkit.runs import add_runs_options, first_runs, read_runs, replay
from benchkit.shown import count, millis, percent

from agentcache.replayer import Replayer, ReplayOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.replay.results import ReplayResult

COLUMNS = (
    Column("run", "run"),
    Column("calls", "calls", count),
    Column("prompt tokens", "prompt_tokens", count),
    Column("computed", "computed_tokens", count),
    Column("hit rate", "hit_rate", percent),
    Column("TTFT", "ttft_p50_s", millis),
    Column("cold TTFT", "cold_ttft_p50_s", millis),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    console = console_for(options.json)
    read = first_runs(read_runs(options.folder, console), options.limit)
    calls = sum(len(run.calls[: options.max_turns]) for run in read.trajectories)
    verify = -(-calls // options.verify_every) if options.verify_every else 0
    replayer = Replayer(
        options.model, read, ReplayOptions(max_turns=options.max_turns, verify=verify)
    )
    result = replay(replayer, console, "replaying calls", budget=None, policy="auto")
    return emit(_summary(result), COLUMNS, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add_runs_options(parser, limit=8)
    parser.add_argument(
        "--verify-every", type=int, default=10, metavar="N", help="0 verifies nothing"
    )
    add_json_option(parser)
    return parser


def _summary(result: ReplayResult) -> Result:
    verify = result.verify
    ideal = result.ideal_hit_rate
    of_ideal = result.tokens.hit_rate / ideal if ideal else 1.0
    warm = median(warm for warm, _ in result.cold_pairs_s)
    cold = median(cold for _, cold in result.cold_pairs_s)
    goals = [
        Goal("hit rate, share of the ideal", of_ideal, 0.99, at_least=True),
        Goal("calls refused", len(result.rejected), 0),
    ]
    if verify.calls:
        goals += [
            Goal("differing ids", verify.different_ids, 0),
            Goal("worst logit error", verify.max_logit_error, result.verify_tolerance),
            Goal("worst state error", verify.max_state_error, result.verify_tolerance),
        ]
    return Result(
        name="bench/replay/hit_rate",
        rows=_rows(result),
        ratios={
            "hit_rate": result.tokens.hit_rate,
            "ideal_hit_rate": ideal,
            "share_of_ideal": of_ideal,
            "flops_saved": result.flops_saved,
            "cold_ttft_over_warm": cold / warm,
        },
        goals=goals,
        settings={
            "model": result.model,
            "calls": len(result.calls),
            "verified_calls": verify.calls,
            "verified_positions": verify.positions,
            "peak_bytes": result.peak_bytes,
            "need_bytes": result.need_bytes,
        },
    )


def _rows(result: ReplayResult) -> list[dict[str, Any]]:
    rows = []
    for run in result.by_trajectory():
        calls = [call for call in result.calls if call.trajectory == run.name]
        timed = [call for call in calls if call.cold_ttft_s is not None]
        rows.append(
            {
                "run": run.name,
                "calls": run.calls,
                "prompt_tokens": run.prompt_tokens,
                "cached_tokens": run.cached_tokens,
                "computed_tokens": run.computed_tokens,
                "hit_rate": run.hit_rate,
                "ttft_p50_s": median(call.ttft_s for call in calls),
                "verified_calls": len(timed),
                "verified_ttft_p50_s": median(call.ttft_s for call in timed),
                "cold_ttft_p50_s": median(call.cold_ttft_s or 0.0 for call in timed),
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
