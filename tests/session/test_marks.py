"""Ids and marks of sessions where things happen in an unlucky order."""

from __future__ import annotations

import pytest
from testkit.models import micro_runtime

from agentcache.sessions.registry import Registry


def test_session_without_an_id_is_new_even_if_its_name_was_taken() -> None:
    registry: Registry[str] = Registry()
    mine = registry.open("session-2", None, None, 0)
    assert registry.open(None, None, None, 0) is not mine


def test_fork_of_a_reopened_session_finds_a_free_id() -> None:
    with micro_runtime() as runtime:
        first = runtime.session("a")
        child = first.fork()
        first.close()
        again = runtime.session("a")
        other = again.fork()
        assert other.id != child.id


@pytest.mark.parametrize("seed", range(6))
def test_stopped_reply_after_preemption_does_not_leave_a_wrong_cursor(seed: int) -> None:
    """A pre-empted request files sampled ids beyond its prompt, and a stop string cuts them off."""
    message = {"role": "user", "content": "Hi"}
    with micro_runtime() as runtime:
        free = runtime.session().chat([message], max_new_tokens=40, temperature=1.0, seed=seed)
        stop = free.text[-12:-8]
        runtime.clear()
        engine, seen = runtime.engine, 0

        def preempt() -> None:
            for request in list(engine._stepper._scheduler.running):
                engine._stepper._suspend(request)

        session = runtime.session()
        emit_at = 20
        original = engine._stepper._say

        def say(request, ids, text):
            nonlocal seen
            seen += len(ids)
            if seen == emit_at:
                engine.post(preempt)
            original(request, ids, text)

        engine._stepper._say = say
        turn = session.chat([message], max_new_tokens=40, temperature=1.0, seed=seed, stop=[stop])
        assert turn.finish_reason == "stop"
        after = session.chat([{"role": "user", "content": "Go on"}], max_new_tokens=2, verify=True)
        assert after.verify.ok, (after.usage.cached_tokens, turn.usage.prompt_tokens, after.verify)


def test_rewind_that_loses_the_race_with_close_keeps_no_mark() -> None:
    with micro_runtime() as runtime:
        session = runtime.session("a")
        session.generate([5, 6, 7, 8], max_new_tokens=2)
        session.generate([*session.ids.tolist(), 9], max_new_tokens=2)
        node = session._record.tip(None).ancestor(1).ref.frontier.node
        before = node.refs
        hold = session._hold

        def close_meanwhile(tip):
            ref = hold(tip)
            runtime.session("a").close()
            return ref

        session._hold = close_meanwhile
        with pytest.raises(Exception, match="closed"):
            session.rewind(1)
        assert node.refs == before
