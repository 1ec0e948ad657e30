"""One runtime for all tests of the server, and a server per module on a port of this machine."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from agentcache import CacheConfig, Runtime

pytest.importorskip("aiohttp")
from agentcache.integrations.server.config import ServerConfig
from agentcache.integrations.server.lifecycle import make_server, served
from agentcache.integrations.server.threads import NUM_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agentcache.integrations.server.app import Server
    from agentcache.integrations.server.threads import Threads

MODEL = "tiny-hybrid"


@dataclass(frozen=True)
class Served:
    """A running server and how to reach it."""

    url: str
    server: Server

    @property
    def runtime(self) -> Runtime:
        return self.server.runtime

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            given = options.get("headers") or {}
            options["headers"] = {"content-type": "application/json", **given}
            options["content"] = json.dumps(body)  # lone surrogates as escapes
        return httpx.post(f"{self.url}{path}", timeout=60, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, **options)

    def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        """A short chat call of one message."""
        headers = fields.pop("headers", None)
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        return self.post("/v1/chat/completions", {**body, **fields}, headers=headers)

    def idle(self) -> bool:
        """Whether nothing runs and everything has been given back."""
        stats = self.runtime.stats()
        return self.server.admission.num_calls == 0 and stats["leases"] == 0


@pytest.fixture(scope="session")
def busy() -> Callable[[Threads], Any]:
    """`with busy(server.threads)`: all of them have something to do while the block runs."""

    @contextmanager
    def hold(threads: Threads) -> Iterator[None]:
        gate, begun = threading.Event(), threading.Semaphore(0)
        late: list[str] = []

        def wait() -> None:
            begun.release()
            if not gate.wait(10):
                late.append("the block waited for a thread")

        for _ in range(NUM_THREADS):
            threads.later(wait)
        try:
            for _ in range(NUM_THREADS):
                assert begun.acquire(timeout=20)
            yield
            assert not late
        finally:
            gate.set()

    return hold


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    with Runtime.load(MODEL, cache=CacheConfig(budget="128MiB", max_running=4)) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def start(runtime: Runtime) -> Callable[..., Any]:
    """Starts servers over the one runtime: `with start(max_queue=0) as server`."""

    @contextmanager
    def begin(*, tracer_provider: Any = None, **settings: Any) -> Iterator[Served]:
        config = ServerConfig(port=0, **{"model": MODEL, "grace_s": 5.0, **settings})
        server = make_server(runtime, config, tracer_provider=tracer_provider)
        with served(server) as url:
            yield Served(url, server)

    return begin


@pytest.fixture(scope="module")
def served_here(start: Callable[..., Any]) -> Iterator[Served]:
    """The module's own server."""
    with start() as server:
        yield server
