"""Recorded runs for the benchmarks that replay them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentcache.cli import SAMPLE
from agentcache.replay.trace import ReadResult, read_paths

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from agentcache.replay.results import ReplayResult
    from agentcache.replayer import Replayer

__all__ = ["add_runs_options", "first_runs", "read_runs", "replay"]

_COLLECTION = (
    Path(__file__)
    .resolve()
    .parents[4]
    .joinpath("shared", "data", "trajectories", "mini-swe-agent", "verified-gemini-3-pro")
)


def add_runs_options(parser: argparse.ArgumentParser, limit: int) -> None:
    """Options that say which runs are replayed."""
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="recorded runs; by default the collection beside the checkout, else the sample",
    )
    parser.add_argument("--model", default="tiny-hybrid", help="embedded model, folder or Hub id")
    parser.add_argument("--limit", type=int, default=limit, help="number of runs")
    parser.add_argument("--max-turns", type=int, help="only the first calls of each run")


def read_runs(folder: Path | None, console: Console) -> ReadResult:
    """All runs of a folder; says which folder is taken where none was named."""
    if folder is None:
        folder = _COLLECTION if _COLLECTION.is_dir() else SAMPLE
        what = "the collection beside the checkout" if folder == _COLLECTION else "the sample"
        console.print(f"runs: {what} ({folder.name})", highlight=False)
    return read_paths([folder])


def first_runs(read: ReadResult, limit: int) -> ReadResult:
    """Only the first runs."""
    return replace(read, trajectories=read.trajectories[:limit])


def replay(
    replayer: Replayer, console: Console, title: str, *, budget: int | None, policy: str
) -> ReplayResult:
    """One replay with a progress bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        return replayer.run(
            budget=budget,
            policy=policy,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
