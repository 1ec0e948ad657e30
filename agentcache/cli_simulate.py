"""`agentcache simulate`: what policies would reuse of a trace, without a model."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from agentcache.cli_options import JsonFile
from agentcache.cli_progress import progress_bar
from agentcache.errors import AgentCacheError, ConfigError, TraceError
from agentcache.simulate.results import Setup
from agentcache.simulate.runs import Budget, Grid, parse_budget, simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.simulate.read import ChatEncoder
    from agentcache.simulate.results import SimResult
    from agentcache.simulate.runs import Progress as Tell
    from agentcache.simulate.trace import Trace
    from agentcache.types import ModelShape

__all__ = ["register"]

_DEFAULT_POLICIES = "auto,lru"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("simulate")(run)


def run(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces or recorded runs, plain or .gz, or their folders.")
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="Policies, and the bounds unlimited, clairvoyant-evict, clairvoyant, bound; "
            "with commas between."
        ),
    ] = _DEFAULT_POLICIES,
    admission: Annotated[
        str,
        typer.Option(help="structural, marconi, every-block or every-block:16; with commas."),
    ] = "structural",
    budget: Annotated[
        str, typer.Option(help='Shares of the need such as "10%", or bytes, or none; with commas.')
    ] = "5%,10%,20%",
    shape: Annotated[
        str,
        typer.Option(
            help="A model's config file or folder, or a preset: marconi-7b, ratio-1:2 to "
            "ratio-1:8, n16 to n128; joined by +."
        ),
    ] = "marconi-7b",
    hints: Annotated[
        bool, typer.Option("--hints/--no-hints", help="Tell what session handles know.")
    ] = True,
    page_size: Annotated[int, typer.Option(help="Tokens of a page of KV.")] = 16,
    charge_running: Annotated[
        bool,
        typer.Option("--charge-running", help="Running requests take their memory of the budget."),
    ] = False,
    limit: Annotated[
        int | None, typer.Option(help="Only the first N requests of each trace.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Recorded runs open at once.")] = 8,
    seed: Annotated[int, typer.Option(help="Of times that a trace lacks.")] = 0,
    json_file: JsonFile = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write one self-contained HTML page, with bounds and ablations."),
    ] = None,
) -> None:
    """Say what cache policies would reuse of a trace; no model is needed."""
    console = Console(stderr=json_file == "-")
    try:
        base = Setup(hints=hints, page_size=page_size, charge_running=charge_running, seed=seed)
        grid = Grid(
            _split(policy, "policy"),
            _split(admission, "admission"),
            [parse_budget(each) for each in _split(budget, "budget")],
            base,
        )
        _check_counts(limit, concurrency)
        sizes = _shape(shape)
        read = _read(console, traces, limit, concurrency, seed)
        results, more = _simulate(console, read, sizes, grid, with_more=report is not None)
        _write_json(results, json_file)
        if report is not None:
            _write_report(report, [*results, *more], shape, read)
    except AgentCacheError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, ConfigError | TraceError) else 1) from error
    _show(console, read, results)
    raise typer.Exit(int(any(trace.problems for trace in read)))


def _split(text: str, name: str) -> list[str]:
    """Names with commas between, each once."""
    found = list(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not found:
        raise ConfigError(f"{name} is empty; name at least one, with commas between")
    return found


def _check_counts(limit: int | None, concurrency: int) -> None:
    for name, value in (("limit", limit), ("concurrency", concurrency)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it has to be at least 1")


def _shape(text: str) -> ModelShape:
    from agentcache.simulate.shapes import load_shape

    def read_model(name: str) -> ModelShape:
        from agentcache.engine.config_shape import shape_by_config

        return shape_by_config(name)

    return load_shape(text, read_model)


def _read(
    console: Console, paths: list[Path], limit: int | None, concurrency: int, seed: int
) -> list[Trace]:
    from agentcache.simulate.read import read_traces

    with console.status("reading"):
        return read_traces(paths, tokens=_encoder, limit=limit, concurrency=concurrency, seed=seed)


def _encoder() -> ChatEncoder:
    """The embedded model's chat format, for traces of text."""
    from agentcache.engine.chat import ChatFormat
    from agentcache.engine.loader import load_model
    from agentcache.engine.tokenizer import Tokenizer
    from agentcache.simulate.read import ChatEncoder

    tokenizer = Tokenizer(load_model("tiny-hybrid").tokenizer)
    return ChatEncoder(ChatFormat(tokenizer), end_id=tokenizer.source.eos_token_id)


def _simulate(
    console: Console, traces: list[Trace], shape: ModelShape, grid: Grid, *, with_more: bool
) -> tuple[list[SimResult], list[SimResult]]:
    """What was asked for, and what the report has beside it."""
    results: list[SimResult] = []
    more: list[SimResult] = []
    with _progress(console) as tell:
        for trace in traces:
            results += simulate(trace, shape, grid, tell)
            for extra in _more(grid) if with_more else ():
                more += simulate(trace, shape, extra, tell)
    return results, more


def _more(grid: Grid) -> Iterator[Grid]:
    """Bounds and ablations that were not asked for."""
    from agentcache.simulate.bounds import BOUNDS

    limited = [each for each in grid.budgets if each != Budget()]
    if not limited:
        return
    bounds = [each for each in ("clairvoyant", "bound") if each not in grid.policies]
    if bounds:
        yield Grid(bounds, grid.admissions[:1], limited, grid.base)
    policies = [each for each in grid.policies if each not in BOUNDS]
    if not policies:
        return
    others = [each for each in ("structural", "marconi") if each not in grid.admissions]
    if others:
        yield Grid(policies, others, limited, grid.base)
    unhinted = replace(grid.base, hints=not grid.base.hints)
    yield Grid(policies, grid.admissions[:1], limited, unhinted)


@contextmanager
def _progress(console: Console) -> Iterator[Tell]:
    with progress_bar(console) as progress:
        task = progress.add_task("", total=None)

        def tell(title: str, done: int, total: int) -> None:
            progress.update(task, description=escape(title), completed=done, total=total)

        yield tell


def _write_json(results: list[SimResult], json_file: str | None) -> None:
    if json_file is None:
        return
    text = json.dumps([each.to_json() for each in results], indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(json_file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {json_file}: {error.strerror}") from error


def _write_report(path: Path, results: list[SimResult], shape: str, traces: list[Trace]) -> None:
    from agentcache.simulate.report import write_report

    notes = [str(problem) for trace in traces for problem in trace.problems]
    write_report(results, path, shape=shape, notes=notes)


_MOST_SHOWN = 5
"""Problems of a trace that the terminal lists one by one."""


def _show(console: Console, traces: list[Trace], results: list[SimResult]) -> None:
    from agentcache.simulate.table import result_tables

    for trace in traces:
        for problem in trace.problems[:_MOST_SHOWN]:
            console.print(f"[yellow]left out:[/yellow] {escape(str(problem))}", soft_wrap=True)
        left = len(trace.problems) - _MOST_SHOWN
        if left > 0:
            console.print(f"{escape(trace.name)}: {left:,} more rows were left out")
    for table in result_tables(results, console.width):
        console.print(table)
