"""Policies on the reference traces, without a model, against reference figures and bounds.

    python -P bench/policy/simulate.py --traces FOLDER

FOLDER holds NAME.jsonl of each trace; a trace that is not there comes from the generator that lies
beside the checkout, where that can make it, and is left out otherwise. Simple policies run as in
the reference: Marconi admission, no hints. Goals, in points of the token hit rate:

- lru and gdsf within 1 of the reference, marconi within 3 where the artifact keeps its budget;
- clairvoyant at most 1 below the reference, and never above the bound;
- auto at most 1 below the best of lru, gdsf, marconi and, with hints, session-lru;
- on traces of agents, of the gap between the best of lru, gdsf and marconi and clairvoyant: auto
  closes a half with hints and a quarter without; at the largest budget auto has 98 % of it;
- policy CPU at most 100 µs per request with 10,000 entries.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit
from benchkit.shown import percent

from agentcache.policy.eviction import POLICIES
from agentcache.simulate.driver import Simulator
from agentcache.simulate.read import read_traces
from agentcache.simulate.results import Setup
from agentcache.simulate.runs import Budget, Grid, need_bytes, simulate
from agentcache.simulate.shapes import load_shape
from agentcache.simulate.trace import SimRequest, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from agentcache.types import ModelShape

_GENERATOR = Path(__file__).resolve().parents[3] / "shared" / "bench" / "traces" / "traces.py"


@dataclass(frozen=True, slots=True)
class Reference:
    """Token hit rates in % that an independent simulator reached. share: of the need. slip: the
    most that the published Marconi artifact held, over its budget, when it was run on the trace."""

    trace: str
    share: float
    lru: float
    gdsf: float
    marconi: float
    clairvoyant: float
    slip: float


REFERENCES = (
    Reference("swe_real", 0.05, 39.5, 42.8, 43.4, 76.6, 1.24),
    Reference("swe_real", 0.1, 80.4, 77.4, 83.0, 91.3, 1.00),
    Reference("swe_real", 0.2, 88.6, 89.2, 88.7, 92.8, 1.00),
    Reference("swe_gen", 0.05, 36.5, 38.4, 32.4, 58.6, 1.54),
    Reference("swe_gen", 0.1, 62.9, 64.7, 56.8, 83.0, 1.29),
    Reference("swe_gen", 0.2, 92.2, 93.5, 93.2, 96.4, 1.00),
    Reference("swe_collapse", 0.02, 58.9, 65.9, 59.9, 73.9, 1.10),
    Reference("swe_collapse", 0.05, 69.2, 72.0, 70.5, 74.0, 1.03),
    Reference("moon_chat", 0.1, 24.5, 23.2, 21.4, 38.6, 1.10),
    Reference("moon_synth", 0.1, 6.5, 10.4, 3.2, 34.8, 1.13),
    Reference("seed_a", 0.1, 14.3, 31.9, 31.7, 70.0, 1.16),
    Reference("seed_a", 0.2, 47.5, 81.3, 77.8, 92.1, 1.17),
    Reference("seed_b", 0.1, 22.5, 29.2, 22.5, 45.7, 1.13),
    Reference("seed_b", 0.2, 28.7, 29.8, 28.7, 51.8, 1.08),
)
NEED_GB = {
    "swe_real": 47.4,
    "swe_gen": 73.7,
    "swe_collapse": 216.1,
    "moon_chat": 464,
    "moon_synth": 456,
    "seed_a": 56.7,
    "seed_b": 129.2,
}
"""What an unlimited cache with Marconi admission holds."""

AGENTS = ("swe_real", "swe_gen", "swe_collapse")
SIMPLE = ("lru", "gdsf", "marconi")
_PAGE_SIZE = 4
"""The reference counts bytes and no pages: large ones cost up to a point."""

_MOST_SLIP = 1.05
_MOST_OFF = {"lru": 1.0, "gdsf": 1.0, "marconi": 3.0}

COLUMNS = (
    Column("trace", "trace"),
    Column("share", "share", percent),
    Column("run", "run"),
    Column("hit rate", "hit_rate", percent),
    Column("reference", "reference", lambda value: "" if value is None else f"{value:g} %"),
    Column("CPU us", "cpu_us_per_request", lambda value: "" if value is None else f"{value:.0f}"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 if a goal is missed."""
    args = _parser().parse_args(argv)
    console = console_for(args.json)
    shape = load_shape("marconi-7b")
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for name in args.trace or list(NEED_GB):
        trace = _load(name, args.traces, console)
        if trace is None:
            continue
        goals.append(_need_goal(trace, shape))
        for reference in REFERENCES:
            if reference.trace == name and args.share in (None, reference.share):
                found = _rows(trace, shape, reference, args.no_bounds)
                rows += found
                goals += _goals(reference, {row["run"]: 100 * row["hit_rate"] for row in found})
    if not args.no_cpu:
        found = _cpu_rows(shape, args.entries)
        rows += found
        goals += [
            Goal(f"{row['run']}: policy CPU, us per request", row["cpu_us_per_request"], 100.0)
            for row in found
        ]
    if not rows:
        console.print("no trace was found; name their folder with --traces")
        return 2
    ratios = {"goals met": sum(goal.met for goal in goals) / max(1, len(goals))}
    return emit(Result("bench/policy/simulate", rows, ratios, goals), COLUMNS, args.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path, help="folder with NAME.jsonl of each trace")
    parser.add_argument(
        "--trace", action="append", choices=list(NEED_GB), help="only this one; may be repeated"
    )
    parser.add_argument("--share", type=float, help="only this share of the need")
    parser.add_argument("--no-bounds", action="store_true", help="leave the bounds out")
    parser.add_argument("--no-cpu", action="store_true", help="leave the policies' CPU time out")
    parser.add_argument("--entries", type=int, default=10_000, help="for the CPU time")
    add_json_option(parser)
    return parser


