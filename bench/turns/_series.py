"""The series of calls that are timed, and a row of figures for each."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from _turns import (
    ONE_SHOT_LEN,
    PHASES,
    Agents,
    CacheServer,
    make_cache,
    num_pages,
    one_shots,
    serve_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from _turns import Served, Server

    from agentcache.types import Kind

    Combination = tuple[Sequence[Kind], int]
    """Components, and tokens per page."""
    MakeServer = Callable[[Sequence[Kind], int, int, int | None], Server]
    """From components, page size, the tokens of a session at its end, and of how many turns all
    that is filed has room; None where only the last turn's has."""

__all__ = ["NUM_SESSIONS", "SMALL_LEN", "TURN_LEN", "Run", "Sizes", "peer_rows", "room", "rows"]

NUM_SESSIONS = 2
TURN_LEN, SMALL_LEN = 1000, 50
_SMALL_TURNS = 40
_SHORT_LENS = (100, 10)
"""Prompt and answer of a short request."""
_SLACK = 1.05
"""Room for the sessions, over what they need at the end."""
_ROOM_FOR_ONE_SHOTS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    turns: of 1,000 tokens. bases: histories under turns of 50. short: requests. path_len,
    path_nodes: of the path that is matched from the root, and whose records are weighed. entries:
    few and many. repetitions: whole runs of the turns, all of which do the same work.
    """

    turns: int = 200
    bases: tuple[int, ...] = (10_000, 50_000, 100_000, 200_000)
    short: int = 5000
    path_len: int = 200_000
    path_nodes: int = 1000
    entries: tuple[int, int] = (1000, 100_000)
    repetitions: int = 5


@dataclass(frozen=True, slots=True)
class Run:
    """One series. served: its turns, those of all sessions in the order they came. growths: of each
    time it was served, the last 25 turns over turns 6 to 15."""

    series: str
    final_len: int
    new_len: int
    num_sessions: int
    hit_rate: float
    served: list[Served]
    growths: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        n, served = self.num_sessions, self.served
        first = _mean_ms([s.total_s for s in served[5 * n : 15 * n]])
        self.growths.append(_mean_ms([s.total_s for s in served[-25 * n :]]) / first)

    def take_least(self, same: Run) -> None:
        """Of each turn keep the one that took least, here or in a run of the same work; but the
        growth of each run, whose turns were served within the same second."""
        self.growths.extend(same.growths)
        turns = zip(self.served, same.served, strict=True)
        self.served[:] = [min(turn, key=lambda served: served.total_s) for turn in turns]

    def row(self) -> dict[str, Any]:
        """Ms per turn: turns 6 to 15, the last 25, all, and the last 25 by phase."""
        n, served = self.num_sessions, self.served
        last = served[-25 * n :]
        return {
            "series": self.series,
            "final_tokens": self.final_len,
            "new_tokens": self.new_len,
            "ms_per_turn_first": _mean_ms([s.total_s for s in served[5 * n : 15 * n]]),
            "ms_per_turn_last25": _mean_ms([s.total_s for s in last]),
            "ms_per_turn_mean": _mean_ms([s.total_s for s in served]),
            **{f"ms_{phase}": _mean_ms([s.seconds[phase] for s in last]) for phase in PHASES},
            "growth": float(np.median(self.growths)),
            "hit_rate": self.hit_rate,
            "num_evictions": sum(s.num_evictions for s in served),
            "evictions_per_turn_last25": sum(s.num_evictions for s in last) / len(last),
        }


def _mean_ms(seconds: Sequence[float]) -> float:
    return 1000 * sum(seconds) / len(seconds)


def room(num_at_end: int, num_per_one_shot: int) -> int:
    """Room for all sessions at their end and a few one-shots, in tokens or in pages."""
    return int(_SLACK * NUM_SESSIONS * num_at_end) + _ROOM_FOR_ONE_SHOTS * num_per_one_shot


def peer_rows(
    make_server: MakeServer, kinds: Sequence[Kind], page: int, sizes: Sizes
) -> Iterator[dict[str, Any]]:
    """The rows of one composition, served once by another cache."""
    yield from (run.row() for run in _turns(make_server, kinds, page, sizes))


def rows(combinations: Sequence[Combination], sizes: Sizes) -> Iterator[list[dict[str, Any]]]:
    """The rows of each combination of components and page size, short requests among them.

    Every repetition does the same work, and all combinations are repeated in turn, so that a slow
    minute of the machine does not hit all repetitions of one. Of each turn the one that took least
    is taken: what another process adds to a thread's time, by way of caches and shared cores, is
    not the cache's.
    """
    least: list[list[Run]] = [[] for _ in combinations]
    for _ in range(sizes.repetitions):
        for runs, (kinds, page) in zip(least, combinations, strict=True):
            again = [*_turns(_cache_server, kinds, page, sizes), _short(kinds, page, sizes)]
            for run, same in zip(runs, again, strict=bool(runs)):
                run.take_least(same)
            runs[:] = runs or again
    for runs in least:
        yield [run.row() for run in runs]


def _cache_server(
    kinds: Sequence[Kind], page: int, final_len: int, num_turns: int | None
) -> Server:
    at_end = num_pages(kinds, page, final_len, num_turns)
    return CacheServer(make_cache(kinds, page, room(at_end, num_pages(kinds, page, ONE_SHOT_LEN))))


def _turns(
    make_server: MakeServer, kinds: Sequence[Kind], page: int, sizes: Sizes
) -> Iterator[Run]:
    for how in ("", ", full", ", tight"):
        yield _growing(make_server, kinds, page, sizes.turns, how)
    yield from _small_turns(make_server, kinds, page, sizes.bases)


def _growing(
    make_server: MakeServer, kinds: Sequence[Kind], page: int, turns: int, how: str
) -> Run:
    """Turns of 1,000 tokens from nothing on: in an arena with room for all that they file, in such
    a one that is full of one-shots at first, or with room for the last turn's checkpoints only."""
    final_len = TURN_LEN * turns
    server = make_server(kinds, page, final_len, None if "tight" in how else turns)
    if "full" in how:
        fill = one_shots(1_000_000, ONE_SHOT_LEN - 32, 32, seed=1)
        next(step for step in fill if server.serve(step).num_evictions)
    agents = Agents(NUM_SESSIONS, final_len)
    gc.collect()
    served, hit_rate = serve_all(server, agents.turns(turns, TURN_LEN))
    series = f"{TURN_LEN} new{how}"
    return Run(series, final_len, TURN_LEN, NUM_SESSIONS, hit_rate, served)


