"""Sessions that calls have: none is closed under a call, and no end of a call waits."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import litellm
import pytest
from testkit.held import engine_held

from agentcache.integrations import litellm_provider
from agentcache.integrations.litellm_provider.models import Sessions

if TYPE_CHECKING:
    from agentcache import Runtime

MODEL = "agentcache/tiny-agent"
HELLO = [{"role": "user", "content": "Which files are there?"}]
LONG = 20_000
"""More tokens than a test would wait for."""


def begin(max_tokens: int = LONG, **params: Any) -> Any:
    """A stream that nobody reads yet."""
    return litellm.completion(MODEL, HELLO, max_tokens=max_tokens, stream=True, **params)


def ask(session_id: str) -> None:
    litellm.completion(MODEL, HELLO, max_tokens=2, session_id=session_id)


def open_ids(runtime: Runtime) -> set[str]:
    return {record.id for record in runtime.registry if not record.closed}


def wait_for_turn(runtime: Runtime) -> None:
    """Until a turn is over, so that its session has a mark to leave."""
    for _ in range(1000):
        if runtime.stats()["sessions"]["tips"]:
            return
        time.sleep(0.01)
    pytest.fail("no turn was finished")


def check_nothing_left(runtime: Runtime) -> None:
    assert open_ids(runtime) == set()
    nodes = runtime.on_engine(lambda: list(runtime.cache.tree.nodes()))
    assert sum(node.refs for node in nodes) == 0


@pytest.mark.parametrize("give_up", ["close", "drop"])
def test_giving_a_finished_stream_up_does_not_wait_for_the_engine(
    runtime: Runtime, give_up: str
) -> None:
    stream = begin(max_tokens=2)
    wait_for_turn(runtime)
    with engine_held(runtime):
        if give_up == "close":
            stream.close()
        del stream
        gc.collect()
        assert open_ids(runtime) == set()
    check_nothing_left(runtime)


async def test_closing_a_finished_stream_does_not_keep_the_loop_waiting(runtime: Runtime) -> None:
    stream = await litellm.acompletion(MODEL, HELLO, max_tokens=2, stream=True)
    wait_for_turn(runtime)
    with engine_held(runtime):
        await stream.aclose()
        assert open_ids(runtime) == set()
    check_nothing_left(runtime)


def test_closing_sessions_that_had_their_time_does_not_wait_for_the_engine(
    runtime: Runtime,
) -> None:
    sessions = Sessions(None, 1, 60.0, time.monotonic)
    old = sessions.open(runtime, "old")
    old.session.complete(HELLO, max_new_tokens=1)
    old.end()
    with engine_held(runtime):
        sessions.open(runtime, "new").end()
        assert open_ids(runtime) == {"new"}
    sessions.close()
    check_nothing_left(runtime)


def test_a_session_with_a_call_under_way_is_not_closed_for_want_of_room(runtime: Runtime) -> None:
    litellm_provider.unregister()
    litellm_provider.register(runtime, max_sessions=1)
    stream = begin(session_id="a")
    ask("b")
    assert open_ids(runtime) == {"a", "b"}
    next(iter(stream))
    stream.close()
    ask("c")
    assert open_ids(runtime) == {"c"}


def test_a_session_is_idle_from_the_end_of_its_last_call(runtime: Runtime) -> None:
    now = [0.0]
    litellm_provider.unregister()
    litellm_provider.register(runtime, idle_s=60, clock=lambda: now[0])
    stream = begin(session_id="a")
    now[0] = 61.0
    ask("b")
    assert open_ids(runtime) == {"a", "b"}
    stream.close()
    now[0] = 110.0
    ask("b")
    assert open_ids(runtime) == {"a", "b"}
    now[0] = 122.0
    ask("b")
    assert open_ids(runtime) == {"b"}


def test_a_refused_call_has_its_session_no_longer(runtime: Runtime) -> None:
    litellm_provider.unregister()
    litellm_provider.register(runtime, max_sessions=1)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            MODEL,
            [{"role": "user", "content": "word " * (runtime.max_len + 1)}],
            max_tokens=2,
            session_id="a",
        )
    ask("b")
    assert open_ids(runtime) == {"b"}


def test_ending_a_use_twice_counts_once(runtime: Runtime) -> None:
    sessions = Sessions(None, 1, 60.0, time.monotonic)
    first, second = sessions.open(runtime, "a"), sessions.open(runtime, "a")
    assert first.session is second.session
    first.end()
    first.end()
    sessions.open(runtime, "b").end()
    assert not second.session.closed
    second.end()
    sessions.open(runtime, "b").end()
    assert second.session.closed
    sessions.close()


def test_nobody_is_handed_a_session_that_another_thread_closes(runtime: Runtime) -> None:
    sessions = Sessions(None, 1, 60.0, time.monotonic)
    start, closed = threading.Barrier(4), []

    def work(number: int) -> None:
        start.wait()
        for at in range(200):
            use = sessions.open(runtime, f"s{(number + at) % 3}")
            for _ in range(20):
                if use.session.closed:
                    closed.append((number, at))
            use.end()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert closed == []
    sessions.close()
