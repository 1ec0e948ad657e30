"""`agentcache chat`. Imported by the command line, so torch is imported only once it runs."""

from __future__ import annotations

import io
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentcache.chat.conversation import Conversation
from agentcache.chat.screen import Screen
from agentcache.chat.shell import Shell
from agentcache.chat.toolbox import SCHEMAS
from agentcache.cli_options import Adapter, Backend, Budget, Model, Threads, Unproven, WeightFormat
from agentcache.config import CacheConfig
from agentcache.errors import ConfigError, InvalidRequest, ModelError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import TextIO

    from agentcache.runtime import Runtime
    from agentcache.session import CallOptions

__all__ = ["chat", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(chat)


def chat(
    model: Model = "tiny-agent",
    adapter: Adapter = None,
    unproven: Unproven = False,
    backend: Backend = "auto",
    weight_format: WeightFormat = "unchanged",
    budget: Budget = "512MiB",
    threads: Threads = None,
    session: Annotated[str, typer.Option(help="Name of the first session.")] = "chat",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with a list of tools in OpenAI form; /result gives their results. By "
            "default tiny-agent gets a calculator and heights of mountains, which the chat runs."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a reply.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most likely token, 1 samples as the model says.")
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of sampling; the same seed and lines give the same replies.")
    ] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every turn with a run without the cache.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write a line of JSON per turn; - for standard output."),
    ] = None,
) -> None:
    """Chat with a model; each turn says how much of its prompt was cached.

    Lines are read from standard input; those that begin with a slash are commands, which /help
    lists. Without a terminal there are no prompts and no colours.
    """
    _tolerate_encodings()
    to_stdout = json_file == "-"
    shown_on = sys.stderr if to_stdout else sys.stdout
    is_terminal = sys.stdin.isatty() and shown_on.isatty()
    screen = Screen(is_terminal=is_terminal, json_on_stdout=to_stdout)
    try:
        if not session:
            raise ConfigError("the name of the session is empty; give at least one character")
        options = _options(max_tokens, temperature, verify)
        runs_tools = tools is None and model == "tiny-agent"
        own_tools = SCHEMAS if runs_tools else None
        known_tools = own_tools if tools is None else _read_tools(tools)
        cache = CacheConfig(budget=budget)
        with _log(json_file) as log:
            runtime = _load(
                screen,
                model,
                cache=cache,
                adapter=adapter,
                unproven=unproven,
                backend=backend,
                weight_format=weight_format,
                threads=threads,
                seed=seed,
            )
            with runtime:
                talk = Conversation(
                    runtime, session, system=system, tools=known_tools, options=options
                )
                shell = Shell(
                    talk,
                    screen,
                    max_tokens=max_tokens,
                    is_asked=is_terminal,
                    runs_tools=runs_tools,
                    log=log,
                )
                if is_terminal:
                    _greet(screen, model, session)
                all_done = shell.run()
    except (ConfigError, ModelError) as error:
        screen.complain(str(error))
        raise typer.Exit(2) from error
    raise typer.Exit(0 if all_done else 1)


def _tolerate_encodings() -> None:
    """Text that the terminal's encoding lacks is shown and read with substitutes."""
    for stream, errors in (
        (sys.stdin, "replace"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _options(max_tokens: int, temperature: float, verify: bool) -> CallOptions:
    """What every call takes. Raises ConfigError for numbers that no call would take."""
    from agentcache.session.options import sampling_of

    options: CallOptions = {"max_new_tokens": max_tokens, "temperature": temperature}
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens is {max_tokens}; it has to be at least 1")
    try:
        sampling_of(options, max_tokens)
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error
    return {**options, "verify": verify}


def _read_tools(path: Path) -> list[Any]:
    """Tools of a file. Raises ConfigError where it holds none."""
    from agentcache.engine.messages import checked_tools

    try:
        tools = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tools, list):
            raise ConfigError(f"{path} holds a {type(tools).__name__}; give a list of tools")
        return list(checked_tools(tools) or [])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    except InvalidRequest as error:
        raise ConfigError(f"{path}: {error}") from error


def _log(json_file: str | None) -> AbstractContextManager[TextIO | None]:
    """Where turns are written as JSON. Raises ConfigError where that cannot be."""
    if json_file is None:
        return nullcontext()
    if json_file == "-":
        return nullcontext(sys.stdout)
    try:
        return Path(json_file).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {json_file}: {error.strerror}") from error


def _load(screen: Screen, model: str, **options: Any) -> Runtime:
    with screen.loading(model):
        from agentcache.runtime import Runtime

        return Runtime.load(model, **options)


def _greet(screen: Screen, model: str, session: str) -> None:
    from agentcache.engine.embedded import RANDOM_NAMES

    screen.remark(f"{model}, session {session} · /help lists the commands, Ctrl-D ends the chat")
    if model in RANDOM_NAMES:
        screen.remark("its weights are random: it computes honestly and answers noise")
    elif model == "tiny-agent":
        screen.remark('a toy that calls tools; ask it "Add 12 to the height of Fuji."')
