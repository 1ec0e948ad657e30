"""A turn while it is being made: deltas to iterate, blocking or async."""

from __future__ import annotations

import asyncio
import queue
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from types import TracebackType

    from agentcache.engine.reply_parser import ReplyReader
    from agentcache.engine.response_template import ResponseTemplateReader
    from agentcache.session.turn import Turn

__all__ = ["Delta", "TurnStream"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last delta: pieces of the message's texts, and whole tool calls.

    raw: the text that they were read from, markup included; all of it is `Turn.text`.
    """

    text: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    ids: tuple[int, ...]
    raw: str


class _Feed:
    """What passes from the engine thread to the stream."""

    def __init__(self) -> None:
        self.items: queue.SimpleQueue[tuple[tuple[int, ...], str] | None] = queue.SimpleQueue()
        self.wake: Callable[[], None] | None = None

    def put(self, item: tuple[tuple[int, ...], str] | None) -> None:
        self.items.put(item)
        wake = self.wake
        if wake is not None:
            wake()


class TurnStream:
    """Iterate for deltas, with `for` or `async for`; `turn` is there at the end.

    Closing it before the end cancels the call and gives back what it held; so does leaving its
    `with` block, or dropping it. `cancel` ends the call alone, and what it has said can still be
    read. Errors of the call are raised by the iteration.
    """

    def __init__(self) -> None:
        self._reader: ReplyReader | ResponseTemplateReader | None = None
        self._feed = _Feed()
        self._future: Future[Turn] | None = None
        self._cancel: Callable[[], None] = lambda: None
        self._done = False

    def expect(self, reader: ReplyReader | ResponseTemplateReader) -> None:
        """Say, before the call begins, how its text is to be read."""
        self._reader = reader

    def attach(self, future: Future[Turn], cancel: Callable[[], None]) -> None:
        """Bind the stream to its call."""
        self._future = future
        self._cancel = cancel
        feed = self._feed
        future.add_done_callback(lambda _: feed.put(None))

    @property
    def emit(self) -> Callable[[tuple[int, ...], str], None]:
        """What the engine is to call with what is new. It does not keep the stream alive."""
        feed = self._feed
        return lambda ids, text: feed.put((ids, text))

    @property
    def turn(self) -> Turn:
        """The finished turn; waits for it. Raises the call's error."""
        assert self._future is not None
        return self._future.result()

    def cancel(self) -> None:
        """Cancel the call; nothing if it is over. From any thread, and without waiting.

        Deltas that were not read yet can be; after the last of a call that was cut, the iteration
        and `turn` raise RequestCancelled.
        """
        if self._future is not None and not self._future.done():
            self._cancel()

    def close(self) -> None:
        """Cancel the call if it is not over, and end the iteration: no delta comes any more."""
        self._done = True
        self.cancel()

    async def aclose(self) -> None:
        """The same, for async callers."""
        self.close()

    def __iter__(self) -> TurnStream:
        return self

    def __next__(self) -> Delta:
        while not self._done:
            delta = self._take(self._feed.items.get())
            if delta is not None:
                return delta
        raise StopIteration

    def __aiter__(self) -> TurnStream:
        return self

    async def __anext__(self) -> Delta:
        while not self._done:
            delta = self._take(await self._next_item())
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def _next_item(self) -> tuple[tuple[int, ...], str] | None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(ready.set)

        self._feed.wake = wake
        try:
            while True:
                try:
                    return self._feed.items.get_nowait()
                except queue.Empty:
                    await ready.wait()
                    ready.clear()
        finally:
            self._feed.wake = None

    def _take(self, item: tuple[tuple[int, ...], str] | None) -> Delta | None:
        """A delta for an item of the queue; the end flushes what was held back."""
        assert self._reader is not None
        ids: tuple[int, ...] = ()
        raw = ""
        if item is None:
            self._done = True
            assert self._future is not None
            self._future.result()
            piece = self._reader.finish()
        else:
            ids, raw = item
            piece = self._reader.push(raw)
        if not (piece.content or piece.reasoning or piece.tool_calls or ids or raw):
            return None
        return Delta(piece.content, piece.reasoning, piece.tool_calls, ids, raw)

    def __enter__(self) -> TurnStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> TurnStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
