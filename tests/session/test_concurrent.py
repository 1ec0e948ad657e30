"""Many callers at once on one runtime: each gets its own answer, and all is given back."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from testkit.helpers import check
from testkit.models import idle_counts

from agentcache.errors import RequestCancelled, RuntimeClosed
from agentcache.session import Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.runtime import Runtime
    from agentcache.session import Session

PROMPT = list(range(20, 110))
NUM_THREADS, NUM_TASKS, NUM_TURNS = 4, 4, 5


def settle(runtime: Runtime) -> None:
    """Wait until cancelled calls have given back what they held."""
    deadline = time.monotonic() + 30
    while runtime.stats()["leases"]:
        assert time.monotonic() < deadline, "a call still holds a lease"
        time.sleep(0.005)


def check_left(runtime: Runtime) -> None:
    """With every session closed, nobody holds anything, and everything can leave."""
    settle(runtime)
    runtime.on_engine(lambda: check(runtime.cache))
    nodes = runtime.on_engine(lambda: list(runtime.cache.tree.nodes()))
    assert {(node.refs, node.locks) for node in nodes} <= {(0, 0)}
    runtime.clear()
    assert set(idle_counts(runtime).values()) == {0}
    assert runtime.on_engine(lambda: list(runtime.cache.tree.nodes())) == []


class Caller:
    """One agent among many: turns on a session of its own, with forks, cancels and rewinds.

    Every finished turn is compared with a run without the cache.
    """

    def __init__(self, runtime: Runtime, name: str, done: Counter[str]) -> None:
        self.rng = random.Random(name)
        self.runtime = runtime
        self.session = runtime.session(name)
        self.done = done
        self.prompt = [*PROMPT[: self.rng.randint(20, 90)], self.rng.randrange(200, 210)]

    def next_prompt(self) -> list[int]:
        """What the session has so far and a few tokens more."""
        if self.session.tips:
            self.prompt = self.session.ids.tolist()
        return [*self.prompt, *(self.rng.randrange(10, 200) for _ in range(12))]

    def note(self, turn: Any, what: str) -> None:
        assert isinstance(turn, Turn)
        assert turn.verify is not None
        assert turn.verify.ok
        self.done[what] += 1

    def run(self) -> None:
        """Some turns, from a thread."""
        with self.session:
            for _ in range(NUM_TURNS):
                self.rng.choice([self._turn, self._fork, self._leave_early, self._rewind])()

    def _turn(self) -> None:
        self.note(self._generate(self.session), "turn")

    def _generate(self, session: Session) -> Turn:
        new_tokens = self.rng.randint(0, 8)
        return session.generate(self.next_prompt(), max_new_tokens=new_tokens, verify=True)

    def _fork(self) -> None:
        with self.session.fork() as child:
            self.note(self._generate(child), "fork")

    def _leave_early(self) -> None:
        stream = self.session.generate(self.next_prompt(), max_new_tokens=500, stream=True)
        with stream:
            for _ in range(self.rng.randint(0, 3)):
                next(stream)
        self.done["left"] += 1

    def _rewind(self) -> None:
        self._turn()
        self.session.rewind(self.rng.randint(0, 1))
        self.done["rewound"] += 1

    async def arun(self) -> None:
        """Some turns, from a task."""
        for _ in range(NUM_TURNS):
            await self.rng.choice([self._aturn, self._acancel, self._aleave_early])()
        self.session.close()

    async def _aturn(self) -> None:
        turn = await self.session.agenerate(
            self.next_prompt(), max_new_tokens=self.rng.randint(0, 8), verify=True
        )
        self.note(turn, "task")

    async def _acancel(self) -> None:
        call = self.session.agenerate(self.next_prompt(), max_new_tokens=2000)
        task = asyncio.create_task(call)
        await asyncio.sleep(self.rng.choice([0, 0.001, 0.02, 0.1]))
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            self.done["cancelled"] += 1

    async def _aleave_early(self) -> None:
        stream = await self.session.agenerate(
            self.next_prompt(), max_new_tokens=500, stream=True
        )
        assert not isinstance(stream, Turn)
        async with stream:
            async for _ in stream:
                break
        self.done["left"] += 1


def test_threads_and_tasks_with_cancels_on_one_narrow_runtime(
    make_runtime: Callable[..., Runtime],
) -> None:
    runtime = make_runtime(budget="500KiB", max_running=4)
    done: Counter[str] = Counter()

    def tasks() -> None:
        async def scenario() -> None:
            callers = [Caller(runtime, f"task-{n}", done) for n in range(NUM_TASKS)]
            await asyncio.gather(*(caller.arun() for caller in callers))

        asyncio.run(scenario())

    callers = [Caller(runtime, f"thread-{n}", done) for n in range(NUM_THREADS)]
    with ThreadPoolExecutor(NUM_THREADS + 1) as threads:
        running = [threads.submit(tasks), *(threads.submit(each.run) for each in callers)]
        for each in running:
            each.result()
    print(done, runtime.stats())
    check_left(runtime)
