"""A route: what answers it, and how the OpenAPI document describes it. One table serves both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from agentcache.integrations.server.wire import Wire

__all__ = ["Handler", "Route", "answer_of"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One operation.

    body: the model of its request. answer: JSON schema of a 200 answer; None for one that is no
    JSON. query: names and schemas of query parameters. is_open: needs no key. for_host: only for
    those who see all tenants. is_listed: whether the OpenAPI document names it.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[Wire] | None = None
    answer: Mapping[str, Any] | None = None
    content_type: str = "application/json"
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    streams: bool = False
    is_open: bool = False
    for_host: bool = False
    is_listed: bool = True


def answer_of(**properties: str | Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of an object that has to have these properties; a text is a plain type."""
    schemas = {
        name: {"type": kind} if isinstance(kind, str) else dict(kind)
        for name, kind in properties.items()
    }
    return {"type": "object", "required": sorted(schemas), "properties": schemas}
