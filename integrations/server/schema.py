"""The OpenAPI document, from the table of routes and the models of the bodies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from agentcache import __version__
from agentcache.integrations.server.routes import answer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.integrations.server.routes import Route

__all__ = ["document"]

_REF = "#/components/schemas/{model}"
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
"""One event of a stream."""

_SESSION = {
    "name": "x-session-id",
    "in": "header",
    "required": False,
    "description": "The session, where the body does not name it",
    "schema": {"type": "string"},
}

_ERROR = {
    "OpenAiError": answer_of(
        error=answer_of(
            message="string",
            type="string",
            param={"type": ["string", "null"]},
            code={"type": ["string", "null"]},
        )
    ),
    "AnthropicError": answer_of(
        type={"const": "error"}, error=answer_of(type="string", message="string")
    ),
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The whole document."""
    listed = [route for route in routes if route.is_listed]
    bodies = {route.body for route in listed if route.body is not None}
    inputs = sorted(bodies, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in inputs], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for each in listed:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", each.path)
        paths.setdefault(path, {})[each.method.lower()] = _operation(each, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentcache", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), **_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _operation(each: Route, path: str) -> dict[str, Any]:
    error = "AnthropicError" if path.startswith("/v1/messages") else "OpenAiError"
    name = re.sub(r"\W+", "_", path).strip("_")
    operation: dict[str, Any] = {
        "operationId": f"{each.method.lower()}_{name}",
        "summary": each.summary,
        "parameters": _parameters(each, path),
        "responses": {
            "200": {"description": "Done", "content": _content(each)},
            "default": {
                "description": "An error, with the field at fault",
                "content": {
                    "application/json": {"schema": {"$ref": _REF.format(model=error)}},
                },
            },
        },
    }
    if each.body is not None:
        schema = {"$ref": _REF.format(model=each.body.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _parameters(each: Route, path: str) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": dict(schema)}
        for name, schema in each.query.items()
    ]
    names_session = each.body is not None and "session_id" in each.body.model_fields
    return in_path + in_query + ([_SESSION] if names_session else [])


def _content(each: Route) -> dict[str, Any]:
    content: dict[str, Any] = {each.content_type: {"schema": dict(each.answer or {})}}
    if each.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return content
