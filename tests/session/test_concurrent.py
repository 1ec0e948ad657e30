"""Many callers at once on one runtime: each gets its own answer, and all is given back."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from testkit.held import engine_held
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

    Every finished turn is compared with a run without the cache. done: what was done how often.
    """

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.rng = random.Random(name)
        self.session = runtime.session(name)
        self.done: Counter[str] = Counter()
        first = self.rng.choice([20, 20, 70, 120])
        self.prompt = list(range(first, first + self.rng.randint(60, 250)))

    def next_prompt(self) -> list[int]:
        """What the session has so far and a few tokens more."""
        if self.session.tips:
            self.prompt = self.session.ids.tolist()
        return [*self.prompt, *(self.rng.randrange(10, 400) for _ in range(12))]

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
        new_tokens = self.rng.randint(0, 24)
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
            self.next_prompt(), max_new_tokens=self.rng.randint(0, 24), verify=True
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
        stream = await self.session.agenerate(self.next_prompt(), max_new_tokens=500, stream=True)
        assert not isinstance(stream, Turn)
        async with stream:
            async for _ in stream:
                break
        self.done["left"] += 1


def test_threads_and_tasks_with_cancels_on_one_narrow_runtime(
    make_runtime: Callable[..., Runtime],
) -> None:
    runtime = make_runtime(budget="300KiB", max_running=3)
    callers = [Caller(runtime, f"thread-{n}") for n in range(NUM_THREADS)]
    tasks = [Caller(runtime, f"task-{n}") for n in range(NUM_TASKS)]

    async def scenario() -> None:
        await asyncio.gather(*(caller.arun() for caller in tasks))

    with ThreadPoolExecutor(NUM_THREADS + 1) as threads:
        running = [threads.submit(caller.run) for caller in callers]
        running.append(threads.submit(asyncio.run, scenario()))
        for each in running:
            each.result()
    done = sum((caller.done for caller in (*callers, *tasks)), Counter[str]())
    assert {what for what, times in done.items() if times} == {
        "turn",
        "fork",
        "left",
        "rewound",
        "task",
        "cancelled",
    }
    assert runtime.stats()["sessions"] == {"open": 0, "tips": 0}
    check_left(runtime)


def test_cancel_of_some_preempted_calls_leaves_the_others_right(
    make_runtime: Callable[..., Runtime],
) -> None:
    prompts = [[n + 10 * k for k in range(1, 600)] for n in range(3)]
    roomy = make_runtime()
    replies = [
        roomy.session().generate(prompt, max_new_tokens=60).ids.tolist() for prompt in prompts
    ]
    # Room for about two of the three at their full length.
    runtime = make_runtime(budget="600KiB", max_running=3, prefill_chunk=256)
    streams = [
        runtime.session(f"call-{n}").generate(prompt, max_new_tokens=60, stream=True)
        for n, prompt in enumerate(prompts)
    ]
    while not runtime.stats()["preempted"]:
        assert any(stream._future and not stream._future.done() for stream in streams)
        time.sleep(0.002)
    for stream in streams[1:2]:
        stream.close()
    assert [stream.turn.ids.tolist() for stream in streams[::2]] == replies[::2]
    for n in range(3):
        runtime.session(f"call-{n}").close()
    check_left(runtime)


def test_parallel_calls_on_one_tip_leave_a_tip_for_each_that_was_not_cancelled(
    runtime: Runtime,
) -> None:
    rng = random.Random(0)
    session = runtime.session()
    begun = session.generate(PROMPT[:60], max_new_tokens=1)
    ids = session.ids.tolist()
    with engine_held(runtime):
        streams = [
            session.generate([*ids, n], tip=begun.tip, max_new_tokens=30, stream=True)
            for n in range(12)
        ]

    def follow(number: int) -> bool:
        """Whether the call came to its end; every second one is left on the way."""
        stream = streams[number]
        for _ in range(rng.randrange(4)):
            next(stream)
        if number % 2:
            stream.close()
        try:
            return stream.turn.tip in session.tips
        except RequestCancelled:
            return False

    with ThreadPoolExecutor(len(streams)) as threads:
        finished = sum(threads.map(follow, range(len(streams))))
    assert len(session.tips) == finished >= len(streams) // 2
    session.close()
    check_left(runtime)


def test_runtime_closed_under_load_answers_every_caller(
    make_runtime: Callable[..., Runtime],
) -> None:
    runtime = make_runtime(max_running=2)
    answers: Counter[str] = Counter()
    begun = threading.Barrier(9)

    def call(number: int) -> str:
        begun.wait()
        try:
            while True:
                runtime.session().generate([*PROMPT[:40], number], max_new_tokens=20)
        except RuntimeClosed:
            return "closed"

    async def scenario() -> str:
        session = runtime.session()
        begun.wait()
        try:
            while True:
                await session.agenerate(PROMPT[:50], max_new_tokens=20)
        except RuntimeClosed:
            return "closed"

    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(call, n) for n in range(7)]
        running.append(threads.submit(asyncio.run, scenario()))
        begun.wait()
        time.sleep(0.1)
        runtime.close()
        answers.update(each.result(timeout=30) for each in running)
    assert answers == {"closed": 8}
    assert runtime.cache.leases == set()
