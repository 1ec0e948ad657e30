"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web
from pydantic import ConfigDict

from agentcache.integrations._openai import (
    Call,
    Piece,
    finish_reason_of,
    logprobs_of,
    read_call,
    usage_of,
)
from agentcache.integrations.server.app import Server, server_of
from agentcache.integrations.server.calls import Work
from agentcache.integrations.server.routes import Route, answer_of
from agentcache.integrations.server.sse import event_stream
from agentcache.integrations.server.wire import Wire

if TYPE_CHECKING:
    from agentcache import Turn
    from agentcache.integrations.server.calls import RunningCall

__all__ = ["ChatRequest", "FunctionTool", "StreamOptions", "call_deltas", "routes"]


class TextPart(Wire):
    """A part of a message's content; `cache_control` asks for a checkpoint after the message."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None


class CalledFunction(Wire):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Wire):
    model_config = ConfigDict(extra="ignore", strict=True)

    id: str
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Wire):
    """A message. What else clients attach to it is passed over."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    cache_control: dict[str, Any] | None = None


class Function(Wire):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Wire):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    function: Function


class StreamOptions(Wire):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Wire):
    """Fields that every OpenAI-form request may have; `read_call` checks their ranges."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None


class ChatRequest(SamplingFields):
    """A chat call: the whole conversation, what may be called, how to sample."""

    messages: list[ChatMessage]
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    function_call: str | None = None
    functions: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Reply to a conversation, whole or as it comes."""
    server = server_of(request)
    body, values = await server.read(request, ChatRequest)
    server.check_model(body.model)
    grammar = server.runtime.tool_call_grammar
    call = await server.read_call(
        request, lambda: read_call(values, call_grammar=grammar, defaults=server.defaults)
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
        answer = _Answer(server, call)
        if not body.stream:
            return web.json_response(answer.whole(await running.finish()))
        options = body.stream_options or StreamOptions()
        return await answer.stream(request, running, with_usage=bool(options.include_usage))


class _Answer:
    """One completion in OpenAI's form."""

    def __init__(self, server: Server, call: Call) -> None:
        self._server = server
        self._call = call
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": server.config.model,
        }

    def whole(self, turn: Turn) -> dict[str, Any]:
        """The finished completion."""
        message = self._call.form.message(turn)
        if message.get("tool_calls") and not message["content"]:
            message["content"] = None
        choice = {
            "index": 0,
            "message": {**message, "refusal": None},
            "finish_reason": finish_reason_of(turn, message),
            "logprobs": self._logprobs(turn),
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage_of(turn.usage),
        }

    async def stream(
        self, request: web.Request, running: RunningCall, *, with_usage: bool
    ) -> web.StreamResponse:
        """Chunks as they come; then the reason for the end, the usage where asked for, [DONE]."""
        reader, num_calls = self._call.form.reader(), 0
        async with event_stream(request, self._server.config.ping_s) as events:
            blank = {"usage": None} if with_usage else {}
            await events.send(self._chunk({"role": "assistant", "content": ""}, **blank))
            async for delta in running.deltas():
                for said in _deltas(reader.push(delta), num_calls):
                    num_calls += len(said.get("tool_calls", ()))
                    await events.send(self._chunk(said, **blank))
            for said in _deltas(reader.finish(), num_calls):
                await events.send(self._chunk(said, **blank))
            turn = running.turn
            reason = finish_reason_of(turn, self._call.form.message(turn))
            logprobs = self._logprobs(turn)
            await events.send(self._chunk({}, reason, logprobs=logprobs, **blank))
            if with_usage:
                usage = usage_of(turn.usage)
                await events.send({**self._chunk({}), "choices": [], "usage": usage})
            await events.send("[DONE]")
        return events.response

    def _chunk(
        self,
        delta: dict[str, Any],
        reason: str | None = None,
        *,
        logprobs: dict[str, Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **more}

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        return logprobs_of(turn.logprobs, self._server.runtime.tokenizer)


def _deltas(piece: Piece, num_calls: int) -> list[dict[str, Any]]:
    """What a piece adds, one thing at a time."""
    out: list[dict[str, Any]] = []
    if piece.reasoning:
        out.append({"reasoning_content": piece.reasoning})
    if piece.content:
        out.append({"content": piece.content})
    out.extend({"tool_calls": [call]} for call in call_deltas(piece, num_calls))
    return out


def call_deltas(piece: Piece, num_calls: int) -> list[dict[str, Any]]:
    """The piece's tool calls, numbered on from those before it."""
    return [{"index": num_calls + at, **call} for at, call in enumerate(piece.tool_calls)]


def routes() -> list[Route]:
    """What this module answers."""
    answer = answer_of(id="string", object="string", choices="array", usage="object")
    return [
        Route(
            "POST",
            "/v1/chat/completions",
            chat_completions,
            "Reply to a conversation (OpenAI)",
            body=ChatRequest,
            answer=answer,
            streams=True,
        )
    ]
