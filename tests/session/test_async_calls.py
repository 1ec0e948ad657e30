"""Calls from an event loop leave it free while their prompt is made."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import TYPE_CHECKING, Any

import pytest

from agentcache.errors import InvalidRequest, RequestCancelled

if TYPE_CHECKING:
    from agentcache.engine.loop import Submission
    from agentcache.engine.request import RequestSpec
    from agentcache.runtime import Runtime

ASKED = [
    {"role": "system", "content": "You repair programs."},
    {"role": "user", "content": "Hi"},
]


class Gate:
    """Stops the runtime where it begins to make a prompt, and keeps what it submits."""

    def __init__(self, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []
        self.submitted: list[Submission] = []
        self.came = threading.Event()
        self._make, self._submit = runtime.prompts.from_messages, runtime.submit
        monkeypatch.setattr(runtime.prompts, "from_messages", self.make)
        monkeypatch.setattr(runtime, "submit", self.submit)

    def make(self, *arguments: Any) -> Any:
        self.threads.append(threading.current_thread())
        self.reached.set()
        if threading.current_thread() is not threading.main_thread():
            assert self.opened.wait(30)
        return self._make(*arguments)

    def submit(self, spec: RequestSpec) -> Submission:
        self.submitted.append(self._submit(spec))
        self.came.set()
        return self.submitted[-1]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_whole_list_is_rendered_off_the_loop(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate = Gate(runtime, monkeypatch)
    session = runtime.session()
    task = asyncio.create_task(session.acomplete(ASKED, max_new_tokens=3, stream=stream))
    await asyncio.to_thread(gate.reached.wait, 30)
    gate.opened.set()  # the loop got here while the prompt was being made
    made: Any = await task
    turn = made.turn if stream else made
    assert gate.threads
    assert threading.main_thread() not in gate.threads
    again = session.complete([*ASKED, turn.message, ASKED[1]], max_new_tokens=1)
    assert again.index == 2
    assert again.usage.cached_tokens >= turn.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_a_call_that_is_cancelled_while_its_prompt_is_made_does_not_run(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gate = Gate(runtime, monkeypatch)
    session = runtime.session()
    task = asyncio.create_task(session.acomplete(ASKED, max_new_tokens=100_000, stream=stream))
    assert await asyncio.to_thread(gate.reached.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.opened.set()
    assert await asyncio.to_thread(gate.came.wait, 30)
    (submitted,) = gate.submitted
    with pytest.raises(RequestCancelled):
        await asyncio.to_thread(submitted.future.result, 30)
    runtime.on_engine(lambda: None)
    assert session.tips == ()
    assert runtime.stats()["leases"] == 0


async def test_what_is_wrong_with_a_list_is_raised_to_the_task(runtime: Runtime) -> None:
    session = runtime.session()
    with pytest.raises(InvalidRequest, match="message 0"):
        await session.acomplete([{"role": "user", "content": 3}])
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        await session.acomplete(ASKED, max_new_tokens=-1)


async def test_what_a_caller_changes_after_its_call_is_not_in_the_prompt(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(runtime, monkeypatch)
    session = runtime.session()
    call = {"id": "a", "function": {"name": "read", "arguments": {"path": "a.py"}}}
    asked: list[dict[str, Any]] = [
        *copy.deepcopy(ASKED),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "b.py"}]},
    ]
    before = copy.deepcopy(asked)

    task = asyncio.create_task(session.acomplete(asked, max_new_tokens=3))
    asked[0]["content"] = "You break programs."  # before the task has begun
    await asyncio.to_thread(gate.reached.wait, 30)
    call["function"]["arguments"]["path"] = "c.py"  # type: ignore[index]
    asked[3]["content"][0]["text"] = "d.py"
    asked.append({"role": "user", "content": "And now?"})
    gate.opened.set()
    await task

    assert session.messages[:-1] == before


async def test_ids_that_a_caller_changes_after_its_call_are_not_in_the_prompt(
    runtime: Runtime,
) -> None:
    session, ids = runtime.session(), list(range(20, 40))
    task = asyncio.create_task(session.agenerate(ids, max_new_tokens=1))
    ids[:] = [19]
    await task
    assert session.ids[:20].tolist() == list(range(20, 40))
