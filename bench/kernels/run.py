"""Speed of the kernels beside their references and the fallbacks they stand in for.

A form is timed only after its outputs agreed with the reference. Where ours does not agree, the
case reports its error and no speed, and the exit status is 1. Forms take turns, and the fastest
turn of each counts: on a shared machine it is the figure that repeats.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit
from benchkit.shown import count
from registry import REGISTRY, Case

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TOLERANCE = 1e-5  # relative L2 error of float32 outputs
_MIN_TURNS = 5


def _shown(show: Callable[[float], str]) -> Callable[[float], str]:
    return lambda value: "n/a" if math.isnan(value) else show(value)


COLUMNS = (
    Column("op", "op"),
    Column("case", "case"),
    Column("form", "form"),
    Column("error", "error", lambda value: f"{value:.1e}"),
    Column("us", "us", _shown(lambda value: f"{value:,.1f}")),
    Column("tokens/s", "tokens_per_s", _shown(count)),
    Column("over ours", "over_ours", _shown(lambda value: f"{value:.2f}")),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for op in options.op or sorted(REGISTRY):
        with console_for(options.json).status(op):
            for case in REGISTRY[op]():
                rows += measure(op, case, options.seconds)
        error = max(row["error"] for row in rows if row["op"] == op and row["form"] == "ours")
        goals.append(Goal(f"{op}, largest error against the reference", error, TOLERANCE))
    return emit(
        Result(
            name="bench/kernels",
            rows=rows,
            ratios={
                f"{row['op']}.{row['case']}.{row['form']}_over_ours": row["over_ours"]
                for row in rows
                if row["form"] != "ours" and not math.isnan(row["over_ours"])
            },
            goals=goals,
            settings={"seconds": options.seconds},
        ),
        COLUMNS,
        options.json,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", action="append", choices=sorted(REGISTRY), help="may be repeated")
    parser.add_argument("--threads", type=int, help="threads of torch; by default its own choice")
    parser.add_argument("--seconds", type=float, default=1.0, help="time to spend on a case")
    add_json_option(parser)
    return parser


def measure(op: str, case: Case, seconds: float) -> list[dict[str, Any]]:
    """One row per form, ours first; NaN for the speed of what must not or cannot be compared."""
    expected = case.reference.outputs()
    errors = {name: _error(form.outputs(), expected) for name, form in case.forms.items()}
    right = {name for name, error in errors.items() if error <= TOLERANCE}
    fastest = dict.fromkeys(errors, math.nan)
    if "ours" in right:
        fastest |= _time({name: case.forms[name].run for name in errors if name in right}, seconds)
    return [
        {
            "op": op,
            "case": case.name,
            "form": name,
            "error": error,
            "us": fastest[name] * 1e6,
            "tokens_per_s": case.num_tokens / fastest[name],
            "over_ours": fastest[name] / fastest["ours"],
        }
        for name, error in errors.items()
    ]


def _error(outputs: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest relative L2 error among the outputs; infinite where shapes or NaNs differ."""
    worst = 0.0
    for actual, wanted in zip(outputs, expected, strict=True):
        if actual.shape != wanted.shape:
            return math.inf
        error = float((actual.double() - wanted.double()).norm() / wanted.double().norm())
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def _time(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Seconds of the fastest turn of each."""
    fastest = dict.fromkeys(runs, math.inf)
    turns, end = 0, time.perf_counter() + seconds
    while turns < _MIN_TURNS or time.perf_counter() < end:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            fastest[name] = min(fastest[name], time.perf_counter() - start)
        turns += 1
    return fastest


if __name__ == "__main__":
    sys.exit(main())
