"""`agentcache serve`. Imported by the command line, so aiohttp is imported only once it runs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from agentcache import AgentCacheError, CacheConfig, ConfigError, ModelError
from agentcache.cli_options import Backend, Budget, Model, Policy, Threads, WeightFormat

if TYPE_CHECKING:
    from agentcache.integrations.server.app import Server

__all__ = ["register", "serve"]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(serve)


def serve(
    model: Model = "tiny-agent",
    name: Annotated[
        str | None, typer.Option(help="Name that clients ask for; by default that of the model.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address; any but loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    budget: Budget = "512MiB",
    policy: Policy = "auto",
    max_running: Annotated[int, typer.Option(help="Requests computed at the same time.")] = 16,
    threads: Threads = None,
    backend: Backend = "auto",
    weight_format: WeightFormat = "unchanged",
    store: Annotated[
        str | None, typer.Option(help="File or database URL to keep finished turns in.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[=TENANT]",
            envvar="AGENTCACHE_API_KEYS",
            help="A key that may ask, and whose it is; by itself a tenant of its own. May be given "
            "again; other users of this machine can read it here, but not in --api-keys.",
        ),
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help='JSON file of keys: {"KEY": "TENANT" or null}.')
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="AGENTCACHE_ADMIN_KEY", help="Key for /metrics and the page at /."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Length of a reply where the request names none.")
    ] = 1024,
    max_queue: Annotated[
        int, typer.Option(help="Requests that may wait beside those that run; more get 429.")
    ] = 64,
    max_body: Annotated[int, typer.Option(help="Largest request body in bytes.")] = 32 * 2**20,
    max_sessions: Annotated[
        int, typer.Option(help="Named sessions kept; the one unused for longest is closed.")
    ] = 10_000,
    max_response_bytes: Annotated[
        int, typer.Option(help="Bytes that /v1/responses may remember.")
    ] = 256 * 2**20,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds that a request may take.")
    ] = 600.0,
    grace: Annotated[
        float, typer.Option(help="Seconds that running requests get once it is told to end.")
    ] = 30.0,
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write URL and model as JSON once it listens; - for stdout."),
    ] = None,
) -> None:
    """Serve a model over HTTP, in the forms of OpenAI and Anthropic."""
    console = Console(stderr=True)
    try:
        _import_aiohttp()
        from agentcache.integrations.server.auth import ApiKeys
        from agentcache.integrations.server.config import ServerConfig

        config = ServerConfig(
            model=name or model,
            host=host,
            port=port,
            keys=ApiKeys.parse(api_key or (), file=api_keys, admin=admin_key),
            max_tokens=max_tokens,
            max_queue=max_queue,
            max_body_bytes=max_body,
            request_timeout_s=request_timeout,
            grace_s=grace,
            max_sessions=max_sessions,
            max_response_bytes=max_response_bytes,
        )
        cache = CacheConfig(budget=budget, policy=policy, max_running=max_running)
        options = {
            "cache": cache,
            "threads": threads,
            "store": store,
            "backend": backend,
            "weight_format": weight_format,
        }
        _run(console, model, config, json_file, **options)
    except (ConfigError, ModelError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from error
    except AgentCacheError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error


def _import_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401 - whether it is there
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{error.name} is not installed; pip install 'agentcache[server]'"
        ) from error


def _run(
    console: Console,
    model: str,
    config: Any,
    json_file: str | None,
    **options: Any,
) -> None:
    """Load, listen, and wait to be told to end."""
    from agentcache import Runtime
    from agentcache.integrations.server.lifecycle import make_server

    with console.status(f"loading {escape(model)}"):
        runtime = Runtime.load(model, **options)
    with runtime:
        server = make_server(runtime, config)

        def started(url: str) -> None:
            console.print(f"serving {escape(config.model)} on {url}", highlight=False)
            _tell({"url": url, "model": config.model}, json_file)

        asyncio.run(_until_told(server, started))


async def _until_told(server: Server, started: Any) -> None:
    """Serve until SIGINT or SIGTERM; a second one does not wait."""
    from agentcache.integrations.server.lifecycle import serve as serve_until

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def end() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    await serve_until(server, stop, started=started)


def _tell(values: dict[str, str], json_file: str | None) -> None:
    if json_file is None:
        return
    text = json.dumps(values) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(json_file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {json_file}: {error.strerror}") from error
