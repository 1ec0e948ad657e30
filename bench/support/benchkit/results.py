"""Results of a benchmark: where they were measured, goals, the JSON form and the printed table."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = [
    "Column",
    "Goal",
    "Result",
    "add_json_option",
    "commit",
    "console_for",
    "emit",
    "machine",
    "median",
]

Row = dict[str, Any]

_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and the limit it has to keep: at most `limit`, or at least if `at_least` is set."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the limit is kept; a value that is no number keeps none."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_json(self) -> Row:
        """The goal as plain JSON values."""
        return {**asdict(self), "met": self.met}

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "[green]met[/green]" if self.met else "[red]MISSED[/red]"
        return f"goal {sign} {self.limit:g}: {self.name} {self.value:.4g} {verdict}"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the printed table: heading, key of a row, and how its value is shown."""

    heading: str
    key: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Result:
    """What a script measured. rows: one per measurement; ratios: figures that machines share."""

    name: str
    rows: Sequence[Row]
    ratios: Mapping[str, float]
    goals: Sequence[Goal] = ()
    settings: Mapping[str, Any] | None = None

    @property
    def exit_status(self) -> int:
        """0 if every goal is met, else 1."""
        return int(not all(goal.met for goal in self.goals))

    def to_json(self) -> Row:
        """The result as plain JSON values, with commit and machine."""
        return {
            "name": self.name,
            "commit": commit(),
            "machine": machine(),
            "settings": dict(self.settings or {}),
            "rows": [_plain(row) for row in self.rows],
            "ratios": _plain(self.ratios),
            "goals": [_plain(goal.to_json()) for goal in self.goals],
        }


def _plain(row: Mapping[str, Any]) -> Row:
    """A copy in which a number that JSON lacks is null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


def commit(root: Path = _ROOT) -> str:
    """The checkout's commit, as `git describe` names it; "unknown" where there is no checkout."""
    # Without optional locks, looking does not get in the way of somebody who commits.
    git = ["git", "--no-optional-locks", "-C", str(root)]
    try:
        top = _output([*git, "rev-parse", "--show-toplevel"])
        if Path(top).resolve() != root:
            return "unknown"
        return _output([*git, "describe", "--always", "--dirty"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine() -> Row:
    """What a figure depends on: processor, threads and versions. Nothing that names a machine."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def median(values: Iterable[float]) -> float:
    """The middle value; NaN without values."""
    found = list(values)
    return statistics.median(found) if found else float("nan")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The option that every script has."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON; - for standard output"
    )


def console_for(json_file: str | None) -> Console:
    """Where people read: standard error if the JSON takes standard output."""
    console = Console(stderr=json_file == "-")
    return console if console.is_terminal else Console(stderr=console.stderr, width=_FILE_WIDTH)


_FILE_WIDTH = 120


def emit(result: Result, columns: Sequence[Column], json_file: str | None) -> int:
    """Print the table, the ratios and the goals, write the JSON; returns the exit status."""
    console = console_for(json_file)
    console.print(_table(result, columns))
    for name, value in result.ratios.items():
        console.print(f"{name}: {value:.4g}", highlight=False)
    for goal in result.goals:
        console.print(str(goal), highlight=False)
    if json_file is not None:
        text = json.dumps(result.to_json(), indent=1) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            Path(json_file).write_text(text, encoding="utf-8")
    return result.exit_status


def _table(result: Result, columns: Sequence[Column]) -> Table:
    table = Table(title=result.name, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        is_number = bool(result.rows) and isinstance(result.rows[0].get(column.key), int | float)
        table.add_column(
            column.heading,
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for row in result.rows:
        table.add_row(*(column.show(row[column.key]) for column in columns))
    return table
