"""The events of a message in Anthropic's form: blocks that begin, grow and end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentcache.integrations._openai import Piece
    from agentcache.integrations.server.sse import EventStream

__all__ = ["MessageEvents"]

_BLOCKS = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessageEvents:
    """Sends one message; at most one block is open at a time."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._index = -1
        self._open: str | None = None

    async def begin(self, message: dict[str, Any]) -> None:
        """The message as it is before anything is said."""
        await self._send("message_start", message=message)

    async def add(self, piece: Piece) -> None:
        """What a piece adds."""
        if piece.reasoning:
            delta = {"type": "thinking_delta", "thinking": piece.reasoning}
            await self._grow("thinking", delta)
        if piece.content:
            await self._grow("text", {"type": "text_delta", "text": piece.content})
        for call in piece.tool_calls:
            await self._call(call)

    async def end(self, reason: str, stop: str | None, usage: dict[str, int]) -> None:
        """Why it ended, and what it cost."""
        await self._close()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        await self._send("message_delta", delta=delta, usage=usage)
        await self._send("message_stop")

    async def _grow(self, kind: str, delta: dict[str, Any]) -> None:
        if self._open != kind:
            await self._begin(kind, _BLOCKS[kind])
        await self._send("content_block_delta", index=self._index, delta=delta)

    async def _call(self, call: dict[str, Any]) -> None:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
        await self._begin("tool_use", block)
        delta = {"type": "input_json_delta", "partial_json": function["arguments"]}
        await self._send("content_block_delta", index=self._index, delta=delta)
        await self._close()

    async def _begin(self, kind: str, block: dict[str, Any]) -> None:
        await self._close()
        self._index += 1
        self._open = kind
        await self._send("content_block_start", index=self._index, content_block=block)

    async def _close(self) -> None:
        if self._open is not None:
            self._open = None
            await self._send("content_block_stop", index=self._index)

    async def _send(self, kind: str, **fields: Any) -> None:
        await self._events.send({"type": kind, **fields}, kind)
