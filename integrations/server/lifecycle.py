"""A server from its parts, and how it begins and ends."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentcache import ConfigError
from agentcache.integrations.server import (
    anthropic,
    completions,
    info,
    openai_chat,
    page,
    responses,
    sessions_api,
)
from agentcache.integrations.server.app import Server
from agentcache.integrations.server.config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from agentcache import Runtime
    from agentcache.integrations.server.routes import Route

__all__ = ["all_routes", "make_server", "serve", "served", "serving"]


def make_server(
    runtime: Runtime, config: ServerConfig | None = None, *, tracer_provider: Any = None
) -> Server:
    """All routes over a runtime; `.app()` is the aiohttp application."""
    config = config or ServerConfig()
    return Server(runtime, config, all_routes(config), tracer_provider=tracer_provider)


def all_routes(config: ServerConfig) -> list[Route]:
    """Everything a server answers."""
    return [
        *openai_chat.routes(),
        *completions.routes(),
        *responses.routes(config.max_sessions, config.max_response_bytes),
        *anthropic.routes(),
        *info.routes(),
        *sessions_api.routes(),
        *page.routes(),
    ]


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    """Listen while the block runs; the server's URL. At its end running requests get their grace.

    Raises ConfigError for an address that cannot be had.
    """
    config = server.config
    # a client that hangs up cancels its handler, which gives everything back
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port)
    try:
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror}"
            ) from error
        host, port = runner.addresses[0][:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        await server.admission.drain(config.grace_s)
    finally:
        await runner.cleanup()
        server.threads.close()


async def serve(
    server: Server, stop: asyncio.Event, *, started: Callable[[str], None] = lambda url: None
) -> None:
    """Listen until `stop` is set, then end gracefully. started: is told the URL."""
    async with listening(server) as url:
        started(url)
        await stop.wait()


@contextmanager
def serving(
    runtime: Runtime, config: ServerConfig | None = None, *, tracer_provider: Any = None
) -> Iterator[str]:
    """Serve from a thread of its own while the block runs; its URL.

    >>> with serving(rt, ServerConfig(port=0)) as url:                          # doctest: +SKIP
    ...     client = OpenAI(base_url=f"{url}/v1", api_key="-")
    """
    server = make_server(runtime, config, tracer_provider=tracer_provider)
    with served(server) as url:
        yield url


@contextmanager
def served(server: Server) -> Iterator[str]:
    """`serving` for a server that was made before."""
    background = _Background(server)
    try:
        yield background.wait_for_url()
    finally:
        background.end()


class _Background:
    """An event loop with one server in it, on a thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_to_end = asyncio.Event()
        self._ready = threading.Event()
        self._url: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="agentcache-server", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # told to the thread that waits for it
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await serve(self._server, self._told_to_end, started=self._note_url)

    def _note_url(self, url: str) -> None:
        self._url = url
        self._ready.set()

    def wait_for_url(self) -> str:
        """The URL, once it listens. Raises what kept it from that."""
        self._ready.wait()
        if self._url is None:
            assert self._error is not None
            raise self._error
        return self._url

    def end(self) -> None:
        """Stop gracefully and wait for it. Raises what it ended with."""
        if self._loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # it has ended in this moment
                self._loop.call_soon_threadsafe(self._told_to_end.set)
        self._thread.join()
        if self._error is not None and self._url is not None:
            raise self._error
