"""How far a command is, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["progress_bar"]


def progress_bar(console: Console, *, with_time: bool = True) -> Progress:
    """A bar with how many of how many are done, gone when all are.

    with_time: with the time that is left as well; for steps that take about as long as one another.
    """
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
    ]
    if with_time:
        columns.append(TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)
