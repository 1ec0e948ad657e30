"""The command line. Exit status: 0 all done, 1 something rejected or not equal, 2 wrong usage."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from agentcache.chat.command import register as add_chat
from agentcache.cli_options import (
    Adapter,
    Backend,
    JsonFile,
    Model,
    Policy,
    Threads,
    Unproven,
    WeightFormat,
)
from agentcache.cli_progress import progress_bar
from agentcache.errors import AgentCacheError, ConfigError, ModelError
from agentcache.replay.results import ReplayResult, summary_table, trajectory_table

if TYPE_CHECKING:
    from agentcache.engine.doctor import Diagnosis
    from agentcache.replay.trace import ReadResult
    from agentcache.types import BackendName
    from agentcache.types import WeightFormat as WeightFormatName

__all__ = ["app", "main"]

app = typer.Typer(
    name="agentcache",
    help="Hybrid language models in process, with session-aware prefix caching.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SAMPLE = Path(__file__).with_name("data") / "sample"
"""Recorded runs that come with the package."""


@app.callback()
def _root() -> None:
    """Hybrid language models in process, with session-aware prefix caching."""


@app.command()
def replay(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Files or folders of recorded runs; by default the bundled sample."),
    ] = None,
    model: Model = "tiny-hybrid",
    adapter: Adapter = None,
    unproven: Unproven = False,
    backend: Backend = "auto",
    weight_format: WeightFormat = "unchanged",
    budget: Annotated[
        str | None,
        typer.Option(help='"512MiB", "2GB", or a share of the need such as "10%".'),
    ] = None,
    policy: Policy = "auto",
    concurrency: Annotated[
        int, typer.Option(help="Runs open at once, interleaved at their recorded pace.")
    ] = 1,
    limit: Annotated[int | None, typer.Option(help="Replay only the first N runs.")] = None,
    max_turns: Annotated[
        int | None, typer.Option(help="Replay only the first N calls of a run.")
    ] = None,
    stepwise: Annotated[
        bool, typer.Option("--stepwise", help="Absorb answers token by token through decoding.")
    ] = False,
    verify: Annotated[
        int, typer.Option(help="Recompute N calls cold and compare ids, logits and states.")
    ] = 0,
    cold: Annotated[int, typer.Option(help="Time N calls without the cache.")] = 0,
    threads: Threads = None,
    json_file: JsonFile = None,
    report: Annotated[Path | None, typer.Option(help="Write one self-contained HTML page.")] = None,
) -> None:
    """Replay recorded agent runs through a hybrid model, one session handle each."""
    # With the JSON on standard output, everything for people goes to standard error.
    console = Console(stderr=json_file == "-")
    try:
        result = _replay(
            console,
            paths or [SAMPLE],
            model,
            budget,
            policy,
            limit,
            threads,
            adapter,
            unproven,
            backend,
            weight_format,
            concurrency=concurrency,
            max_turns=max_turns,
            stepwise=stepwise,
            verify=verify,
            cold=cold,
        )
        _write(result, json_file, report)
    except (ConfigError, ModelError) as error:
        raise _usage(error) from error
    except AgentCacheError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
    _show(console, result)
    raise typer.Exit(0 if _is_clean(result) else 1)


@app.command()
def explain(
    result: Annotated[Path, typer.Argument(help="What `agentcache replay --json FILE` wrote.")],
    trajectory: Annotated[
        str | None, typer.Option(help="Only calls of this run; part of its name is enough.")
    ] = None,
    call: Annotated[int | None, typer.Option(help="Only this call of a run, from 0.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the reports as JSON; - for standard output.")
    ] = None,
) -> None:
    """Say in words why calls of a replay did not reuse more of their prompts."""
    console = Console(stderr=json_file == "-")
    try:
        missed = _missed(result, trajectory, call)
        _write_json([record for record, _, _ in missed], json_file)
    except ConfigError as error:
        raise _usage(error) from error
    for _, heading, words in missed:
        console.print(escape(heading), style="bold", soft_wrap=True)
        console.print(escape(words), soft_wrap=True)
    if not missed:
        console.print("Every call reused all of its prompt but the last few tokens.")


@app.command()
def doctor(
    families: Annotated[
        bool, typer.Option("--families", help="Probe a tiny model of every known family.")
    ] = False,
    family: Annotated[
        list[str] | None, typer.Option(help="Probe this family; may be given again.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Probe an embedded model, folder, or downloaded Hub id; tiny-hybrid if nothing "
            "is asked for."
        ),
    ] = None,
    adapter: Adapter = None,
    unproven: Unproven = False,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Check that a model resumed from cached data computes what it computes without a cache."""
    console = Console(stderr=json_file == "-")
    try:
        diagnoses = _diagnose(
            console, families, family or [], model, threads, adapter=adapter, unproven=unproven
        )
        _write_json([each.to_json() for each in diagnoses], json_file)
    except (ConfigError, ModelError) as error:
        raise _usage(error) from error
    _show_diagnoses(console, diagnoses)
    raise typer.Exit(0 if all(each.ok for each in diagnoses) else 1)


