"""`agentcache sessions`: what a store holds, turn by turn, and how to take it elsewhere."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentcache.cli_options import JsonFile
from agentcache.errors import AgentCacheError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.store.trajectories import Store, StoredCall, StoredSession, StoredTurn

__all__ = ["register"]

sessions = typer.Typer(
    help="Sessions that a runtime stored: list, show, export for replay, prune.",
    no_args_is_help=True,
)

_Url = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="AGENTCACHE_STORE",
        help="File or database URL that Runtime(store=...) wrote to.",
    ),
]
_Tenant = Annotated[str | None, typer.Option(help="Only sessions of this tenant.")]
_DEFAULT = "runs.db"
_TEXTS = ("id", "tenant", "parent", "model")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(sessions, name="sessions")


@sessions.command("list")
def list_sessions(
    store: _Url = _DEFAULT, tenant: _Tenant = None, json_file: JsonFile = None
) -> None:
    """List sessions with their turns and how much of their prompts was reused."""
    console = Console(stderr=json_file == "-")
    with _failing(), _opened(store) as opened:
        found = _sessions(opened, None, tenant)
        _write_json([asdict(each) for each in found], json_file)
    console.print(_session_table(found) if found else "No sessions are stored.")


@sessions.command()
def show(
    id: Annotated[str, typer.Argument(help="Id of the session.")],
    store: _Url = _DEFAULT,
    tenant: _Tenant = None,
    json_file: JsonFile = None,
) -> None:
    """Show a session's turns: cached against computed tokens, and in words why no more was."""
    console = Console(stderr=json_file == "-")
    with _failing(), _opened(store) as opened:
        found = [(each, opened.turns(each)) for each in _named(opened, id, tenant)]
        values = [{**asdict(one), "turns": [asdict(t) for t in turns]} for one, turns in found]
        _write_json(values, json_file)
    for session, turns in found:
        _show(console, session, turns)


@sessions.command()
def export(
    id: Annotated[str | None, typer.Argument(help="Id of the session; or give --all.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Export every session.")] = False,
    out: Annotated[
        str, typer.Option(help="File to write, named .jsonl for replay; - for standard output.")
    ] = "-",
    store: _Url = _DEFAULT,
    tenant: _Tenant = None,
) -> None:
    """Export sessions as calls JSONL, which `agentcache replay` reads."""
    console = Console(stderr=True)
    with _failing(), _opened(store) as opened:
        if (id is None) != every:
            raise ConfigError("name a session, or give --all; one of the two")
        chosen = _sessions(opened, None, tenant) if id is None else _named(opened, id, tenant)
        with _writable(out) as file:
            num_calls, left_out = _export(opened, chosen, file)
    console.print(f"{num_calls:,} calls of {len(chosen):,} sessions exported")
    for reason, count in left_out.items():
        console.print(f"[yellow]left out:[/yellow] {count:,} calls {reason}", soft_wrap=True)
    raise typer.Exit(1 if left_out else 0)


@sessions.command()
def prune(
    older_than: Annotated[
        str | None, typer.Option(help='Sessions without a turn for so long: "30d", "12h", "2w".')
    ] = None,
    closed: Annotated[bool, typer.Option("--closed", help="Sessions that are closed.")] = False,
    store: _Url = _DEFAULT,
    json_file: JsonFile = None,
) -> None:
    """Delete sessions; with both options, those of which both is true."""
    console = Console(stderr=json_file == "-")
    with _failing(), _opened(store) as opened:
        before = None if older_than is None else time.time() - _duration(older_than)
        if before is None and not closed:
            raise ConfigError("say which: --older-than 30d, --closed, or both")
        num_gone = opened.prune(closed=closed, before=before)
        _write_json({"pruned": num_gone}, json_file)
    console.print(f"{num_gone:,} sessions deleted")


@contextmanager
def _failing() -> Iterator[None]:
    """Errors as one line and an exit status."""
    try:
        yield
    except AgentCacheError as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


def _opened(url: str) -> Store:
    from agentcache.store.trajectories import Store

    return Store(url, create=False)


def _sessions(store: Store, id: str | None, tenant: str | None) -> list[StoredSession]:
    return store.sessions(id, tenants=None if tenant is None else (tenant,))


def _named(store: Store, id: str, tenant: str | None) -> list[StoredSession]:
    """Every opening of a session. Raises ConfigError where there is none."""
    found = _sessions(store, id, tenant)
    if not found:
        raise ConfigError(f"no session {_shown(id)!r} is stored; `agentcache sessions list` tells")
    return found


def _duration(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text)
    if match is None:
        raise ConfigError(f'{text!r} is no duration; write a number and a unit, such as "30d"')
    return float(match[1]) * _SECONDS[match[2]]


