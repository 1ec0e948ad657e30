"""In which order the calls of several recorded runs are replayed."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentcache.replay.trace import Trajectory

__all__ = ["interleave", "spread"]


def interleave(
    trajectories: Sequence[Trajectory], concurrency: int, max_turns: int | None = None
) -> Iterator[tuple[int, int, bool]]:
    """(trajectory index, call index, is its last) with up to `concurrency` runs open at once.

    Each run keeps its recorded pace from the moment it is opened. A run whose calls have no times
    takes one unit a call, so that runs without times take turns.
    """
    waiting = iter(range(len(trajectories)))
    open_runs: list[tuple[float, int, int]] = []

    def open_next(now: float) -> None:
        index = next(waiting, None)
        if index is not None:
            heapq.heappush(open_runs, (now, index, 0))

    for _ in range(concurrency):
        open_next(0.0)
    while open_runs:
        now, index, call = heapq.heappop(open_runs)
        calls = trajectories[index].calls[:max_turns]
        last = call + 1 == len(calls)
        yield index, call, last
        if last:
            open_next(now)
        else:
            pause = _pause(calls[call].at, calls[call + 1].at)
            heapq.heappush(open_runs, (now + pause, index, call + 1))


def _pause(at: float | None, following: float | None) -> float:
    if at is None or following is None:
        return 1.0
    return max(0.0, following - at)


def spread(count: int, total: int) -> frozenset[int]:
    """`count` of `total` places, evenly spread.

    >>> sorted(spread(3, 9))
    [1, 4, 7]
    """
    count = min(count, total)
    return frozenset(int((i + 0.5) * total / count) for i in range(count))
