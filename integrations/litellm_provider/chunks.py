"""A call in the making as litellm's chunks, blocking or async."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from litellm.types.utils import (
    ChatCompletionDeltaToolCall,
    Function,
    ModelResponseStream,
    StreamingChoices,
)
from litellm.types.utils import Delta as ChunkDelta

from agentcache import AgentCacheError
from agentcache.integrations._openai import finish_reason_of, usage_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.integrations._openai import Delta, Piece
    from agentcache.integrations.litellm_provider.call import Running

__all__ = ["AsyncChunks", "Chunks"]


class _Writer:
    """Makes the chunks: litellm's own for what is said, at the end a generic one.

    litellm loses the usage of a finishing chunk of its own form.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._reader = running.form.reader()
        self._num_calls = 0
        self._role: str | None = "assistant"

    def said(self, delta: Delta) -> Iterator[ModelResponseStream]:
        """Chunks for what is new."""
        return self._said(self._reader.push(delta))

    def _said(self, piece: Piece) -> Iterator[ModelResponseStream]:
        if piece.reasoning:
            yield self._chunk(ChunkDelta(reasoning_content=piece.reasoning))
        if piece.content:
            yield self._chunk(ChunkDelta(content=piece.content))
        for call in piece.tool_calls:
            called = ChatCompletionDeltaToolCall(
                index=self._num_calls,
                id=call["id"],
                type="function",
                function=Function(**call["function"]),
            )
            self._num_calls += 1
            yield self._chunk(ChunkDelta(tool_calls=[called]))

    def ending(self) -> Iterator[ModelResponseStream | dict[str, Any]]:
        """The last chunks, once the turn is there."""
        running = self._running
        turn = running.stream.turn  # raises what the call raised
        yield from self._said(self._reader.finish())
        fields = running.fields()
        if fields is not None:
            yield self._chunk(ChunkDelta(content="", provider_specific_fields=fields))
        logprobs = running.logprobs()
        if logprobs is not None:
            yield self._chunk(ChunkDelta(content=""), logprobs=logprobs)
        yield {
            "text": "",
            "tool_use": None,
            "is_finished": True,
            "finish_reason": finish_reason_of(turn, running.form.message(turn)),
            "usage": usage_of(turn.usage),
            "index": 0,
        }

    def _chunk(self, delta: ChunkDelta, **more: Any) -> ModelResponseStream:
        delta.role, self._role = self._role, None
        choice = StreamingChoices(index=0, delta=delta, finish_reason=None, **more)
        return ModelResponseStream(id=self._running.id, model=self._running.model, choices=[choice])


class Chunks:
    """Iterate for the chunks; closing it, or dropping it, stops the work."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._chunks = self._made()

    def _made(self) -> Iterator[Any]:
        writer = _Writer(self._running)
        for delta in self._running.stream:
            yield from writer.said(delta)
        yield from writer.ending()

    def __iter__(self) -> Chunks:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._chunks)
        except AgentCacheError as error:
            self.close()
            raise self._running.translated(error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the work, if it is not over."""
        self._running.close()


class AsyncChunks:
    """The same, for async callers."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._writer = _Writer(running)
        self._waiting: list[Any] = []
        self._over = False

    def __aiter__(self) -> AsyncChunks:
        return self

    async def __anext__(self) -> Any:
        try:
            while not self._waiting:
                await self._more()
        except AgentCacheError as error:
            await self.aclose()
            raise self._running.translated(error) from error
        except BaseException:
            await self.aclose()
            raise
        return self._waiting.pop(0)

    async def _more(self) -> None:
        if self._over:
            raise StopAsyncIteration
        try:
            delta = await anext(self._running.stream)
        except StopAsyncIteration:
            self._over = True
            self._waiting.extend(self._writer.ending())
        else:
            self._waiting.extend(self._writer.said(delta))

    async def aclose(self) -> None:
        """Stop the work, if it is not over."""
        self._running.close()
