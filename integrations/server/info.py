"""What a server says of itself: models, tokens of a text, health, metrics, its OpenAPI document."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import model_validator

from agentcache.integrations._openai import read_messages, read_tools
from agentcache.integrations.server.app import Server, server_of
from agentcache.integrations.server.openai_chat import ChatMessage, FunctionTool
from agentcache.integrations.server.routes import Route, answer_of
from agentcache.integrations.server.wire import Wire

__all__ = ["TokenizeRequest", "routes"]


class TokenizeRequest(Wire):
    """Either a text, as it is, or messages with tools, as the template puts them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[FunctionTool] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


async def tokenize(request: web.Request) -> web.Response:
    """The token ids of a text or of a conversation's prompt."""
    server = server_of(request)
    body, values = await server.read(request, TokenizeRequest)
    if body.model is not None:
        server.check_model(body.model)
    ids = await server.compute(lambda: _ids(server, values))
    return web.json_response(
        {"tokens": ids, "count": len(ids), "max_model_len": server.runtime.max_len}
    )


def _ids(server: Server, values: dict[str, Any]) -> list[int]:
    if values.get("prompt") is not None:
        return list(server.runtime.tokenizer.encode_plain(values["prompt"]))
    messages, tools = read_messages(values["messages"]), read_tools(values.get("tools"))
    prompt = server.runtime.prompts.from_messages(messages, tools, ())
    ids: list[int] = prompt.ids.tolist()
    return ids


async def models(request: web.Request) -> web.Response:
    """The one model."""
    return web.json_response({"object": "list", "data": [_model(server_of(request))]})


async def model(request: web.Request) -> web.Response:
    """The model of that name."""
    server = server_of(request)
    server.check_model(request.match_info["model"])
    return web.json_response(_model(server))


def _model(server: Server) -> dict[str, Any]:
    return {
        "id": server.config.model,
        "object": "model",
        "created": server.started_at,
        "owned_by": "agentcache",
        "max_model_len": server.runtime.max_len,
    }


async def health(request: web.Request) -> web.Response:
    """Whether requests are taken: 200, or 503 once the server is told to end."""
    draining = server_of(request).admission.draining
    status = "draining" if draining else "ok"
    return web.json_response({"status": status}, status=503 if draining else 200)


async def metrics(request: web.Request) -> web.Response:
    """Everything in Prometheus' text form."""
    server = server_of(request)
    text = await server.threads.run(server.metrics.text)
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=text, headers=headers)


async def openapi(request: web.Request) -> web.Response:
    """The OpenAPI document."""
    return web.json_response(server_of(request).openapi)


def routes() -> list[Route]:
    """What this module answers."""
    listed = answer_of(object="string", data="array")
    one = answer_of(id="string", object="string")
    counted = answer_of(tokens="array", count="integer")
    document = answer_of(openapi="string", paths="object")
    return [
        Route("GET", "/v1/models", models, "The models that are served", answer=listed),
        Route("GET", "/v1/models/{model:.+}", model, "A model", answer=one),
        Route("POST", "/tokenize", tokenize, "Count tokens", body=TokenizeRequest, answer=counted),
        Route("GET", "/health", health, "Health", answer=answer_of(status="string"), is_open=True),
        Route(
            "GET",
            "/metrics",
            metrics,
            "Metrics for Prometheus",
            answer={"type": "string"},
            content_type="text/plain",
            for_host=True,
        ),
        Route("GET", "/openapi.json", openapi, "This document", answer=document, is_open=True),
    ]