def _export(store: Store, chosen: list[StoredSession], file: TextIO) -> tuple[int, dict[str, int]]:
    """Write calls, one a line; how many, and by reason how many had to be left out."""
    names: dict[str, int] = {}
    num_calls, left_out = 0, dict[str, int]()
    for session in chosen:
        names[session.id] = names.get(session.id, 0) + 1
        again = names[session.id]
        name = session.id if again == 1 else f"{session.id}#{again}"
        for call in store.calls(session):
            reason = _unreplayable(call)
            if reason is not None:
                left_out[reason] = left_out.get(reason, 0) + 1
                continue
            file.write(json.dumps(_row(name, session, call)) + "\n")
            num_calls += 1
    return num_calls, left_out


def _unreplayable(call: StoredCall) -> str | None:
    if not call.messages:
        return "were made of token ids, and have no messages"
    if call.answer is None:
        return "only filled the cache, and have no reply"
    return None


def _row(name: str, session: StoredSession, call: StoredCall) -> dict[str, Any]:
    """A line of calls JSONL; `replay` leaves `usage` alone."""
    usage = call.turn.usage
    row: dict[str, Any] = {"trajectory": name}
    if session.parent is not None:
        row["parent"] = session.parent
    row["at"] = call.turn.created - usage.total_s
    if call.tools is not None:
        row["tools"] = call.tools
    return {
        **row,
        "messages": call.messages,
        "answer": call.answer,
        "answer_ids": call.reply_ids.tolist(),
        "fingerprint": session.fingerprint,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.computed_tokens,
            "output_tokens": usage.output_tokens,
        },
    }


@contextmanager
def _writable(out: str) -> Iterator[TextIO]:
    """Raises ConfigError where nothing can be written there."""
    try:
        with (
            nullcontext(sys.stdout)
            if out == "-"
            else Path(out).open("w", encoding="utf-8", newline="\n") as file
        ):
            yield file
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error


def _write_json(value: Any, json_file: str | None) -> None:
    if json_file is None:
        return
    with _writable(json_file) as file:
        file.write(json.dumps(value, indent=1) + "\n")


def _session_table(found: list[StoredSession]) -> Table:
    """Sessions in a row each; tenants and parents only where there are any."""
    table = Table(header_style="bold")
    texts = [name for name in _TEXTS if any(getattr(each, name) is not None for each in found)]
    for name in texts:
        table.add_column("session" if name == "id" else name, overflow="fold")
    for name in ("turns", "prompt", "cached", "output"):
        table.add_column(name, justify="right")
    for name in ("last turn", "closed"):
        table.add_column(name)
    for each in found:
        table.add_row(
            *(escape(_shown(getattr(each, name) or "")) for name in texts),
            f"{each.turns:,}",
            f"{each.prompt_tokens:,}",
            f"{each.cached_tokens / max(1, each.prompt_tokens):.1%}",
            f"{each.output_tokens:,}",
            _date(each.last),
            "" if each.closed is None else "yes",
        )
    return table


def _show(console: Console, session: StoredSession, turns: list[StoredTurn]) -> None:
    of = "" if session.tenant is None else f" of {_shown(session.tenant)}"
    forked = "" if session.parent is None else f", under {_shown(session.parent)}"
    heading = f"{_shown(session.id)}{of}{forked}, from {_date(session.created)}"
    console.print(escape(heading), style="bold", soft_wrap=True)
    table = Table(header_style="bold")
    for name in ("call", "turn", "tip", "messages", "prompt", "cached", "computed", "output"):
        table.add_column(name, justify="right")
    table.add_column("ttft", justify="right")
    table.add_column("ended")
    for turn in turns:
        usage = turn.usage
        table.add_row(
            str(turn.number),
            str(turn.index),
            "" if turn.tip is None else str(turn.tip),
            str(turn.messages),
            f"{usage.prompt_tokens:,}",
            f"{usage.cached_tokens:,}",
            f"{usage.computed_tokens:,}",
            f"{usage.output_tokens:,}",
            f"{usage.ttft_s * 1000:.0f} ms",
            turn.finish_reason,
        )
    console.print(table)
    for turn in turns:
        if turn.miss is not None:
            console.print(f"Call {turn.number}:", style="bold")
            console.print(escape(_in_words(turn.miss)), soft_wrap=True, highlight=False)


def _in_words(miss: dict[str, Any]) -> str:
    from agentcache.session.turn import MissReport

    try:
        return _printable(str(MissReport.from_json(miss)))
    except TypeError:  # of another version
        return json.dumps(miss)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _shown(text: str) -> str:
    """Fit for a table: not too long, and nothing a terminal would act on."""
    short = text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
