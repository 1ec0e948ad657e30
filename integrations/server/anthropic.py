"""Anthropic's `/v1/messages`: a chat, answered in its form."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentcache.integrations.server.anthropic_events import MessageEvents
from agentcache.integrations.server.anthropic_input import (
    CountRequest,
    MessagesRequest,
    read_messages_call,
)
from agentcache.integrations.server.app import Server, server_of
from agentcache.integrations.server.calls import Work
from agentcache.integrations.server.routes import Route, answer_of
from agentcache.integrations.server.sse import event_stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache import Turn, Usage
    from agentcache.integrations._openai import Call

__all__ = ["routes"]


async def messages(request: web.Request) -> web.StreamResponse:
    """Reply to a conversation, whole or as it comes."""
    server = server_of(request)
    body, values = await server.read(request, MessagesRequest)
    server.check_model(body.model)
    call = await server.read_call(
        request, lambda: read_messages_call(body, server.runtime.tool_call_grammar)
    )
    work = Work(
        operation="chat",
        start=lambda session: session.complete(
            call.messages, tools=call.tools, stream=True, **call.options
        ),
        tenant=server.tenant(request),
        session_id=server.session_id(request, values),
        parameters=call.options,
    )
    async with server.calls.run(work, request.headers) as running:
        head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": server.config.model,
        }
        if not body.stream:
            turn = await running.finish()
            return web.json_response({**head, **_whole(server, call, turn)})
        async with event_stream(request, server.config.ping_s) as events:
            said, reader = MessageEvents(events), call.form.reader()
            await said.begin({**head, **_EMPTY})
            async for delta in running.deltas():
                await said.add(reader.push(delta))
            await said.add(reader.finish())
            whole = _whole(server, call, running.turn)
            await said.end(whole["stop_reason"], whole["stop_sequence"], whole["usage"])
        return events.response


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens a conversation's prompt has."""
    server = server_of(request)
    body, _ = await server.read(request, CountRequest)
    server.check_model(body.model)
    runtime = server.runtime

    def count() -> int:
        call = read_messages_call(body, runtime.tool_call_grammar)
        return len(runtime.prompts.from_messages(call.messages, call.tools, ()).ids)

    return web.json_response({"input_tokens": await server.compute(count)})


_EMPTY: dict[str, Any] = {
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": {
        "input_tokens": 0,
        "output_tokens": 0,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
    },
}


def _whole(server: Server, call: Call, turn: Turn) -> dict[str, Any]:
    """The finished message but for its head."""
    message = call.form.message(turn)
    content: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        thought = message["reasoning_content"]
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for made in message.get("tool_calls", ()):
        content.append(
            {
                "type": "tool_use",
                "id": made["id"],
                "name": made["function"]["name"],
                "input": _arguments(made["function"]["arguments"]),
            }
        )
    reason, stop = _stop_reason(server, call, turn, message)
    return {
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": _usage(turn.usage),
    }


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object, which this form has to have."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def _stop_reason(
    server: Server, call: Call, turn: Turn, message: Mapping[str, Any]
) -> tuple[str, str | None]:
    """Why it ended, and at which of the stop sequences, if at one."""
    if turn.finish_reason in ("length", "prefill"):
        return "max_tokens", None
    if message.get("tool_calls"):
        return "tool_use", None
    stops = call.options.get("stop") or ()
    if stops:
        said = server.runtime.tokenizer.decode(turn.ids.tolist(), skip_special=True)
        cut = said[len(turn.text) :]
        for stop in stops:
            if cut.startswith(stop):
                return "stop_sequence", stop
    return "end_turn", None


def _usage(usage: Usage) -> dict[str, int]:
    """What was not read from the cache was written to it, so `input_tokens` alone is 0."""
    return {
        "input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.computed_tokens,
        "output_tokens": usage.output_tokens,
    }


def routes() -> list[Route]:
    """What this module answers."""
    answer = answer_of(id="string", type="string", role="string", content="array", usage="object")
    return [
        Route(
            "POST",
            "/v1/messages",
            messages,
            "Reply to a conversation (Anthropic)",
            body=MessagesRequest,
            answer=answer,
            streams=True,
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            count_tokens,
            "Count the tokens of a conversation (Anthropic)",
            body=CountRequest,
            answer=answer_of(input_tokens="integer"),
        ),
    ]