def _diagnose(
    console: Console,
    every: bool,
    families: list[str],
    model: str | None,
    threads: int | None,
    *,
    adapter: str | None,
    unproven: bool,
) -> list[Diagnosis]:
    """Probe what was asked for, with a progress bar."""
    if adapter is not None and model is None and (every or families):
        raise ConfigError(f"an adapter, {adapter!r}, but no model to merge it into; give --model")
    with console.status("loading"):
        from agentcache.engine.doctor import diagnose_family, diagnose_model
        from agentcache.engine.families.tiny import VARIANTS
        from agentcache.engine.threads import use_threads

    use_threads(threads)
    unknown = [name for name in families if name not in VARIANTS]
    if unknown:
        raise ConfigError(f"no family {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    named = dict.fromkeys([*(VARIANTS if every else ()), *families])
    jobs = [(name, partial(diagnose_family, name, unproven=unproven)) for name in named]
    if model is not None or not jobs:
        name = model or "tiny-hybrid"
        job = partial(diagnose_model, name, adapter=adapter, unproven=unproven)
        jobs.append((name, job))
    with progress_bar(console, with_time=False) as progress:
        task = progress.add_task("", total=len(jobs))
        done = []
        for name, diagnose in jobs:
            progress.update(task, description=f"probing {escape(name)}")
            done += diagnose()
            progress.advance(task)
    return done


def _show_diagnoses(console: Console, diagnoses: list[Diagnosis]) -> None:
    from agentcache.engine.doctor import diagnosis_table

    console.print(diagnosis_table(diagnoses, console.width))
    for each in diagnoses:
        if each.reason is not None:
            console.print(f"[red]{escape(each.label)}:[/red] {escape(each.reason)}", soft_wrap=True)
        if each.doubt is not None:
            console.print(
                f"[yellow]{escape(each.label)}:[/yellow] admitted with --unproven alone: "
                f"{escape(each.doubt)}",
                soft_wrap=True,
            )


_Missed = tuple[dict[str, Any], str, str]
"""A call as it was recorded, a heading for it, and its miss report in words."""


def _missed(path: Path, trajectory: str | None, call: int | None) -> list[_Missed]:
    """The chosen calls that have a miss report. Raises ConfigError where there is nothing such."""
    try:
        calls = json.loads(path.read_text(encoding="utf-8"))["calls"]
        chosen = [
            each
            for each in calls
            if (trajectory is None or trajectory in each["trajectory"])
            and (call is None or call == each["call"])
        ]
        if not chosen:
            named = ", ".join(dict.fromkeys(each["trajectory"] for each in calls)) or "none"
            raise ConfigError(f"no such call in {path}; its runs are: {named}")
        return [
            (each, _heading(each), _in_words(each["miss"]))
            for each in chosen
            if each["miss"] is not None
        ]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except KeyError as error:
        raise ConfigError(f"{path} is {_NO_REPLAY}: {error} is missing") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is {_NO_REPLAY}: {error}") from error


_NO_REPLAY = "not what `agentcache replay --json` writes"


def _in_words(miss: dict[str, Any]) -> str:
    from agentcache.session.turn import MissReport

    return str(MissReport.from_json(miss))


def _heading(call: dict[str, Any]) -> str:
    share = call["cached_tokens"] / max(1, call["prompt_tokens"])
    return (
        f"{call['trajectory']}, call {call['call']}: {call['cached_tokens']:,} of "
        f"{call['prompt_tokens']:,} prompt tokens reused ({share:.1%})"
    )


def _usage(error: AgentCacheError) -> typer.Exit:
    Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
    return typer.Exit(2)


def _replay(
    console: Console,
    paths: list[Path],
    model: str,
    budget: str | None,
    policy: str,
    limit: int | None,
    threads: int | None,
    adapter: str | None,
    unproven: bool,
    backend: BackendName,
    weight_format: WeightFormatName,
    **options: int | bool | None,
) -> ReplayResult:
    """Read, load, replay with a progress bar."""
    from dataclasses import replace

    from agentcache.config import CacheConfig
    from agentcache.policy.eviction import make_policy
    from agentcache.replay.trace import read_paths
    from agentcache.replayer import Replayer, ReplayOptions

    make_policy(policy)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it has to be at least 1")
    if budget is not None and not budget.strip().endswith("%"):
        CacheConfig(budget=budget)
    settings = ReplayOptions(**options)  # type: ignore[arg-type]
    read = read_paths(paths)
    _check_any(read, paths)
    read = replace(read, trajectories=read.trajectories[:limit])
    with console.status(f"loading {model}"):
        from agentcache.engine.threads import use_threads

        use_threads(threads)
        replayer = Replayer(
            model,
            read,
            settings,
            adapter=adapter,
            unproven=unproven,
            backend=backend,
            weight_format=weight_format,
        )
    with progress_bar(console) as progress:
        task = progress.add_task("replaying calls", total=None)
        return replayer.run(
            budget=budget,
            policy=policy,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _check_any(read: ReadResult, paths: list[Path]) -> None:
    """Raises ConfigError where nothing that was read can be replayed, and says why."""
    if read.trajectories:
        return
    reasons = [*(str(error) for _, error in read.rejected), *read.warnings]
    if not reasons:
        reasons = [f"there is no recorded run in {', '.join(map(str, paths))}"]
    first = "" if len(reasons) == 1 else f" for {len(reasons):,} reasons, the first"
    raise ConfigError(f"nothing to replay{first}: {reasons[0]}")


def _write_json(value: Any, json_file: str | None) -> None:
    """Write to a file, or for "-" to standard output. Raises ConfigError where that fails."""
    if json_file is None:
        return
    text = json.dumps(value, indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(json_file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {json_file}: {error.strerror}") from error


def _write(result: ReplayResult, json_file: str | None, report: Path | None) -> None:
    if json_file is not None:
        _write_json(result.to_json(), json_file)
    if report is not None:
        from agentcache.replay.report import write_report

        write_report(result, report)


def _show(console: Console, result: ReplayResult) -> None:
    for note in result.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)
    for rejected in result.rejected:
        console.print(f"[red]rejected:[/red] {escape(rejected)}", soft_wrap=True)
    table = trajectory_table(result)
    if table is not None:
        console.print(table)
    console.print(summary_table(result))


def _is_clean(result: ReplayResult) -> bool:
    return not result.rejected and result.verify.passed(result.verify_tolerance)


_ADDED = (
    "agentcache.cli_simulate",
    "agentcache.integrations.server.command",
    "agentcache.store_cli",
)
"""Modules above or beside this one that bring commands, by name, so that nothing here depends on
them; each has `register(app)` and imports what may be missing only when its command runs."""

add_chat(app)
for _name in _ADDED:
    import_module(_name).register(app)


def main() -> None:
    """Entry point of the `agentcache` command."""
    # what transformers lacks for speed on its own is none of the user's concern here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    app()
