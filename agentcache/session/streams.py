"""A turn while it is being made: deltas to iterate, blocking or async."""

from __future__ import annotations

import asyncio
import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache.engine.reply_parser import parse_reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from concurrent.futures import Future
    from types import TracebackType

    from agentcache.session.turn import Turn

__all__ = ["Delta", "TurnStream"]

_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last delta: pieces of the message's texts, and whole tool calls."""

    text: str
    reasoning: str
    tool_calls: tuple[dict[str, Any], ...]
    ids: tuple[int, ...]


class _ReplySplitter:
    """Separates reasoning and tool calls from text that is still growing."""

    def __init__(self, in_thinking: bool) -> None:
        self._in_thinking = in_thinking
        self._raw = ""
        self._content = 0
        self._reasoning = 0
        self._calls = 0

    def push(self, text: str, ids: tuple[int, ...], last: bool) -> Delta:
        self._raw += text
        message = parse_reply(self._raw if last else self._settled(), in_thinking=self._in_thinking)
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or ""
        calls = message.get("tool_calls") or []
        delta = Delta(
            text=content[self._content :],
            reasoning=reasoning[self._reasoning :],
            tool_calls=tuple(calls[self._calls :]),
            ids=ids,
        )
        self._content = max(self._content, len(content))
        self._reasoning = max(self._reasoning, len(reasoning))
        self._calls = max(self._calls, len(calls))
        return delta

    def _settled(self) -> str:
        """The text without what could still turn out to be markup."""
        raw = self._raw
        start = raw.rfind("<tool_call>")
        if start >= 0 and "</tool_call>" not in raw[start:]:
            raw = raw[:start]
        for size in range(min(len(raw), max(map(len, _MARKUP)) - 1), 0, -1):
            if any(mark.startswith(raw[-size:]) for mark in _MARKUP):
                raw = raw[:-size]
                break
        return raw.rstrip()


class TurnStream:
    """Iterate for deltas, with `for` or `async for`; `turn` is there at the end.

    Closing it before the end cancels the call and gives back what it held; so does leaving its
    `with` block, or dropping it. Errors of the call are raised by the iteration.
    """

    def __init__(self) -> None:
        self._splitter = _ReplySplitter(in_thinking=False)
        self._queue: queue.SimpleQueue[tuple[tuple[int, ...], str] | None] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self._future: Future[Turn] | None = None
        self._cancel: Callable[[], None] = lambda: None
        self._done = False

    def expect(self, in_thinking: bool) -> None:
        """Say, before the call begins, whether the reply starts inside a block of reasoning."""
        self._splitter = _ReplySplitter(in_thinking)

    def attach(self, future: Future[Turn], cancel: Callable[[], None]) -> None:
        """Bind the stream to its call."""
        self._future = future
        self._cancel = cancel
        future.add_done_callback(lambda _: self._put(None))

    def emit(self, ids: tuple[int, ...], text: str) -> None:
        """Called on the engine thread with what is new."""
        self._put((ids, text))

    def _put(self, item: tuple[tuple[int, ...], str] | None) -> None:
        self._queue.put(item)
        wake = self._wake
        if wake is not None:
            wake()

    @property
    def turn(self) -> Turn:
        """The finished turn; waits for it. Raises the call's error."""
        assert self._future is not None
        return self._future.result()

    def close(self) -> None:
        """Cancel the call if it is not over."""
        self._done = True
        if self._future is not None and not self._future.done():
            self._cancel()

    async def aclose(self) -> None:
        """The same, for async callers."""
        self.close()

    def __iter__(self) -> Iterator[Delta]:
        while not self._done:
            delta = self._take(self._queue.get())
            if delta is not None:
                yield delta

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._aiter()

    async def _aiter(self) -> AsyncIterator[Delta]:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ready.set)

        self._wake = wake
        try:
            while not self._done:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    await ready.wait()
                    ready.clear()
                    continue
                delta = self._take(item)
                if delta is not None:
                    yield delta
        finally:
            self._wake = None
            if not self._done:
                self.close()

    def _take(self, item: tuple[tuple[int, ...], str] | None) -> Delta | None:
        """A delta for an item of the queue; the end flushes what was held back."""
        if item is None:
            self._done = True
            assert self._future is not None
            self._future.result()
            delta = self._splitter.push("", (), last=True)
        else:
            delta = self._splitter.push(item[1], item[0], last=False)
        empty = not (delta.text or delta.reasoning or delta.tool_calls or delta.ids)
        return None if empty else delta

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
