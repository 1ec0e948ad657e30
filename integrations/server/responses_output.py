"""A response in OpenAI's form: its items, its usage, and the events it is streamed in."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache import Usage
    from agentcache.integrations._openai import Piece
    from agentcache.integrations.server.errors import ApiError
    from agentcache.integrations.server.responses_input import ResponsesRequest
    from agentcache.integrations.server.sse import EventStream

__all__ = ["ResponseEvents", "blank_response", "filled_response"]

_KINDS = {
    "message": ("msg", "output_text"),
    "reasoning": ("rs", "reasoning_text"),
}
"""Items of text by their kind: beginning of the id, type of the part."""


def blank_response(id: str, model: str, body: ResponsesRequest) -> dict[str, Any]:
    """The response as it is before anything is said."""
    text = {} if body.text is None else body.text.model_dump(exclude_none=True)
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def filled_response(
    blank: Mapping[str, Any], items: list[dict[str, Any]], usage: Usage, *, is_cut: bool
) -> dict[str, Any]:
    """The finished response."""
    return {
        **blank,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": items,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.output_tokens,
        },
    }


class ResponseEvents:
    """Collects the items of one response, and sends their events where there is a stream."""

    def __init__(self, events: EventStream | None = None) -> None:
        self.items: list[dict[str, Any]] = []
        self._events = events
        if events is not None:
            events.tell = self.fail
        self._number = 0
        self._open: str | None = None

    async def begin(self, response: Mapping[str, Any]) -> None:
        """The response as it is before anything is said."""
        await self._send("response.created", response=response)
        await self._send("response.in_progress", response=response)

    async def add(self, piece: Piece) -> None:
        """What a piece adds."""
        if piece.reasoning:
            await self._grow("reasoning", piece.reasoning)
        if piece.content:
            await self._grow("message", piece.content)
        for call in piece.tool_calls:
            await self._call(call)

    async def close(self, *, is_cut: bool = False) -> None:
        """End the item that is open; is_cut: its text was to go on."""
        if self._open is None:
            return
        kind, self._open = _KINDS[self._open][1], None
        item = self.items[-1]
        item["status"] = "incomplete" if is_cut else "completed"
        part = item["content"][0]
        place = {**self._place(), "content_index": 0}
        await self._send(f"response.{kind}.done", **place, text=part["text"], **_logprobs(kind))
        await self._send("response.content_part.done", **place, part=part)
        await self._done(item)

    async def end(self, response: Mapping[str, Any]) -> None:
        """The finished response."""
        await self._send(f"response.{response['status']}", response=response)

    async def fail(self, error: ApiError) -> None:
        """The call failed; nothing comes after this."""
        await self._send("error", code=error.code, message=error.message, param=error.param)

    async def _grow(self, item_kind: str, text: str) -> None:
        if self._open != item_kind:
            await self._begin_text(item_kind)
        kind = _KINDS[item_kind][1]
        self.items[-1]["content"][0]["text"] += text
        place = {**self._place(), "content_index": 0}
        await self._send(f"response.{kind}.delta", **place, delta=text, **_logprobs(kind))

    async def _begin_text(self, item_kind: str) -> None:
        await self.close()
        prefix, kind = _KINDS[item_kind]
        item: dict[str, Any] = {"id": _id(prefix), "type": item_kind, "status": "in_progress"}
        part: dict[str, Any] = {"type": kind, "text": ""}
        if item_kind == "message":
            item["role"] = "assistant"
            part["annotations"] = []
        else:
            item["summary"] = []
        await self._begin({**item, "content": []})
        place = {**self._place(), "content_index": 0}
        await self._send("response.content_part.added", **place, part=part)
        self.items[-1]["content"] = [part]
        self._open = item_kind

    async def _call(self, call: Mapping[str, Any]) -> None:
        await self.close()
        function = call["function"]
        item = {
            "id": _id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": "",
        }
        await self._begin(item)
        said = function["arguments"]
        await self._send("response.function_call_arguments.delta", **self._place(), delta=said)
        self.items[-1] |= {"arguments": said, "status": "completed"}
        await self._send(
            "response.function_call_arguments.done",
            **self._place(),
            arguments=said,
            name=function["name"],
        )
        await self._done(self.items[-1])

    async def _begin(self, item: dict[str, Any]) -> None:
        await self._send("response.output_item.added", output_index=len(self.items), item=item)
        self.items.append(dict(item))

    async def _done(self, item: dict[str, Any]) -> None:
        await self._send("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    async def _send(self, kind: str, **fields: Any) -> None:
        if self._events is None:
            return
        numbered = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        await self._events.send(numbered, kind)


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "output_text" else {}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
