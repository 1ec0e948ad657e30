"""What the cache's own bookkeeping costs a turn, in CPU time of its thread, without a model.

Two sessions take turns that only append, one request in twelve is a one-shot, and the arena has
room for what the sessions file and a few one-shots, so that one-shots have to leave. A turn is one
acquire, two reservations, a commit before the reply header and one at the end, its session's mark
moved along and one release; the evictions that one-shots cause count as the turns'. Allocating
pages is real and part of it; no bytes are moved, and making token ids is not timed. Garbage
collection stays on. Milliseconds are those of the fastest of several equal runs, turn by turn; the
growth from turns 6-15 to the last 25 is each run's own, and the middle one of them counts: a
machine that others use changes its speed from one second to the next.

Series: 1,000 new tokens a turn from nothing on, in an arena that is empty at first ("1000 new"), in
one that is full of one-shots ("full"), and in one that has room for the last checkpoints of each
session only, so that each turn has to thin them ("tight"; the peers, whose states lie in a pool of
their own, thin none); 50 new ones on histories of several lengths; short requests that have nothing
in common. Beside these: a match from the root along a long path, an eviction among few and among
many entries, and the bytes of the tree's records. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from _costs import POLICIES, cold_match, evictions, records
from _series import NUM_SESSIONS, SMALL_LEN, TURN_LEN, Sizes, peer_rows, room
from _series import rows as series_rows
from _turns import ONE_SHOT_LEN, PHASES, WINDOW, CacheServer
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit
from benchkit.shown import count
from rich import box
from rich.table import Table

from agentcache.pools.pages import IS_COMPILED
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from _turns import Server
    from rich.console import Console

Kinds = tuple[Kind, ...]
Row = dict[str, Any]

COMPOSITIONS: tuple[Kinds, ...] = (
    (Kind.FULL, Kind.STATE),
    (Kind.FULL, Kind.SWA),
    (Kind.FULL, Kind.SWA, Kind.STATE),
    (Kind.FULL,),
    (Kind.STATE,),
    (Kind.SWA,),
)
WITH_GOALS = COMPOSITIONS[:3]
PAGES = (64, 1)

GROWTH_GOAL = 1.5
TURN_GOALS_MS = {TURN_LEN: 1.0, SMALL_LEN: 0.3}
COLD_GOAL_MS = 3.0
EVICTION_GOAL = 2.0
RECORD_GOAL_BYTES = 1024

QUICK = Sizes(20, (2000,), 100, 12_000, 60, (100, 1000), 1)


def _ms(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{100 * value:.1f}"


def _bytes(value: float) -> str:
    return "" if math.isnan(value) else count(value)


COLUMNS = (
    Column("composition", "composition"),
    Column("core", "core"),
    Column("series", "series"),
    Column("page", "page", count),
    Column("6-15", "ms_per_turn_first", _ms),
    Column("last", "ms_per_turn_last25", _ms),
    Column("growth", "growth", _ms),
    Column("mean", "ms_per_turn_mean", _ms),
    Column("hits", "hit_rate", _share),
    Column("evictions", "num_evictions", count),
    Column("bytes/node", "bytes_per_node", _bytes),
)
PHASE_COLUMNS = (
    *COLUMNS[:4],
    *(Column(phase.split("_")[0][:7], f"ms_{phase}", _ms) for phase in PHASES),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    console = console_for(options.json)
    sizes = QUICK if options.quick else Sizes(repetitions=options.repetitions)
    gc.collect()
    gc.freeze()  # what was imported is not looked through by the collections that are timed
    rows: list[Row] = []
    with console.status("agentcache: turns and short requests"):
        combinations = [(kinds, page) for page in PAGES for kinds in COMPOSITIONS]
        for (kinds, page), found in zip(
            combinations, series_rows(combinations, sizes), strict=True
        ):
            rows += _placed(kinds, page, CacheServer.core, found)
    with console.status("a long path from the root"):
        rows += [_cold(kinds, page, sizes) for page in PAGES for kinds in COMPOSITIONS]
    with console.status("evictions among few and many"):
        rows += [row for policy in POLICIES for row in _evictions(policy, sizes)]
    with console.status("records"):
        rows += [_records(kinds, sizes) for kinds in COMPOSITIONS]
    if options.sglang is not None:
        rows += _peers(options, sizes, console.print)
    gc.unfreeze()
    _print_phases(rows, console)
    return emit(_summary(rows, sizes), COLUMNS, options.json)


def _print_phases(rows: Sequence[Row], console: Console) -> None:
    table = Table(
        title="CPU milliseconds per turn by phase, last 25 turns",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    for column in PHASE_COLUMNS:
        is_text = column.show is str
        table.add_column(column.heading, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        if "new_tokens" in row:
            table.add_row(*(column.show(row[column.key]) for column in PHASE_COLUMNS))
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short histories only, some seconds")
    parser.add_argument("--repetitions", type=int, default=Sizes().repetitions)
    parser.add_argument(
        "--sglang", type=Path, metavar="DIR", help="an unpacked wheel of SGLang, to run beside"
    )
    parser.add_argument(
        "--sglang-core", action="append", choices=("rust", "python"), help="by default both"
    )
    add_json_option(parser)
    return parser


def _label(kinds: Kinds) -> str:
    return "+".join(kind.name for kind in kinds)


def _placed(kinds: Kinds, page: int, core: str, rows: Iterable[Row]) -> list[Row]:
    place = {"composition": _label(kinds), "core": core, "page": page, "bytes_per_node": math.nan}
    return [place | row for row in rows]


def _cold(kinds: Kinds, page: int, sizes: Sizes) -> Row:
    found = cold_match(kinds, page, sizes.path_len, sizes.path_nodes)
    return _single(kinds, page, "cold match", found)


def _evictions(policy: str, sizes: Sizes) -> list[Row]:
    return [
        _single((Kind.FULL, Kind.STATE), 64, f"{policy}, 1 of {_thousands(num)}", found)
        for num, found in zip(sizes.entries, evictions(policy, sizes.entries), strict=True)
    ]


def _thousands(number: int) -> str:
    return f"{number // 1000}K" if number >= 1000 else str(number)


def _records(kinds: Kinds, sizes: Sizes) -> Row:
    found = records(kinds, PAGES[0], sizes.path_len, sizes.path_nodes)
    return _single(kinds, PAGES[0], "records", found)


def _single(kinds: Kinds, page: int, series: str, found: dict[str, float]) -> Row:
    """A row about one thing only; times that it has nothing to say of are no numbers."""
    row: Row = dict.fromkeys((column.key for column in COLUMNS), math.nan)
    row |= {"composition": _label(kinds), "core": CacheServer.core, "page": page, "series": series}
    return row | {"num_evictions": 0} | found


def _peers(options: argparse.Namespace, sizes: Sizes, say: Callable[[str], None]) -> list[Row]:
    """SGLang's cores on the same turns, once each."""
    import torch
    from _sglang import CORES, Sglang, SglangServer

    torch.set_num_threads(1)
    sglang = Sglang(options.sglang)
    rows: list[Row] = []
    for core in options.sglang_core or CORES:
        for kinds in WITH_GOALS:
            say(f"sglang {core}: {_label(kinds)}")

            def make(
                kinds: Sequence[Kind],
                page: int,
                final_len: int,
                num_turns: int | None,
                core: str = core,
            ) -> Server:
                num_tokens = room(final_len, ONE_SHOT_LEN)
                return SglangServer(sglang, core, kinds, page, num_tokens, _MANY_STATES, WINDOW)

            found = peer_rows(make, kinds, PAGES[0], sizes)
            rows += _placed(kinds, PAGES[0], f"sglang {core}", found)
    return rows


