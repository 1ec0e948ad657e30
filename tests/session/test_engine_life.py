"""Every exit gives everything back: errors, cancels at any step, pre-emption, shared passes."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
from testkit.helpers import check
from testkit.models import idle_counts, micro_runtime

from agentcache.errors import RequestCancelled, RuntimeClosed
from agentcache.pools.tensors import TensorPools
from agentcache.session import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from agentcache.engine.backend import Batch
    from agentcache.runtime import Runtime

PROMPT = list(range(20, 110))


class Injected(Exception):
    """What the tests make fail."""


def faults(runtime: Runtime) -> Iterator[tuple[Any, str]]:
    """Every operation of a call that touches pools or the model."""
    engine = runtime.engine
    yield engine.backend, "forward"
    pools = runtime.cache.pools
    for name in ("load_state", "save_state", "clear_state", "copy_tail"):
        yield pools, name
    yield pools.pages, "alloc"
    yield pools.pages, "alloc_scattered"


def failing(owner: Any, name: str, at: int) -> Callable[[], None]:
    """Make the `at`-th call of a method raise; returns what undoes it."""
    original, count = getattr(owner, name), 0

    def method(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise Injected(f"{name} number {at}")
        return original(*args, **kwargs)

    setattr(owner, name, method)
    return lambda: setattr(owner, name, original)


def call(runtime: Runtime, **options: Any) -> Turn:
    """A call that resumes inside a page, files checkpoints on the way and decodes."""
    return runtime.session().generate(PROMPT, max_new_tokens=4, **options)


def test_error_at_any_operation_fails_the_call_and_nothing_else(runtime: Runtime) -> None:
    runtime.session().generate(PROMPT[:41], max_new_tokens=0)
    reference = call(runtime).ids.tolist()
    seen = 0
    for owner, name in faults(runtime):
        for at in range(1, 12):
            runtime.clear()
            runtime.session().generate(PROMPT[:41], max_new_tokens=0)
            undo = failing(owner, name, at)
            try:
                call(runtime)
            except Injected:
                seen += 1
            finally:
                undo()
            runtime.on_engine(lambda: check(runtime.cache))
            assert runtime.stats()["leases"] == 0
            turn = call(runtime, verify=True)
            assert turn.ids.tolist() == reference
            assert turn.verify is not None
            assert turn.verify.ok
    assert seen >= 10
    runtime.clear()
    assert set(idle_counts(runtime).values()) == {0}


def test_cancel_at_any_pass_gives_everything_back(runtime: Runtime) -> None:
    backend, forward = runtime.engine.backend, runtime.engine.backend.forward
    reference = call(runtime).ids.tolist()
    cancelled = 0
    for at in range(1, 9):
        runtime.clear()
        started, go_on, count = threading.Event(), threading.Event(), 0

        def slow(
            batch: Batch,
            at: int = at,
            started: threading.Event = started,
            go_on: threading.Event = go_on,
        ) -> list[torch.Tensor]:
            nonlocal count
            count += 1
            if count == at:
                started.set()
                go_on.wait(30)
            return forward(batch)

        backend.forward = slow  # type: ignore[method-assign]
        session = runtime.session()
        stream = session.generate(PROMPT, max_new_tokens=4, stream=True)
        if started.wait(2):
            stream.close()
        go_on.set()
        try:
            stream.turn  # noqa: B018 - waits for the call
        except RequestCancelled:
            cancelled += 1
        backend.forward = forward  # type: ignore[method-assign]
        runtime.on_engine(lambda: check(runtime.cache))
        assert runtime.stats()["leases"] == 0
        turn = call(runtime, verify=True)
        assert turn.ids.tolist() == reference
        assert turn.verify is not None
        assert turn.verify.ok
    assert cancelled >= 5
    runtime.clear()
    assert set(idle_counts(runtime).values()) == {0}


def test_end_of_the_engine_thread_leaves_nobody_waiting(make_runtime: Any) -> None:
    runtime = make_runtime()

    def end(batch: Batch) -> list[torch.Tensor]:
        raise SystemExit("the thread ends")

    runtime.engine.backend.forward = end
    with pytest.raises(RuntimeClosed) as failure:
        call(runtime)
    assert isinstance(failure.value.__cause__, SystemExit)
    with pytest.raises(RuntimeClosed):
        runtime.stats()


def test_error_while_the_turn_is_made_fails_that_call_and_leaves_no_reference(
    runtime: Runtime,
) -> None:
    session = runtime.session("named")
    undo = failing(runtime.prompts, "extend", 1)
    with pytest.raises(Injected):
        session.generate(PROMPT, max_new_tokens=2)
    undo()
    nodes = runtime.on_engine(lambda: list(runtime.cache.tree.nodes()))
    assert sum(node.refs for node in nodes) == 0
    assert session.tips == ()
    assert session.generate(PROMPT, max_new_tokens=2).index == 1


def test_nothing_of_a_verified_call_stays_in_memory(runtime: Runtime) -> None:
    def pools() -> set[int]:
        gc.collect()
        return {id(found) for found in gc.get_objects() if type(found) is TensorPools}

    before = pools()
    assert id(runtime.cache.pools) in before
    call(runtime, verify=True)
    assert pools() <= before


def test_cancelled_task_stops_the_work(runtime: Runtime) -> None:
    async def scenario() -> None:
        session = runtime.session()
        task = asyncio.create_task(session.agenerate(PROMPT, max_new_tokens=100_000))
        while not runtime.stats()["leases"]:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while runtime.stats()["leases"]:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_async_calls_and_streams_give_what_blocking_ones_do(runtime: Runtime) -> None:
    reference = call(runtime)

    async def scenario() -> None:
        turn = await runtime.session().agenerate(PROMPT, max_new_tokens=4)
        assert isinstance(turn, Turn)
        assert turn.ids.tolist() == reference.ids.tolist()
        stream = await runtime.session().agenerate(PROMPT, max_new_tokens=4, stream=True)
        assert not isinstance(stream, Turn)
        ids = [i async for delta in stream for i in delta.ids]
        assert ids == reference.ids.tolist()
        assert stream.turn.text == reference.text

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_leaving_an_async_stream_early_stops_the_work(runtime: Runtime) -> None:
    async def scenario() -> None:
        stream = await runtime.session().agenerate(PROMPT, max_new_tokens=100_000, stream=True)
        assert not isinstance(stream, Turn)
        async with stream:
            async for _ in stream:
                break
        while runtime.stats()["leases"]:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_sessions_that_decode_together_share_passes(make_runtime: Callable[..., Runtime]) -> None:
    alone = make_runtime()
    replies = [
        alone.session().generate([*PROMPT, n], max_new_tokens=12).ids.tolist() for n in range(4)
    ]
    steps_alone = alone.stats()["passes"]["decode"]
    runtime = make_runtime()
    streams = [
        runtime.session().generate([*PROMPT, n], max_new_tokens=12, stream=True, verify=True)
        for n in range(4)
    ]
    turns = [stream.turn for stream in streams]
    assert [turn.ids.tolist() for turn in turns] == replies
    assert all(turn.verify is not None and turn.verify.ok for turn in turns)
    assert runtime.stats()["passes"]["decode"] < 0.7 * steps_alone


def test_equal_cold_prompts_at_once_cost_one_prefill(runtime: Runtime) -> None:
    streams = [
        runtime.session().generate([*PROMPT, n], max_new_tokens=2, stream=True) for n in range(4)
    ]
    computed = [stream.turn.usage.computed_tokens for stream in streams]
    # The first computes all. The second finds the branch, whose state is then there for the others.
    assert computed[0] == len(PROMPT) + 1
    assert sum(computed[2:]) <= 2 * 2


def test_preempted_calls_resume_exactly(make_runtime: Callable[..., Runtime]) -> None:
    roomy = make_runtime()
    prompts = [[n + 10 * k for k in range(1, 600)] for n in range(3)]
    replies = [roomy.session().generate(p, max_new_tokens=60).ids.tolist() for p in prompts]
    # Room for about two of the three at their full length.
    runtime = make_runtime(budget="600KiB", max_running=3, prefill_chunk=256)
    streams = [
        runtime.session().generate(
            p, max_new_tokens=60, stream=True, verify=True, return_logits=True
        )
        for p in prompts
    ]
    turns = [stream.turn for stream in streams]
    assert [turn.ids.tolist() for turn in turns] == replies
    assert all(turn.verify is not None and turn.verify.ok for turn in turns)
    assert all(turn.verify is not None and turn.verify.positions == 60 for turn in turns)
    assert runtime.stats()["preempted"] > 0
    assert runtime.stats()["leases"] == 0


def test_many_threads_on_one_runtime_and_one_handle(runtime: Runtime) -> None:
    shared = runtime.session()
    shared.generate(PROMPT[:50], max_new_tokens=0)
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for step in range(4):
                own = runtime.session(f"thread-{n}")
                turn = own.generate(
                    [*PROMPT[: 50 + n], *range(step)] or [1], max_new_tokens=2, verify=True
                )
                assert turn.verify is not None
                assert turn.verify.ok
                shared.generate([*PROMPT[:50], n, step], max_new_tokens=1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    runtime.on_engine(lambda: check(runtime.cache))


def test_a_hundred_idle_sessions_do_not_block_the_next(
    make_runtime: Callable[..., Runtime],
) -> None:
    runtime = make_runtime(budget="300KiB", max_running=2)
    sessions = []
    for n in range(100):
        session = runtime.session(f"idle-{n}")
        session.generate([n + 1, *PROMPT[:40]], max_new_tokens=1)
        sessions.append(session)
    turn = runtime.session().generate([200, *PROMPT], max_new_tokens=1)
    assert turn.usage.output_tokens == 1
    first = sessions[0].generate([*sessions[0].ids.tolist(), 9], max_new_tokens=1, verify=True)
    assert first.usage.cached_tokens == 0
    assert first.verify is not None
    assert first.verify.ok
    assert runtime.stats()["held_bytes"] <= runtime.stats()["budget"]


def test_more_boundaries_than_staging_rows_are_all_filed(runtime: Runtime) -> None:
    """Marked messages in one chunk: the chunk is cut, and every mark can be resumed from."""
    with micro_runtime(prefill_chunk=512) as roomy:
        assert len(roomy.engine.pools.staging_rows) < 11
        marked = [{"role": "user", "content": f"part {n} " * 6, "mark": True} for n in range(12)]
        roomy.session().complete(marked, max_new_tokens=1)
        reused = [
            roomy.session().complete(
                [*marked[:n], {"role": "user", "content": "else"}], max_new_tokens=1, verify=True
            )
            for n in range(1, 13)
        ]
    assert all(turn.verify is not None and turn.verify.ok for turn in reused)
    assert all(turn.usage.computed_tokens < 25 for turn in reused)


def test_higher_priority_goes_first(make_runtime: Callable[..., Runtime]) -> None:
    runtime = make_runtime(max_running=1)
    finished: list[int] = []
    first = runtime.session().generate(PROMPT, max_new_tokens=60, stream=True)
    next(first)
    waiting = [
        runtime.session(priority=priority).generate(
            [priority + 5, *PROMPT], max_new_tokens=1, stream=True
        )
        for priority in (0, 1, 5)
    ]
    for priority, stream in zip((0, 1, 5), waiting, strict=True):
        assert stream._future is not None
        stream._future.add_done_callback(lambda _, p=priority: finished.append(p))
    for stream in (first, *waiting):
        stream.turn  # noqa: B018 - waits
    assert finished == [5, 1, 0]


def test_kept_logits_do_not_hold_the_rows_of_others(runtime: Runtime) -> None:
    stepper, held = runtime.engine._stepper, []
    take = stepper._take_logits

    def watched(request: Any, logits: torch.Tensor) -> Any:
        reason = take(request, logits)
        held.extend(row.untyped_storage().nbytes() for row in request.logits)
        return reason

    stepper._take_logits = watched  # type: ignore[method-assign]
    streams = [
        runtime.session().generate([*PROMPT, n], max_new_tokens=8, stream=True, return_logits=True)
        for n in range(3)
    ]
    for stream in streams:
        stream.turn  # noqa: B018 - waits
    assert set(held) == {4 * runtime.shape.vocab_size}
