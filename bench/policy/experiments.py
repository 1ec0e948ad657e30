"""What policies and admission are worth, in small experiments on generated traces.

    python -P bench/policy/experiments.py alpha admission

alpha       Trace A (long prefixes that come back) and Trace B (long ones that do not) with the
            weight of FLOPs against recency at 0, 1 and 4, tuned, and with `auto`
admission   the same traces, checkpoints taken with judgement or at every block
shape       attention to state layers 1:2 to 1:8, and state sizes 16 to 128, on agents
blocks      how much of the checkpoints and of the KV is used again with a checkpoint at every block
document    one long document, asked many times: tokens left to compute

Equal seeds give equal rows. Goals: judicious admission reuses more than every block, of tokens and
of checkpoints; auto is at most a point below recency.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit
from benchkit.shown import count, percent

from agentcache.errors import UnknownPolicy
from agentcache.policy.eviction import make_policy
from agentcache.simulate.generate import agents, document, trace_a, trace_b
from agentcache.simulate.runs import Budget, Grid, simulate
from agentcache.simulate.shapes import load_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agentcache.simulate.trace import Trace

    Row = dict[str, Any]

COLUMNS = (
    Column("experiment", "experiment"),
    Column("trace", "trace"),
    Column("shape", "shape"),
    Column("budget", "budget_share", percent),
    Column("admission", "admission"),
    Column("policy", "policy"),
    Column("hit rate", "hit_rate", percent),
    Column("p50", "computed_p50", count),
    Column("p95", "computed_p95", count),
    Column("states used", "state_reuse", percent),
    Column("KV used", "kv_reuse", percent),
)
_SHAPE = "marconi-7b"
_SHARES = (0.1, 0.2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; the exit status is 1 if a goal is missed."""
    args = _parser().parse_args(argv)
    console = console_for(args.json)
    rows: list[Row] = []
    for name in args.experiment or list(EXPERIMENTS):
        with console.status(name):
            rows += ({"experiment": name} | row for row in EXPERIMENTS[name](args))
    goals = list(_goals(rows))
    ratios = {
        f"{row['experiment']} {row['trace']} {row['shape']} {row['budget_share']:g} "
        f"{row['admission']} {row['policy']}": row["hit_rate"]
        for row in rows
    }
    settings = {"seed": args.seed, "scale": args.scale}
    return emit(
        Result("bench/policy/experiments", rows, ratios, goals, settings), COLUMNS, args.json
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", nargs="*", choices=list(EXPERIMENTS), help="by default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scale", type=float, default=0.25, help="of the lengths of prefixes and documents"
    )
    add_json_option(parser)
    return parser


def _runs(
    trace: Trace,
    policies: Sequence[str],
    admissions: Sequence[str] = ("structural",),
    shares: Sequence[float] = _SHARES,
    shape: str = _SHAPE,
) -> Iterator[Row]:
    grid = Grid(_known(policies), admissions, [Budget(share=share) for share in shares])
    for result in simulate(trace, load_shape(shape), grid):
        yield {"shape": shape} | result.to_json()


def _known(policies: Sequence[str]) -> list[str]:
    """Those of the policies that this version has."""
    known = []
    for name in policies:
        try:
            make_policy(name)
        except UnknownPolicy:
            continue
        known.append(name)
    return known


def _alpha(args: argparse.Namespace) -> Iterator[Row]:
    for make in (trace_a, trace_b):
        trace = make(args.seed, args.scale)
        yield from _runs(trace, ["lru", "marconi:0", "marconi:1", "marconi:4", "marconi", "auto"])


def _admission(args: argparse.Namespace) -> Iterator[Row]:
    for make in (trace_a, trace_b):
        trace = make(args.seed, args.scale)
        yield from _runs(trace, ["lru", "auto"], ["structural", "marconi", "every-block"])


def _shape(args: argparse.Namespace) -> Iterator[Row]:
    trace = agents(args.seed)
    ratios = [f"ratio-1:{ratio}" for ratio in (2, 4, 6, 8)]
    for shape in (*ratios, *(f"n{size}" for size in (16, 32, 64, 128))):
        yield from _runs(trace, ["lru", "auto"], shares=(0.1,), shape=shape)


def _blocks(args: argparse.Namespace) -> Iterator[Row]:
    trace = agents(args.seed)
    admissions = ["structural", "marconi", "every-block:32", "every-block:16"]
    yield from _runs(trace, ["lru"], admissions, shares=(0.2, 1.0))


def _document(args: argparse.Namespace) -> Iterator[Row]:
    trace = document(args.seed, scale=args.scale)
    admissions = ["structural", "marconi", "every-block"]
    yield from _runs(trace, ["lru", "auto"], admissions, shares=(0.5, 1.0))


EXPERIMENTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "alpha": _alpha,
    "admission": _admission,
    "shape": _shape,
    "blocks": _blocks,
    "document": _document,
}


def _goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Structural against every block, and auto against recency, all else being equal."""
    keys = ("experiment", "trace", "shape", "budget_share", "admission", "policy")
    by_key = {tuple(row[key] for key in keys): row for row in rows}
    for key, row in by_key.items():
        *others, admission, policy = key
        name = f"{others[0]} {others[1]} {others[2]} {others[3]:g} {policy}"
        if admission.startswith("every-block"):
            judged = by_key[(*others, "structural", policy)]
            title = f"{name}: structural over {admission}"
            for what in ("hit_rate", "state_reuse"):
                more = judged[what] - row[what]
                yield Goal(f"{title}, {what}", more, -0.01, at_least=True)
        recent = by_key.get((*others, admission, "lru"))
        if policy == "auto" and recent is not None:
            less = 100 * (recent["hit_rate"] - row["hit_rate"])
            yield Goal(f"{name}, {admission}: points below lru", less, 1.0)


if __name__ == "__main__":
    sys.exit(main())
