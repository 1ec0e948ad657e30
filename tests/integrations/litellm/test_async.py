"""Calls from an event loop: the same replies, and an end within a step when they are given up."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import litellm
import pytest

if TYPE_CHECKING:
    from agentcache import Runtime

MODEL = "agentcache/tiny-agent"
HELLO = [{"role": "user", "content": "Count."}]
LONG = 20_000
"""More tokens than a test would wait for."""


def text_of(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


async def test_async_calls_say_what_blocking_ones_say(runtime: Runtime) -> None:
    given = {"messages": HELLO, "max_tokens": 6, "session_id": "s"}
    blocking = await asyncio.to_thread(litellm.completion, MODEL, **given)
    plain = await litellm.acompletion(MODEL, **given)
    stream = await litellm.acompletion(
        MODEL, **given, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    said = blocking.choices[0].message.content
    assert plain.choices[0].message.content == said
    assert text_of(chunks) == said
    assert chunks[-1].usage.prompt_tokens_details == plain.usage.prompt_tokens_details


async def test_calls_at_once_share_passes(runtime: Runtime) -> None:
    before = runtime.stats()["passes"]["decode"]
    calls = [litellm.acompletion(MODEL, HELLO, max_tokens=12, session_id=f"s{n}") for n in range(4)]
    replies = await asyncio.gather(*calls)
    passes = runtime.stats()["passes"]["decode"] - before
    assert sum(reply.usage.completion_tokens for reply in replies) == 48
    assert passes < 48


async def test_closing_a_stream_stops_the_work_within_a_step(runtime: Runtime) -> None:
    stream = await litellm.acompletion(MODEL, HELLO, max_tokens=LONG, stream=True)
    async for _ in stream:
        break
    await stream.aclose()
    assert steps_until_idle(runtime) <= 2


async def test_cancelling_a_stream_stops_the_work_within_a_step(runtime: Runtime) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in await litellm.acompletion(MODEL, HELLO, max_tokens=LONG, stream=True):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    await cancel(task)
    assert steps_until_idle(runtime) <= 2


async def test_cancelling_a_plain_call_stops_the_work_within_a_step(runtime: Runtime) -> None:
    before = runtime.stats()["passes"]["decode"]
    task = asyncio.create_task(litellm.acompletion(MODEL, HELLO, max_tokens=LONG))
    while runtime.stats()["passes"]["decode"] == before:
        await asyncio.sleep(0.01)
    await cancel(task)
    assert steps_until_idle(runtime) <= 2


async def test_cancelling_before_the_first_token_stops_the_work(runtime: Runtime) -> None:
    messages = [{"role": "user", "content": "word " * 8000}]
    task = asyncio.create_task(litellm.acompletion(MODEL, messages, max_tokens=LONG))
    while runtime.stats()["running"]["requests"] == 0:
        await asyncio.sleep(0.01)
    await cancel(task)
    assert steps_until_idle(runtime) == 0


async def test_cancelling_while_the_prompt_is_made_leaves_nothing(runtime: Runtime) -> None:
    messages = [{"role": "user", "content": "word " * 8000}]
    task = asyncio.create_task(litellm.acompletion(MODEL, messages, max_tokens=LONG))
    await asyncio.sleep(0.02)
    await cancel(task)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert runs_dry(runtime)
    assert [record for record in runtime.registry if not record.closed] == []


@pytest.mark.parametrize("give_up", ["close", "drop"])
def test_a_blocking_stream_that_is_given_up_stops(runtime: Runtime, give_up: str) -> None:
    stream = litellm.completion(MODEL, HELLO, max_tokens=LONG, stream=True)
    next(iter(stream))
    if give_up == "close":
        stream.close()
    del stream
    assert runs_dry(runtime)
    assert [record for record in runtime.registry if not record.closed] == []


def test_a_stream_that_nobody_reads_stops(runtime: Runtime) -> None:
    litellm.completion(MODEL, HELLO, max_tokens=LONG, stream=True)
    assert runs_dry(runtime)


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task and see that it ends so."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def steps_until_idle(runtime: Runtime) -> int:
    """Decode passes until nothing runs any more."""
    before = runtime.stats()["passes"]["decode"]
    assert runs_dry(runtime)
    return int(runtime.stats()["passes"]["decode"] - before)


def runs_dry(runtime: Runtime) -> bool:
    """Whether nothing runs before a reply of LONG tokens could be over."""
    for _ in range(500):
        if runtime.stats()["running"]["requests"] == 0:
            return True
        time.sleep(0.01)
    return False
