"""The page at `/`: what the cache holds and what sessions cost, live. Plain files, no build."""

from __future__ import annotations

from heapq import nlargest
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentcache.integrations.server.app import Server, server_of
from agentcache.integrations.server.errors import ApiError
from agentcache.integrations.server.routes import Route

if TYPE_CHECKING:
    from agentcache import Runtime

__all__ = ["routes", "tree_of"]

_KINDS = {"page.css": "text/css", "page.js": "text/javascript", "index.html": "text/html"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MAX_NODES = 400
_MAX_SESSIONS = 100


async def index(request: web.Request) -> web.Response:
    """The page, which has no data in it."""
    return _asset("index.html")


async def asset(request: web.Request) -> web.Response:
    """One of its files."""
    name = request.match_info["name"]
    if name not in _KINDS:
        raise ApiError(404, "no such file")
    return _asset(name)


def _asset(name: str) -> web.Response:
    text = files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
    return web.Response(text=text, content_type=_KINDS[name], headers=_HEADERS)


async def state(request: web.Request) -> web.Response:
    """What the page shows, of all tenants."""
    server = server_of(request)
    stats, tree = await server.threads.run(lambda: _look(server.runtime))
    return web.json_response(
        {
            "model": server.config.model,
            "calls": server.admission.num_calls,
            "stats": stats,
            "tree": tree,
            "sessions": _sessions(server),
        },
        headers={"Cache-Control": "no-store"},
    )


def _look(runtime: Runtime) -> tuple[dict[str, Any], dict[str, Any]]:
    return runtime.stats(), runtime.on_engine(lambda: tree_of(runtime))


def _sessions(server: Server) -> list[dict[str, Any]]:
    """The sessions that were used last, latest first, with their turns."""
    latest = server.sessions.everything()[::-1][:_MAX_SESSIONS]
    return [
        {
            **session.stats(),
            "tenant": tenant,
            "timeline": [turn.to_json() for turn in turns],
        }
        for tenant, session, turns in latest
    ]


def tree_of(runtime: Runtime) -> dict[str, Any]:
    """The nodes that were used last, with the paths to them; on the engine thread.

    shared: more than one path goes through it. kinds: what is kept there: "full" all of its
    KV, "state" a checkpoint at its end. sessions: who stands at its end.
    """
    nodes = list(runtime.cache.tree.nodes())
    shown: dict[int, Any] = {}
    for node in nlargest(_MAX_NODES, nodes, key=lambda node: node.last_access):
        each: Any = node
        while each is not None and each.id not in shown:
            shown[each.id] = each
            each = each.parent
    standing = _standing(runtime)
    paths = {node.id: int(node.is_leaf) for node in nodes}
    for node in reversed(nodes):  # from below: parents come first
        if node.parent is not None and node.parent.id in paths:
            paths[node.parent.id] += paths[node.id]
    return {
        "total": len(nodes),
        "nodes": [
            {
                "id": node.id,
                "parent": None if node.parent is None else node.parent.id,
                "start": node.start,
                "end": node.end,
                "kinds": sorted(str(kind) for kind in node.data),
                "shared": paths.get(node.id, 0) > 1,
                "in_use": node.locks > 0,
                "sessions": standing.get(node.id, []),
            }
            for node in sorted(shown.values(), key=lambda node: (node.end, node.id))
        ],
    }


def _standing(runtime: Runtime) -> dict[int, list[str]]:
    """Ids of sessions by the node that a tip of theirs stands on."""
    standing: dict[int, list[str]] = {}
    for record in runtime.registry:
        for tip in record.tips():
            standing.setdefault(tip.ref.frontier.node.id, []).append(record.id)
    return standing


def routes() -> list[Route]:
    """What this module answers; none of it is part of the API."""

    return [
        Route("GET", "/", index, "The page", is_open=True, is_listed=False),
        Route("GET", "/assets/{name}", asset, "A file of it", is_open=True, is_listed=False),
        Route("GET", "/state", state, "What it shows", for_host=True, is_listed=False),
    ]
