"""Closing without waiting for the engine, as event loops and finalizers have to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from testkit.held import Held, engine_held

from agentcache.errors import SessionClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.events import Event
    from agentcache.runtime import Runtime


def marks(runtime: Runtime) -> int:
    return runtime.on_engine(lambda: sum(node.refs for node in runtime.cache.tree.nodes()))


def test_close_without_waiting_ends_the_session_while_the_engine_is_busy(runtime: Runtime) -> None:
    session = runtime.session("job")
    session.generate([5, 6, 7, 8], max_new_tokens=2)
    assert marks(runtime) > 0
    with engine_held(runtime):
        session.close(wait=False)
        session.close(wait=False)
        with pytest.raises(SessionClosed, match="job"):
            session.generate([5])
        again = runtime.session("job")
        assert again.tips == ()
    assert marks(runtime) == 0
    assert not again.closed
    assert again.generate([5, 6, 7, 8, 9], max_new_tokens=1).usage.cached_tokens > 0


def test_close_without_waiting_is_told_once(runtime: Runtime) -> None:
    heard: list[Event] = []
    session = runtime.session("job")
    runtime.events.subscribe(heard.append)
    session.close(wait=False)
    session.close()
    assert [event.name for event in heard] == ["close"]


def test_waiting_close_returns_when_the_marks_are_gone(runtime: Runtime) -> None:
    session = runtime.session("job")
    session.generate([5, 6, 7, 8], max_new_tokens=2)
    ref = session._record.tips()[0].ref
    held = Held(runtime)
    threading.Timer(0.05, held.release).start()
    session.close()
    assert not ref.held


def test_close_without_waiting_works_while_the_runtime_closes_and_after(
    make_runtime: Callable[..., Runtime],
) -> None:
    runtime = make_runtime()
    first, second = runtime.session("first"), runtime.session("second")
    for session in (first, second):
        session.generate([5, 6, 7, 8], max_new_tokens=2)
    held = Held(runtime)
    closing = threading.Thread(target=runtime.close)
    closing.start()
    while not runtime.engine.closed:
        pass
    first.close(wait=False)
    held.release()
    closing.join()
    second.close(wait=False)
    assert held.in_time
    assert first.closed
    assert second.closed
