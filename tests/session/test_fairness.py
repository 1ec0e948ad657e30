"""Who is computed next of several prompts: nobody is stalled, starved or computed twice."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from agentcache.engine.scheduler import Scheduler
from agentcache.errors import RequestCancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agentcache.engine.backend import Batch
    from agentcache.runtime import Runtime

CHUNK = 32


@contextmanager
def standing_still(runtime: Runtime) -> Iterator[None]:
    """What is submitted inside arrives at the engine together, in that order."""
    go_on = threading.Event()
    runtime.engine.post(lambda: assert_true(go_on.wait(60)))
    try:
        yield
    finally:
        go_on.set()


def assert_true(value: bool) -> None:
    assert value


def wait_until(there: Callable[[], bool]) -> None:
    """Wait for something on the engine thread, a minute at most."""
    for _ in range(60_000):
        if there():
            return
        time.sleep(0.001)
    raise AssertionError("it never came")


@pytest.fixture
def runtime(make_runtime: Callable[..., Runtime]) -> Runtime:
    return make_runtime(prefill_chunk=CHUNK, max_running=8)


class Passes:
    """Chunks as they are computed, by the first token of their prompt, which differs; and per pass
    how many tokens each of its spans has."""

    def __init__(self, runtime: Runtime) -> None:
        self.chunks: list[int] = []
        self.widths: list[tuple[int, ...]] = []
        self._names: dict[int, int] = {}
        forward = runtime.engine.backend.forward

        def recorded(batch: Batch) -> Any:
            for span in batch.spans:
                if span.start == 0:
                    self._names[span.row] = int(span.ids[0])
                if len(span.ids) > 1:
                    self.chunks.append(self._names[span.row])
            self.widths.append(tuple(len(span.ids) for span in batch.spans))
            return forward(batch)

        runtime.engine.backend.forward = recorded  # type: ignore[method-assign]


def prompt(first: int, length: int) -> list[int]:
    return [first, *(300 + (first * 7 + n) % 500 for n in range(length - 1))]


def test_short_prompt_does_not_wait_behind_a_long_one(runtime: Runtime) -> None:
    passes = Passes(runtime)
    with standing_still(runtime):
        long = runtime.session().generate(prompt(1, 20 * CHUNK), max_new_tokens=1, stream=True)
        short = runtime.session().generate(prompt(2, CHUNK - 2), max_new_tokens=1, stream=True)
    assert short.turn.usage.computed_tokens == CHUNK - 2
    assert long.turn.usage.computed_tokens == 20 * CHUNK
    assert passes.chunks.index(2) <= 1
    assert passes.chunks.count(1) >= 20


def test_short_prompts_and_who_decodes_share_a_pass(runtime: Runtime) -> None:
    passes = Passes(runtime)
    lengths = (CHUNK - 3, 9, 10, 11, 7)
    with standing_still(runtime):
        streams = [
            runtime.session().generate(prompt(n, length), max_new_tokens=3, stream=True)
            for n, length in enumerate(lengths, 1)
        ]
    for stream, length in zip(streams, lengths, strict=True):
        assert stream.turn.usage.computed_tokens == length
    # The first comes first and fills its pass; what fits beside the second goes with it.
    assert passes.widths[:3] == [(CHUNK - 3,), (9, 10, 11, 1), (7, 1, 1, 1, 1)]


def test_backend_that_takes_one_prompt_a_pass_gets_one(
    make_runtime: Callable[..., Runtime],
) -> None:
    runtime = make_runtime(prefill_chunk=CHUNK, max_running=8, backend="transformers")
    passes = Passes(runtime)
    with standing_still(runtime):
        streams = [
            runtime.session().generate(prompt(n, 9), max_new_tokens=2, stream=True)
            for n in range(1, 4)
        ]
    assert all(stream.turn.usage.output_tokens == 2 for stream in streams)
    assert all(set(widths) == {1} for widths in passes.widths if len(widths) > 1)


def test_long_prompt_is_not_starved_by_short_ones(runtime: Runtime) -> None:
    passes = Passes(runtime)
    with standing_still(runtime):
        long = runtime.session().generate(prompt(1, 6 * CHUNK), max_new_tokens=0, stream=True)
        short = [
            runtime.session().generate(prompt(n, CHUNK - 2), max_new_tokens=0, stream=True)
            for n in range(2, 32)
        ]
    for stream in (long, *short):
        assert stream.turn.finish_reason == "prefill"
    last = len(passes.chunks) - 1 - passes.chunks[::-1].index(1)
    waits = [
        len(list(run)) for name, run in groupby(passes.chunks[:last], lambda n: n == 1) if not name
    ]
    assert max(waits) <= 4


def test_tenants_take_turns_however_many_prompts_each_has(runtime: Runtime) -> None:
    passes = Passes(runtime)
    with standing_still(runtime):
        many = [
            runtime.session(tenant="many").generate(
                prompt(n, 4 * CHUNK), max_new_tokens=0, stream=True
            )
            for n in range(1, 6)
        ]
        one = runtime.session(tenant="one").generate(
            prompt(9, 4 * CHUNK), max_new_tokens=0, stream=True
        )
    for stream in (*many, one):
        assert stream.turn.finish_reason == "prefill"
    place = len(passes.chunks) - 1 - passes.chunks[::-1].index(9)
    others = [name for name in passes.chunks[: place + 1] if name != 9]
    assert len(others) <= passes.chunks.count(9) + 1


def test_tenant_that_was_away_saved_up_no_turns(runtime: Runtime) -> None:
    runtime.session(tenant="away").generate(prompt(8, 4), max_new_tokens=0)
    passes = Passes(runtime)
    with standing_still(runtime):
        here = runtime.session(tenant="here").generate(
            prompt(1, 40 * CHUNK), max_new_tokens=0, stream=True
        )
    wait_until(lambda: passes.chunks.count(1) >= 20)
    back = runtime.session(tenant="away").generate(
        prompt(9, 10 * CHUNK), max_new_tokens=0, stream=True
    )
    assert here.turn.finish_reason == back.turn.finish_reason == "prefill"
    begun = passes.chunks.index(9)
    runs = [len(list(run)) for name, run in groupby(passes.chunks[begun:]) if name == 9]
    assert max(runs[:-1], default=0) <= 2, "it caught up on what it had not asked for"


def test_higher_priority_goes_first(runtime: Runtime) -> None:
    passes = Passes(runtime)
    with standing_still(runtime):
        low = runtime.session().generate(prompt(1, 4 * CHUNK), max_new_tokens=0, stream=True)
        high = runtime.session(priority=1).generate(
            prompt(2, 4 * CHUNK), max_new_tokens=0, stream=True
        )
    assert low.turn.finish_reason == high.turn.finish_reason == "prefill"
    assert passes.chunks[:4] == [2] * 4


def four_that_share(runtime: Runtime) -> tuple[list[Any], list[dict[str, Any]]]:
    head = {"role": "system", "content": "You repair programs. " * 12}
    with standing_still(runtime):
        streams = [
            runtime.session().chat(
                [head, {"role": "user", "content": f"number {n}"}], max_new_tokens=2, stream=True
            )
            for n in range(4)
        ]
    return streams, [head]


def test_prompts_that_share_a_head_wait_for_the_one_that_computes_it(runtime: Runtime) -> None:
    streams, _ = four_that_share(runtime)
    usages = [stream.turn.usage for stream in streams]
    tails = [usage.computed_tokens for usage in usages[1:]]
    assert usages[0].cached_tokens == 0
    assert max(tails) < usages[0].prompt_tokens / 3
    assert runtime.stats()["leases"] == 0


def test_followers_go_on_when_the_one_they_wait_for_is_cancelled(runtime: Runtime) -> None:
    begun = threading.Event()
    forward = runtime.engine.backend.forward

    def announced(batch: Batch) -> Any:
        out = forward(batch)
        begun.set()
        return out

    runtime.engine.backend.forward = announced  # type: ignore[method-assign]
    streams, _ = four_that_share(runtime)
    assert begun.wait(60)
    streams[0].close()
    usages = [stream.turn.usage for stream in streams[1:]]
    assert sum(usage.computed_tokens for usage in usages) < 2 * usages[0].prompt_tokens
    with pytest.raises(RequestCancelled):
        assert streams[0].turn
    assert runtime.stats()["leases"] == 0


def test_prompt_that_others_wait_for_has_their_priority(runtime: Runtime) -> None:
    passes = Passes(runtime)
    shared = prompt(1, 8 * CHUNK)
    with standing_still(runtime):
        low = runtime.session().generate(shared, max_new_tokens=0, stream=True)
        middle = runtime.session(priority=1).generate(
            prompt(2, 8 * CHUNK), max_new_tokens=0, stream=True
        )
    wait_until(lambda: bool(passes.chunks))
    high = runtime.session(priority=2).generate([*shared, 5], max_new_tokens=0, stream=True)
    arrived = len(passes.chunks) + 2  # a step may have been under way
    for stream in (low, middle, high):
        assert stream.turn.finish_reason == "prefill"
    assert high.turn.usage.computed_tokens <= 9
    after = passes.chunks[arrived:]
    assert 2 in after
    assert 1 not in after[after.index(2) :], "whom it waited for was kept waiting itself"


def test_long_prompts_leave_rows_for_short_ones(make_runtime: Callable[..., Runtime]) -> None:
    runtime = make_runtime(prefill_chunk=CHUNK, max_running=4)
    passes = Passes(runtime)
    with standing_still(runtime):
        long = [
            runtime.session().generate(prompt(n, 10 * CHUNK), max_new_tokens=0, stream=True)
            for n in range(1, 5)
        ]
        short = runtime.session().generate(prompt(9, CHUNK - 2), max_new_tokens=0, stream=True)
    for stream in (*long, short):
        assert stream.turn.finish_reason == "prefill"
    assert passes.chunks.index(9) <= 2


class Queued:
    """As much of a request as the order of followers looks at."""

    def __init__(self) -> None:
        self.lease = SimpleNamespace(committed_len=0)
        self.decoding = False


def test_nobody_waits_for_what_a_leader_has_left_out_of_its_prompt() -> None:
    scheduler = Scheduler(chunk_len=CHUNK, max_captures=2, max_extending=2)
    leader, follower = Queued(), Queued()
    scheduler.running.append(leader)  # type: ignore[arg-type]
    scheduler.follow(follower, leader, 64)  # type: ignore[arg-type]
    assert scheduler.leader(follower) is leader  # type: ignore[arg-type]
    leader.decoding = True
    assert scheduler.leader(follower) is None  # type: ignore[arg-type]
    leader.decoding, leader.lease.committed_len = False, 64
    assert scheduler.leader(follower) is None  # type: ignore[arg-type]
