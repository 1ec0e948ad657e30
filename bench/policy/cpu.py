"""What a policy costs: CPU per request once a cache is full, with few entries and with many.

Agents of four turns each, fifty at a time taking turns, share a system prompt; all that comes makes
something leave. The time is what the policy and its order take of the thread's CPU, with the
stopwatch itself. What tunes a policy is left out: `auto`'s shadow caches have a thread of their own
in a runtime. Requests count in blocks as long as the steps at which `auto` learns; the figure is
the median over the blocks of their means, since other work on the machine disturbs some.

Goal: at most 100 µs per request with 10,000 entries or more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit, median
from benchkit.shown import count, percent

from agentcache.policy.base import Costs
from agentcache.policy.eviction import POLICIES, make_policy
from agentcache.simulate.driver import Simulator
from agentcache.simulate.results import Setup
from agentcache.simulate.shapes import load_shape
from agentcache.simulate.trace import SimRequest, Trace
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentcache.types import ModelShape

ENTRIES = (300, 1_000, 10_000)
CHOSEN = ("lru", "session-lru", "auto")
_MANY, _MOST_US = 10_000, 100.0
_BLOCK = 512
_GROUP, _TURNS = 50, 4
_HEAD, _NEW = 64, 48
"""Tokens of the system prompt, and of each turn's message and answer."""

COLUMNS = (
    Column("entries", "entries", count),
    Column("policy", "policy"),
    Column("hit rate", "hit_rate", percent),
    Column("leave per request", "evictions", lambda value: f"{value:.2f}"),
    Column("us per request", "cpu_us_per_request", lambda value: f"{value:.1f}"),
    Column("least block", "least_us", lambda value: f"{value:.1f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit status is 1 if a goal is missed."""
    args = _parser().parse_args(argv)
    console = console_for(args.json)
    shape = load_shape("marconi-7b")
    rows: list[dict[str, Any]] = []
    for entries in args.entries or ENTRIES:
        trace = Trace("agents", "generated", tuple(_agents(_warm(entries) + args.blocks * _BLOCK)))
        for policy in args.policy or CHOSEN:
            with console.status(f"{policy}, {entries} entries"):
                rows.append(_row(trace, shape, policy, entries, args.blocks))
    goals = [
        Goal(
            f"{row['policy']}, {row['entries']:,} entries: us per request",
            row["cpu_us_per_request"],
            _MOST_US,
        )
        for row in rows
        if row["entries"] >= _MANY
    ]
    return emit(Result("bench/policy/cpu", rows, _over_lru(rows), goals), COLUMNS, args.json)


def _over_lru(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What each policy costs over what `lru` does, where that was measured too."""
    cost = {(row["policy"], row["entries"]): row["cpu_us_per_request"] for row in rows}
    return {
        f"{policy} over lru, {entries:,} entries": us / cost["lru", entries]
        for (policy, entries), us in cost.items()
        if policy != "lru" and ("lru", entries) in cost
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--entries",
        action="append",
        type=int,
        help=f"the cache has room for; may be repeated; by default {', '.join(map(str, ENTRIES))}",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=sorted(POLICIES),
        help=f"may be repeated; by default {', '.join(CHOSEN)}",
    )
    parser.add_argument("--blocks", type=int, default=8, help=f"of {_BLOCK} requests each, timed")
    add_json_option(parser)
    return parser


def _warm(entries: int) -> int:
    """Requests before the first that counts: twice what fills the cache, and until `auto` learns at
    steps that do not grow any more."""
    return max(2 * entries, 8 * _BLOCK)


def _agents(num_requests: int) -> Iterator[SimRequest]:
    """Groups of sessions that take turns until all of a group close."""
    rng = np.random.default_rng(0)
    head = rng.integers(0, 50_000, _HEAD, dtype=np.int32)
    number = 0
    while True:
        histories = [head] * _GROUP
        for turn in range(_TURNS):
            for member in range(_GROUP):
                if number == num_requests:
                    return
                new = rng.integers(0, 50_000, 2 * _NEW, dtype=np.int32)
                histories[member] = np.concatenate([histories[member], new])
                session = str(number // (_GROUP * _TURNS) * _GROUP + member)
                ids = histories[member]
                yield SimRequest(
                    session,
                    float(number),
                    ids,
                    len(ids) - _NEW,
                    closes=turn == _TURNS - 1,
                    marks=(_HEAD,),
                )
                number += 1


def _row(
    trace: Trace, shape: ModelShape, policy: str, entries: int, num_blocks: int
) -> dict[str, Any]:
    budget = entries * _entry_bytes(shape)
    setup = Setup(policy=policy, budget_bytes=budget)
    chosen = make_policy(policy, Costs.of(shape))
    simulator = Simulator(trace, shape, setup, policy=chosen)
    warm = _warm(entries)
    for request in trace.requests[:warm]:
        simulator.step(request)
    means, cached, asked = [], 0, 0
    left = _left(simulator)
    for first in range(warm, warm + num_blocks * _BLOCK, _BLOCK):
        begin = simulator.policy_s
        for request in trace.requests[first : first + _BLOCK]:
            cached += simulator.step(request) or 0
            asked += request.prompt_len
        means.append(1e6 * (simulator.policy_s - begin) / _BLOCK)
    left = _left(simulator) - left
    return {
        "entries": entries,
        "policy": policy,
        "held": simulator.cache.num_checkpoints,
        "requests": num_blocks * _BLOCK,
        "hit_rate": cached / asked,
        "evictions": left / (num_blocks * _BLOCK),
        "cpu_us_per_request": median(means),
        "least_us": min(means),
    }


def _left(simulator: Simulator) -> int:
    """Checkpoints that have left so far."""
    return simulator.cache.memory.metrics.get("evictions", Kind.STATE.value)


def _entry_bytes(shape: ModelShape) -> int:
    """Of a checkpoint in whole pages, and the KV of a turn's new tokens."""
    size = Setup().page_size
    pages = -(-shape.state_bytes // (size * shape.kv_bytes_per_token)) + -(-2 * _NEW // size)
    return pages * size * shape.kv_bytes_per_token


if __name__ == "__main__":
    sys.exit(main())
