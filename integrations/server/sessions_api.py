"""`/v1/sessions`: the caller's own sessions, to look at, fork, rewind, explain and close."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentcache.integrations._openai import read_session_id
from agentcache.integrations.server.app import Server, server_of
from agentcache.integrations.server.errors import ApiError
from agentcache.integrations.server.routes import Route, answer_of
from agentcache.integrations.server.wire import Wire

if TYPE_CHECKING:
    from agentcache import Session

__all__ = ["ForkRequest", "RewindRequest", "routes"]


class ForkRequest(Wire):
    """id: of the new session; by default one is made. tip: where several stand, which one."""

    id: str | None = None
    tip: int | None = None


class RewindRequest(Wire):
    """to_turn: the turn at whose end the session is to stand again; 0 is before the first."""

    to_turn: int
    tip: int | None = None


async def list_sessions(request: web.Request) -> web.Response:
    """The caller's open sessions, most recently used first."""
    server = server_of(request)
    limit = _limit(request)
    sessions = server.sessions.of_tenant(server.tenant(request))[::-1]
    data = [_shown(session) for session in sessions[:limit]]
    return web.json_response({"object": "list", "data": data, "has_more": len(sessions) > limit})


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", "100")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 1000):
        raise ApiError(400, f"limit is {text[:20]!r}; give 1 to 1000", param="limit")
    return int(text)


async def inspect(request: web.Request) -> web.Response:
    """One session with its last turns."""
    server, session = _found(request)
    turns = server.sessions.turns(server.tenant(request), session.id)
    return web.json_response({**_shown(session), "turns_kept": [turn.to_json() for turn in turns]})


async def explain(request: web.Request) -> web.Response:
    """Why its last turns did not reuse more, in words."""
    server, session = _found(request)
    turns = server.sessions.turns(server.tenant(request), session.id)
    return web.json_response(
        {"id": session.id, "object": "list", "data": [turn.to_json() for turn in turns]}
    )


async def fork(request: web.Request) -> web.Response:
    """A new session that stands where this one does."""
    server, session = _found(request)
    body, _ = await server.read(request, ForkRequest)
    id = read_session_id(body.id, "id")
    forked = await server.threads.make(
        lambda: session.fork(id, tip=body.tip), lambda made: made.close(wait=False)
    )
    server.sessions.adopt(server.tenant(request), forked)
    return web.json_response(_shown(forked))


async def rewind(request: web.Request) -> web.Response:
    """Stand again at the end of an earlier turn."""
    server, session = _found(request)
    body, _ = await server.read(request, RewindRequest)
    if body.to_turn < 0:
        raise ApiError(400, f"to_turn is {body.to_turn}; give at least 0", param="to_turn")
    await server.threads.run(lambda: session.rewind(body.to_turn, tip=body.tip))
    return web.json_response(_shown(session))


async def close(request: web.Request) -> web.Response:
    """End a session: its marks are dropped, its tokens stay until they are evicted."""
    server, session = _found(request)
    server.sessions.forget(server.tenant(request), session.id)
    session.close(wait=False)
    return web.json_response({"id": session.id, "object": "session", "closed": True})


def _found(request: web.Request) -> tuple[Server, Session]:
    server = server_of(request)
    id = read_session_id(request.match_info["id"], "session_id")
    assert id is not None
    return server, server.sessions.find(server.tenant(request), id)


def _shown(session: Session) -> dict[str, Any]:
    return {"object": "session", **session.stats()}


def routes() -> list[Route]:
    """What this module answers."""
    path, shown = "/v1/sessions/{id}", answer_of(id="string", tips="array", turns="integer")
    listed = answer_of(object="string", data="array", has_more="boolean")
    explained = answer_of(id="string", data="array")
    closed = answer_of(id="string", closed="boolean")
    limit = {"limit": {"type": "integer", "minimum": 1, "maximum": 1000}}
    return [
        Route("GET", "/v1/sessions", list_sessions, "Open sessions", answer=listed, query=limit),
        Route("GET", path, inspect, "A session and its last turns", answer=shown),
        Route("DELETE", path, close, "Close a session", answer=closed),
        Route("GET", f"{path}/explain", explain, "Why turns missed", answer=explained),
        Route("POST", f"{path}/fork", fork, "Fork a session", body=ForkRequest, answer=shown),
        Route("POST", f"{path}/rewind", rewind, "Rewind", body=RewindRequest, answer=shown),
        Route("POST", f"{path}/close", close, "Close a session", answer=closed),
    ]