def _small_turns(
    make_server: MakeServer, kinds: Sequence[Kind], page: int, bases: Sequence[int]
) -> Iterator[Run]:
    """40 turns of 50 tokens on histories of several lengths, which grow by turns of 1,000."""
    growth = _SMALL_TURNS * SMALL_LEN
    final_len = bases[-1] + growth
    turns = bases[-1] // TURN_LEN + len(bases) * _SMALL_TURNS
    server = make_server(kinds, page, final_len, turns)
    agents = Agents(NUM_SESSIONS, final_len)
    for base in bases:
        serve_all(server, agents.turns((base - agents.history_len) // TURN_LEN, TURN_LEN))
        gc.collect()
        served, hit_rate = serve_all(server, agents.turns(_SMALL_TURNS, SMALL_LEN))
        series = f"{SMALL_LEN} new on {base // 1000}K"
        yield Run(series, base + growth, SMALL_LEN, NUM_SESSIONS, hit_rate, served)


def _short(kinds: Sequence[Kind], page: int, sizes: Sizes) -> Run:
    """Requests of about 100 tokens that have nothing in common; a fifth of them has room."""
    total = sum(_SHORT_LENS)
    server = CacheServer(make_cache(kinds, page, sizes.short // 5 * num_pages(kinds, page, total)))
    gc.collect()
    served = [server.serve(step) for step in one_shots(sizes.short, *_SHORT_LENS)]
    return Run("short", total, total, 1, 0.0, served)