_MANY_STATES = 10_000
"""More than are ever filed: where a peer keeps states in a pool of their own, none has to leave."""


def _summary(rows: list[Row], sizes: Sizes) -> Result:
    ours = [row for row in rows if row["core"] == CacheServer.core]
    ratios = {
        f"{_name(row)}: last 25 over turns 6-15": row["growth"]
        for row in rows
        if row.get("new_tokens") == TURN_LEN
    }
    return Result(
        name="bench/turns/bookkeeping",
        rows=rows,
        ratios=ratios | _over_ours(rows, ours),
        goals=[*_turn_goals(ours, sizes), *_other_goals(ours, sizes)],
        settings={
            "sessions": NUM_SESSIONS,
            "window": WINDOW,
            "one_shot_tokens": ONE_SHOT_LEN,
            "repetitions": sizes.repetitions,
            "pages": "compiled" if IS_COMPILED else "reference",
        },
    )


def _name(row: Row) -> str:
    core = "" if row["core"] == CacheServer.core else f"{row['core']} "
    return f"{core}{row['composition']}, {row['series']}, page {row['page']}"


def _over_ours(rows: Sequence[Row], ours: Sequence[Row]) -> dict[str, float]:
    """The last 25 turns of other cores over this cache's."""
    same = {_name(row): row["ms_per_turn_last25"] for row in ours}
    return {
        f"{_name(row)}: over agentcache": row["ms_per_turn_last25"]
        / same[_name(row | {"core": CacheServer.core})]
        for row in rows
        if row["core"] != CacheServer.core
    }


def _turn_goals(ours: Sequence[Row], sizes: Sizes) -> Iterator[Goal]:
    """Of the longest histories, in an arena that is empty at first and in one that is full: in the
    former nothing has to leave in the first turns, in the latter as much as in the last."""
    labels = [_label(kinds) for kinds in WITH_GOALS]
    full = f"{TURN_LEN} new, full"
    longest = (f"{TURN_LEN} new", full, f"{SMALL_LEN} new on {sizes.bases[-1] // 1000}K")
    for row in ours:
        if row["composition"] not in labels or row["series"] not in longest:
            continue
        if row["new_tokens"] == TURN_LEN:
            yield Goal(f"{_name(row)}: last 25 over turns 6-15", row["growth"], GROWTH_GOAL)
        took, goal = row["ms_per_turn_last25"], TURN_GOALS_MS[row["new_tokens"]]
        yield Goal(f"{_name(row)}: ms per turn, last 25", took, goal)


def _other_goals(ours: Sequence[Row], sizes: Sizes) -> Iterator[Goal]:
    labels = [_label(kinds) for kinds in WITH_GOALS]
    eviction_ms: dict[tuple[str, int], float] = {}
    for row in ours:
        if row["series"] == "cold match" and row["composition"] in labels:
            yield Goal(f"{_name(row)}: ms", row["ms_per_turn_mean"], COLD_GOAL_MS)
        if row["series"] == "records" and row["composition"] in labels:
            yield Goal(f"{_name(row)}: bytes per node", row["bytes_per_node"], RECORD_GOAL_BYTES)
        if "num_entries" in row:
            eviction_ms[row["series"].split(",")[0], row["num_entries"]] = row["ms_per_turn_mean"]
    few, many = sizes.entries
    for policy in POLICIES:
        ratio = eviction_ms[policy, many] / eviction_ms[policy, few]
        yield Goal(f"{policy}: an eviction of {many:,} over one of {few:,}", ratio, EVICTION_GOAL)


if __name__ == "__main__":
    sys.exit(main())