def _load(name: str, folder: Path | None, console: Console) -> Trace | None:
    path = None if folder is None else folder / f"{name}.jsonl"
    if path is not None and path.exists():
        return read_traces(path)[0]
    if not _GENERATOR.exists():
        console.print(f"{name}: left out, there is neither a file nor the generator")
        return None
    try:
        return Trace(name, "generated", tuple(_generated(name)))
    except (KeyError, ImportError, AttributeError) as error:
        console.print(f"{name}: left out, the generator lacks {error}")
        return None


def _generated(name: str) -> Iterator[SimRequest]:
    spec = importlib.util.spec_from_file_location("reference_traces", _GENERATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    for made in module.MAKERS[name]():
        yield SimRequest(
            str(made.sid),
            made.ts,
            made.seq,
            made.ilen,
            parent=None if made.parent < 0 else str(made.parent),
            closes=made.closed,
            marks=tuple(at for at in made.marks if at <= made.ilen),
        )


def _need_goal(trace: Trace, shape: ModelShape) -> Goal:
    reference = NEED_GB[trace.name]
    off = abs(need_bytes(trace, shape) / 1e9 / reference - 1)
    return Goal(f"{trace.name}: need off its reference", off, 0.005)


def _rows(
    trace: Trace, shape: ModelShape, reference: Reference, no_bounds: bool
) -> list[dict[str, Any]]:
    budget = [Budget(share=reference.share)]
    plain, told = Setup(hints=False, page_size=_PAGE_SIZE), Setup(page_size=_PAGE_SIZE)
    simple = [name for name in SIMPLE if name in POLICIES]
    bounds = [] if no_bounds else ["clairvoyant", "bound"]
    grids = {
        "{}": Grid(simple, ["marconi"], budget, plain),
        "{} ": Grid(["session-lru", "auto"], ["structural"], budget, told),
        "{} without hints": Grid(["auto"], ["structural"], budget, plain),
        " {}": Grid(bounds, ["marconi"], budget, plain),
    }
    rows = []
    for form, grid in grids.items():
        for result in simulate(trace, shape, grid):
            run = form.format(result.setup.policy).strip()
            row = result.to_json()
            keys = ("hit_rate", "cpu_us_per_request", "cache_us_per_request", "evictions")
            rows.append(
                {"trace": trace.name, "share": reference.share, "run": run}
                | {"reference": getattr(reference, run, None)}
                | {key: row[key] for key in keys}
            )
    return rows


def _goals(reference: Reference, rates: dict[str, float]) -> Iterator[Goal]:
    name = f"{reference.trace} {reference.share:g}"
    for policy, most in _MOST_OFF.items():
        if policy in rates and not (policy == "marconi" and reference.slip > _MOST_SLIP):
            off = abs(rates[policy] - getattr(reference, policy))
            yield Goal(f"{name}: {policy} off its reference", off, most)
    best = max(rates[each] for each in SIMPLE if each in rates)
    for run, others in (("auto", max(best, rates["session-lru"])), ("auto without hints", best)):
        yield Goal(f"{name}: {run} below the best of the others", others - rates[run], 1.0)
    if "clairvoyant" not in rates:
        return
    perfect = rates["clairvoyant"]
    yield Goal(f"{name}: clairvoyant below its reference", reference.clairvoyant - perfect, 1.0)
    yield Goal(f"{name}: clairvoyant above the bound", perfect - rates["bound"], 0.0)
    if reference.trace not in AGENTS:
        return
    if reference.share == 0.2:
        share = rates["auto"] / perfect
        yield Goal(f"{name}: auto over clairvoyant", share, 0.98, at_least=True)
        return
    for run, least in (("auto", 0.5), ("auto without hints", 0.25)):
        closed = (rates[run] - best) / max(perfect - best, 1e-9)
        yield Goal(f"{name}: gap closed by {run}", closed, least, at_least=True)


def _cpu_rows(shape: ModelShape, num_entries: int) -> list[dict[str, Any]]:
    """The time of every policy once so many entries are held and all that comes makes some leave.

    A first third of the requests fills the cache and does not count.
    """
    trace = _many(num_entries)
    warm = 2 * num_entries // 2
    requests = trace.requests
    rows = []
    for policy in POLICIES:
        setup = Setup(policy=policy, budget_bytes=num_entries * _entry_bytes(trace, shape))
        simulator = Simulator(trace, shape, setup)
        for request in requests[:warm]:
            simulator.step(request)
        begin = simulator.policy_s
        cached = [simulator.step(request) or 0 for request in requests[warm:]]
        micros = 1e6 * (simulator.policy_s - begin) / len(cached)
        hit_rate = sum(cached) / sum(request.prompt_len for request in requests[warm:])
        rows.append(
            {"trace": trace.name, "share": 0.0, "run": policy, "reference": None}
            | {"hit_rate": hit_rate, "cpu_us_per_request": micros}
            | {"entries": simulator.cache.num_checkpoints}
        )
    return rows


def _entry_bytes(trace: Trace, shape: ModelShape) -> int:
    """Of a checkpoint in whole pages, and the KV of a turn's new tokens."""
    page = Setup().page_size * shape.kv_bytes_per_token
    first = trace.requests[0]
    return page * (-(-shape.state_bytes // page) + -(-len(first.ids) // Setup().page_size))


def _many(num_entries: int) -> Trace:
    """Sessions of two turns each, more of them than fit, those of a group taking turns."""
    rng = np.random.default_rng(0)
    requests: list[SimRequest] = []
    group = 50
    for first in range(0, 3 * num_entries // 2, group):
        prompts = [rng.integers(0, 50_000, 64, dtype=np.int32) for _ in range(group)]
        for turn in range(2):
            for number in range(group):
                answer = rng.integers(0, 50_000, 16, dtype=np.int32)
                ids = np.concatenate([prompts[number], answer])
                session, at = str(first + number), float(len(requests))
                requests.append(
                    SimRequest(session, at, ids, len(prompts[number]), closes=turn == 1)
                )
                prompts[number] = np.concatenate([ids, answer])
    return Trace("many entries", "generated", tuple(requests))


if __name__ == "__main__":
    sys.exit(main())
