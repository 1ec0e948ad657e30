"""Interleaved runs under a small budget: is it kept, does the run finish, what is reused.

Eight recorded runs take turns at their recorded pace, each with a session of its own, with a budget
that is a share of the need (what a cache without limit would hold at most). The policy that knows
sessions stands beside plain LRU. Runs are taken in order, without those that the smallest budget
cannot hold even alone. Exit status 1 if the budget is exceeded or a call is refused.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit
from benchkit.runs import add_runs_options, read_runs, replay
from benchkit.shown import count, mib, millis, percent

from agentcache.engine.chat import ChatFormat
from agentcache.engine.describe import describe
from agentcache.engine.loader import load_model
from agentcache.engine.tokenizer import Tokenizer
from agentcache.policy.eviction import POLICIES as POLICY_KEYS
from agentcache.replay.results import percentile
from agentcache.replayer import Replayer, ReplayOptions
from agentcache.session.prompts import PromptBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.replay.results import ReplayResult
    from agentcache.replay.trace import Trajectory

POLICIES = ("session-lru", "lru")
COLUMNS = (
    Column("share", "share", percent),
    Column("policy", "policy"),
    Column("budget", "budget_bytes", mib),
    Column("peak", "peak_bytes", mib),
    Column("calls", "calls", count),
    Column("refused", "refused", count),
    Column("computed", "computed_tokens", count),
    Column("hit rate", "hit_rate", percent),
    Column("ideal", "ideal_hit_rate", percent),
    Column("FLOPs saved", "flops_saved", percent),
    Column("TTFT p50", "ttft_p50_s", millis),
    Column("TTFT p95", "ttft_p95_s", millis),
)


class Sizes:
    """What runs have to hold, found without computing any."""

    def __init__(self, model: str, max_turns: int | None) -> None:
        loaded = load_model(model)
        tokenizer = Tokenizer(loaded.tokenizer)
        self._shape = describe(loaded.model).shape
        self._max_turns = max_turns
        self._prompts = PromptBuilder(ChatFormat(tokenizer), tokenizer, self._shape.vocab_size)
        self._kv_bytes: dict[str, int] = {}

    def kv_bytes(self, run: Trajectory) -> int:
        """KV of a run's longest call."""
        if run.id not in self._kv_bytes:
            self._kv_bytes[run.id] = self._longest(run) * self._shape.kv_bytes_per_token
        return self._kv_bytes[run.id]

    def _longest(self, run: Trajectory) -> int:
        call = max(run.calls[: self._max_turns], key=lambda call: len(call.messages))
        prompt = self._prompts.from_messages(call.messages, call.tools, ())
        answer = self._prompts.replay_ids(call.answer, prompt, 0)
        return len(prompt.ids) + len(answer)

    def least_bytes(self, run: Trajectory) -> int:
        """To serve the longest call and reuse it: its KV, its last state and one before it."""
        return self.kv_bytes(run) + 2 * self._shape.state_bytes

    def need_bytes(self, run: Trajectory) -> int:
        """About the need of a run that only appends: its KV and a state for every call."""
        calls = len(run.calls[: self._max_turns])
        return self.kv_bytes(run) + calls * self._shape.state_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    console = console_for(options.json)
    settings = ReplayOptions(concurrency=options.limit, max_turns=options.max_turns)
    shares = sorted(options.share or [10.0])
    read = read_runs(options.folder, console)
    sizes = Sizes(options.model, options.max_turns)
    try:
        fitting = _that_fit(read.trajectories, sizes, options.limit, shares[0])
    except LookupError as error:
        parser.error(str(error))
    chosen = tuple(run for run in read.trajectories if run.id in fitting)
    replayer = Replayer(options.model, replace(read, trajectories=chosen), settings)
    need = replayer.need_bytes()
    rows = []
    for share in shares:
        budget = int(need * share / 100)
        for policy in options.policy or POLICIES:
            begin, title = time.perf_counter(), f"{share:g} %, {policy}"
            outcome = replay(replayer, console, title, budget=budget, policy=policy)
            rows.append(_row(outcome, share / 100, budget, time.perf_counter() - begin))
    result = _summary(rows, options.model, [run.id for run in chosen], need)
    return emit(result, COLUMNS, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add_runs_options(parser, limit=8)
    parser.add_argument(
        "--share",
        action="append",
        type=float,
        metavar="PERCENT",
        help="budget in percent of the need; may be repeated; by default 10",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=sorted(POLICY_KEYS),
        help=f"may be repeated; by default {' and '.join(POLICIES)}",
    )
    add_json_option(parser)
    return parser


def _that_fit(runs: Sequence[Trajectory], sizes: Sizes, limit: int, share: float) -> set[str]:
    """Ids of the first runs of which each fits alone into a share of what they need together.

    Raises LookupError if there are none.
    """
    left = list(runs)
    while True:
        chosen = left[:limit]
        # States of running requests take up to a fourth of a budget.
        room = 0.75 * share / 100 * sum(map(sizes.need_bytes, chosen))
        fitting = {run.id for run in chosen if sizes.least_bytes(run) <= room}
        if len(fitting) == len(chosen) == limit:
            return fitting
        left = [run for run in left if run.id in fitting or run not in chosen]
        if len(left) < limit:
            raise LookupError(f"no {limit} runs of which each fits into {share:g} % of their need")


def _row(result: ReplayResult, share: float, budget: int, seconds: float) -> dict[str, Any]:
    held = [sum(call.bytes_by_kind.values()) for call in result.calls]
    return {
        "share": share,
        "policy": result.policy,
        "budget_bytes": budget,
        "pool_bytes": result.budget_bytes,
        "peak_bytes": result.peak_bytes,
        "most_bytes_after_a_call": max(held, default=0),
        "calls": len(result.calls),
        "refused": len(result.rejected),
        "prompt_tokens": result.tokens.prompt_tokens,
        "computed_tokens": result.tokens.computed_tokens,
        "hit_rate": result.tokens.hit_rate,
        "ideal_hit_rate": result.ideal_hit_rate,
        "flops_saved": result.flops_saved,
        "ttft_p50_s": percentile(result.ttft_s, 50) or 0.0,
        "ttft_p95_s": percentile(result.ttft_s, 95) or 0.0,
        "seconds": seconds,
    }


def _summary(rows: list[dict[str, Any]], model: str, runs: list[str], need: int) -> Result:
    goals, ratios = [], {}
    for row in rows:
        name = f"{100 * row['share']:g} % {row['policy']}"
        held = max(row["peak_bytes"], row["most_bytes_after_a_call"]) / row["budget_bytes"]
        goals += [
            Goal(f"{name}: peak over budget", held, 1.0),
            Goal(f"{name}: calls refused", row["refused"], 0),
        ]
        ratios[f"{name}: share of the ideal"] = row["hit_rate"] / row["ideal_hit_rate"]
    return Result(
        name="bench/policy/interleaved",
        rows=rows,
        ratios=ratios,
        goals=goals,
        settings={"model": model, "runs": runs, "need_bytes": need},
    )


if __name__ == "__main__":
    sys.exit(main())
