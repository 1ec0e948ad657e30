"""The server: a runtime behind routes, with the guards every request passes."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from agentcache.integrations._openai import read_session_id
from agentcache.integrations.server.admission import Admission
from agentcache.integrations.server.auth import Identity, is_loopback_origin, names_loopback
from agentcache.integrations.server.calls import Calls
from agentcache.integrations.server.errors import ApiError, is_anthropic, translate
from agentcache.integrations.server.metrics import Metrics
from agentcache.integrations.server.schema import document
from agentcache.integrations.server.session_table import SessionTable
from agentcache.integrations.server.threads import Threads
from agentcache.integrations.server.tracing import Tracing
from agentcache.integrations.server.wire import Wire, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from agentcache import Runtime
    from agentcache.integrations.server.config import ServerConfig
    from agentcache.integrations.server.routes import Handler, Route

__all__ = ["SERVER", "Server", "server_of"]

M = TypeVar("M", bound=Wire)
T = TypeVar("T")

_LARGE_BODY = 2**18
"""Bodies from this size on are parsed and read off the event loop."""


class Server:
    """What the handlers share. It uses the runtime and does not close it."""

    def __init__(
        self,
        runtime: Runtime,
        config: ServerConfig,
        routes: Iterable[Route],
        *,
        tracer_provider: Any = None,
    ) -> None:
        self.runtime = runtime
        self.config = config
        self.routes = tuple(routes)
        self.admission = Admission(runtime.config.max_running, config.max_queue)
        self.threads = Threads()
        self.sessions = SessionTable(runtime, self.threads, config.max_sessions)
        self.metrics = Metrics(runtime, self.admission)
        self.calls = Calls(
            self.admission,
            self.sessions,
            self.threads,
            self.metrics,
            Tracing(config.model, tracer_provider),
            config.request_timeout_s,
        )
        self.defaults = {"max_new_tokens": config.max_tokens}
        self.openapi = document(self.routes)
        self.started_at = int(time.time())
        self._by_path: dict[tuple[str, str], Route] = {}

    def app(self) -> web.Application:
        """The application with its routes and guards."""
        app = web.Application(
            client_max_size=self.config.max_body_bytes,
            middlewares=[_answer_errors, _guard],
        )
        app[SERVER] = self
        for route in self.routes:
            added = app.router.add_route(route.method, route.path, route.handler)
            self._by_path[route.method, _canonical(added)] = route
        app.on_response_prepare.append(_name_response)
        return app

    async def read(self, request: web.Request, model: type[M]) -> tuple[M, dict[str, Any]]:
        """The request's body: checked, and as it came. Raises ApiError, pydantic's error."""
        limit = self.config.max_body_bytes
        if request.content_type != "application/json":
            raise ApiError(415, "the body has to be JSON; send content-type: application/json")
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise _too_large(limit) from error
        except TimeoutError as error:
            seconds = self.config.request_timeout_s
            raise _unread(408, f"the body did not come within {seconds:g} s") from error
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise _unread(400, "the body is not what its content-encoding says") from error
        if len(raw) < _LARGE_BODY:
            return read_json(raw, model)
        return await self.threads.run(lambda: read_json(raw, model))

    async def read_call(self, request: web.Request, reading: Callable[[], T]) -> T:
        """What `reading` makes of a body that was read; a large one is worked on off the loop."""
        if len(await request.read()) < _LARGE_BODY:
            return reading()
        return await self.threads.run(reading)

    async def compute(self, function: Callable[[], T]) -> T:
        """Run what is short but no call, in a place among the calls. Raises ApiError 429, 503."""
        with self.admission.place(lambda _: None):  # it ends by itself
            return await self.threads.run(function)

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 for a model that is not served."""
        if name != self.config.model:
            raise ApiError(
                404,
                f"no model {name[:80]!r}; this server has {self.config.model!r}",
                param="model",
                code="model_not_found",
            )

    def route_of(self, request: web.Request) -> Route | None:
        """The entry of the table that a request matched."""
        return self._by_path.get((request.method, _canonical(request.match_info.route)))

    def tenant(self, request: web.Request) -> str | None:
        """Whose request it is, by its key; nothing a client writes can say otherwise."""
        return request[_IDENTITY].tenant

    def session_id(self, request: web.Request, values: Mapping[str, Any]) -> str | None:
        """The session a request names, by the first of its fields that is there."""
        for name in ("session_id", "prompt_cache_key"):
            if values.get(name) is not None:
                return read_session_id(values[name], name)
        return read_session_id(request.headers.get("x-session-id"), "x-session-id")


SERVER = web.AppKey("server", Server)
_IDENTITY = web.RequestKey("identity", Identity)
_REQUEST_ID = web.RequestKey("request_id", str)


def server_of(request: web.Request) -> Server:
    """The server that a request came to."""
    return request.app[SERVER]


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the request body is larger than {limit} bytes, the limit of this server; send less, or "
        "start it with a larger --max-body",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _unread(status: int, message: str) -> ApiError:
    """What is left of the body cannot be told from a next request."""
    return ApiError(status, message, headers={"Connection": "close"})


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors become answers; every answer is counted and has an id."""
    server = server_of(request)
    request[_REQUEST_ID] = uuid.uuid4().hex
    begun_at = time.perf_counter()
    try:
        response = await handler(request)
    except asyncio.CancelledError:
        server.metrics.note_request(
            _canonical(request.match_info.route), 499, time.perf_counter() - begun_at
        )
        raise
    except Exception as error:  # whatever it is, the client gets an answer
        response = translate(error).response(anthropic=is_anthropic(request))
    server.metrics.note_request(
        _canonical(request.match_info.route), response.status, time.perf_counter() - begun_at
    )
    return response


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Nobody without a key, where there are keys; else nobody by another name than this machine's.

    Without that, a page that a browser here has open could make its own name point to this server,
    or send what needs no answer, as to close a session.
    """
    server = server_of(request)
    config = server.config
    if config.is_open and not names_loopback(request.headers.get("Host", "")):
        raise ApiError(403, "this server answers to localhost only; give it API keys to open it")
    origin = request.headers.get("Origin")
    if config.is_open and origin is not None and not is_loopback_origin(origin):
        raise ApiError(
            403,
            f"this server answers to no page of {origin[:80]!r}; give it API keys to open it",
        )
    route = server.route_of(request)
    identity = config.keys.identity(_key(request))
    if identity is None and not (route is not None and route.is_open):
        raise ApiError(401, "no API key, or an unknown one", code="invalid_api_key")
    if route is not None and route.for_host and not (identity and identity.sees_all):
        raise ApiError(403, "this shows all tenants; start the server with --admin-key and use it")
    request[_IDENTITY] = identity or Identity()
    return await handler(request)


def _key(request: web.Request) -> str | None:
    """`Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return request.headers.get("x-api-key")


def _canonical(route: web.AbstractRoute) -> str:
    """The route's path as it was declared, so that what clients write does not become a label."""
    return "other" if route.resource is None else route.resource.canonical


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = request.get(_REQUEST_ID, "-")
