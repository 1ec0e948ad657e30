"""Time limits of streams, and what async calls leave to other threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

if TYPE_CHECKING:
    from collections.abc import Callable

HELLO = [SystemMessage("You repair programs."), HumanMessage("The validator accepts a newline.")]


class HandTimer:
    """A timer that goes off when the test says so."""

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self.seconds = seconds
        self.go_off = function
        self.daemon = False

    def start(self) -> None:
        """Wait for the test."""

    def cancel(self) -> None:
        """Nothing to stop: it never goes off by itself."""


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[HandTimer]:
    """The time limits of the calls under way, in order."""
    made: list[HandTimer] = []

    def timer(seconds: float, function: Callable[[], None]) -> HandTimer:
        made.append(HandTimer(seconds, function))
        return made[-1]

    monkeypatch.setattr("threading.Timer", timer)
    return made


async def pieces(chat: Any, is_async: bool, after_first: Callable[[], None]) -> list[Any]:
    """A stream's chunks; a function runs once the first of them is there."""
    chunks: list[Any] = []
    if is_async:
        async for chunk in chat.astream(HELLO):
            chunks.append(chunk)
            if len(chunks) == 1:
                after_first()
        return chunks
    for chunk in chat.stream(HELLO):
        chunks.append(chunk)
        if len(chunks) == 1:
            after_first()
    return chunks


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_finished_reply_is_read_to_its_end_after_the_time_limit(
    make_chat, micro, timers, is_async
):
    def late() -> None:
        while micro.stats()["leases"]:
            pass
        micro.on_engine(lambda: None)
        timers[-1].go_off()

    plain = make_chat(max_tokens=12).invoke(HELLO)
    chunks = await pieces(make_chat(max_tokens=12, timeout=60), is_async, late)

    assert [timer.seconds for timer in timers] == [60]
    assert "".join(chunk.content for chunk in chunks) == plain.content
    assert chunks[-1].chunk_position == "last"
    assert chunks[-1].usage_metadata["output_tokens"] == plain.usage_metadata["output_tokens"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_reply_that_was_cut_by_the_time_limit_raises(make_chat, micro, timers, is_async):
    chat = make_chat(max_tokens=5000, timeout=60)
    with pytest.raises(TimeoutError, match="no whole reply within 60"):
        await pieces(chat, is_async, lambda: timers[-1].go_off())

    micro.on_engine(lambda: None)
    assert micro.stats()["sessions"]["tips"] == 0
    assert micro.stats()["leases"] == 0


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
async def test_async_calls_render_nothing_on_the_loop(make_chat, micro, monkeypatch, streams):
    seen: dict[str, set[threading.Thread]] = {"from_messages": set(), "message_at": set()}

    def watch(name: str) -> None:
        whole = getattr(micro.prompts, name)

        def watched(*arguments: Any) -> Any:
            seen[name].add(threading.current_thread())
            return whole(*arguments)

        monkeypatch.setattr(micro.prompts, name, watched)

    async def ask(*messages: Any) -> Any:
        if not streams:
            return await chat.ainvoke([*messages], session_id="s")
        return [chunk async for chunk in chat.astream([*messages], session_id="s")][-1]

    chat = make_chat()
    await ask(SystemMessage("It is 12:01."), HELLO[1])
    for name in seen:
        watch(name)
    after = await ask(SystemMessage("It is 12:02."), HELLO[1])

    assert "message 0 (system)" in after.response_metadata["agentcache"]["miss"]
    for threads in seen.values():
        assert threads
        assert threading.main_thread() not in threads
