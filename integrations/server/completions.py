"""OpenAI's `/v1/completions`: one prompt of text or ids, as it is."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentcache import InvalidRequest
from agentcache.integrations._openai import read_call, usage_of
from agentcache.integrations.server.app import Server, server_of
from agentcache.integrations.server.calls import Work
from agentcache.integrations.server.errors import bad_field
from agentcache.integrations.server.openai_chat import SamplingFields, StreamOptions
from agentcache.integrations.server.routes import Route, answer_of
from agentcache.integrations.server.sse import event_stream
from agentcache.integrations.server.wire import without_nulls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache import Session, TokenLogprob, Turn, TurnStream
    from agentcache.integrations.server.calls import RunningCall

__all__ = ["CompletionRequest", "routes"]

_ANY_MESSAGE = [{"role": "user", "content": "-"}]


class CompletionRequest(SamplingFields):
    """A call without a chat template. prompt: a text, or token ids; of a list of several, one."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


async def completions(request: web.Request) -> web.StreamResponse:
    """Go on from a prompt, whole or as it comes."""
    server = server_of(request)
    body, values = await server.read(request, CompletionRequest)
    server.check_model(body.model)
    options = await server.read_call(request, lambda: _options(server, body, values))
    prompt = _one_prompt(body.prompt)
    work = Work(
        operation="text_completion",
        start=lambda session: _start(server, session, prompt, options),
        tenant=server.tenant(request),
        session_id=server.session_id(request, values),
        parameters=options,
    )
    async with server.calls.run(work, request.headers) as running:
        answer = _Answer(server)
        if not body.stream:
            return web.json_response(answer.whole(await running.finish()))
        stream_options = body.stream_options or StreamOptions()
        return await answer.stream(request, running, with_usage=bool(stream_options.include_usage))


def _options(server: Server, body: CompletionRequest, values: dict[str, Any]) -> dict[str, Any]:
    """The options of the turn; what they have in common with a chat is read as there."""
    if body.best_of not in (None, 1):
        raise bad_field("best_of", "is not supported; leave it out")
    if body.echo:
        raise bad_field("echo", "is not supported; leave it out")
    if body.suffix:
        raise bad_field("suffix", "is not supported; leave it out")
    own = ("prompt", "logprobs", "best_of", "echo", "suffix")
    common = {name: value for name, value in without_nulls(values).items() if name not in own}
    options = read_call({**common, "messages": _ANY_MESSAGE}, defaults=server.defaults).options
    if body.logprobs is not None:
        if not 0 <= body.logprobs <= 20:
            raise bad_field("logprobs", f"is {body.logprobs}; it has to be from 0 to 20")
        options |= {"logprobs": True, "top_logprobs": body.logprobs}
    return options


def _one_prompt(prompt: str | Sequence[Any]) -> str | Sequence[int]:
    if isinstance(prompt, str):
        return prompt
    if prompt and all(isinstance(each, int) for each in prompt):
        return prompt
    if len(prompt) != 1:
        raise bad_field("prompt", f"holds {len(prompt)} prompts; send one in a request")
    only: str | Sequence[int] = prompt[0]
    return only


def _start(
    server: Server, session: Session, prompt: str | Sequence[int], options: dict[str, Any]
) -> TurnStream:
    try:
        ids = server.runtime.tokenizer.encode_plain(prompt) if isinstance(prompt, str) else prompt
        return session.generate(ids, stream=True, **options)
    except InvalidRequest as error:
        raise bad_field("prompt", str(error)) from error


class _Answer:
    """One completion in OpenAI's older form."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": server.config.model,
        }

    def whole(self, turn: Turn) -> dict[str, Any]:
        """The finished completion."""
        return {**self._chunk(turn.text, turn), "usage": usage_of(turn.usage)}

    async def stream(
        self, request: web.Request, running: RunningCall, *, with_usage: bool
    ) -> web.StreamResponse:
        """Texts as they come; then the reason for the end, the usage where asked for, [DONE]."""
        async with event_stream(request, self._server.config.ping_s) as events:
            async for delta in running.deltas():
                if delta.raw:
                    await events.send(self._chunk(delta.raw))
            turn = running.turn
            await events.send(self._chunk("", turn))
            if with_usage:
                usage = {"choices": [], "usage": usage_of(turn.usage)}
                await events.send({**self._head, **usage})
            await events.send("[DONE]")
        return events.response

    def _chunk(self, text: str, turn: Turn | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        if turn is not None:
            is_cut = turn.finish_reason in ("length", "prefill")
            choice["finish_reason"] = "length" if is_cut else "stop"
            choice["logprobs"] = self._logprobs(turn.logprobs)
        return {**self._head, "choices": [choice]}

    def _logprobs(self, items: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if items is None:
            return None
        decode = self._server.runtime.tokenizer.decode_after
        tokens = [decode([item.id]) for item in items]
        offsets, at = [], 0
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [item.logprob for item in items],
            "top_logprobs": [{decode([id]): value for id, value in item.top} for item in items],
            "text_offset": offsets,
        }


def routes() -> list[Route]:
    """What this module answers."""
    answer = answer_of(id="string", object="string", choices="array", usage="object")
    return [
        Route(
            "POST",
            "/v1/completions",
            completions,
            "Go on from a prompt (OpenAI)",
            body=CompletionRequest,
            answer=answer,
            streams=True,
        )
    ]
