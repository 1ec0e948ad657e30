"""Ids and marks of sessions where things happen in an unlucky order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from testkit.models import micro_runtime

from agentcache.sessions.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agentcache.runtime import Runtime


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


def cut_inside_a_token(runtime: Runtime, ids: list[int], text: str) -> Iterator[tuple[int, str]]:
    """(index k, stop string) where the stop begins inside token k and ends with token k + 2."""
    for k in range(4, len(ids) - 3):
        before, whole = runtime.tokenizer.decode(ids[:k]), runtime.tokenizer.decode(ids[: k + 3])
        stop = whole[len(before) + 1 :]
        clean = "\N{REPLACEMENT CHARACTER}" not in whole
        long = len(runtime.tokenizer.decode(ids[: k + 1])) > len(before) + 1
        if clean and long and text.startswith(whole) and text.find(stop) == len(before) + 1:
            yield k, stop


def test_stopped_reply_after_preemption_does_not_leave_a_wrong_cursor() -> None:
    """A pre-empted request files sampled ids beyond its prompt. A stop string that begins inside
    the last of them cuts it off: the history goes on differently there, at the same length."""
    message, tried = {"role": "user", "content": "Hi"}, 0
    with micro_runtime() as runtime:
        for seed in range(12):
            options = {"max_new_tokens": 40, "temperature": 1.0, "seed": seed}
            free = runtime.session().chat([message], **options)
            for k, stop in [*cut_inside_a_token(runtime, free.ids.tolist(), free.text)][:1]:
                tried += 1
                runtime.clear()
                session = runtime.session()
                undo = preempt_at(runtime, k + 2)
                turn = session.chat([message], **options, stop=[stop])
                undo()
                assert turn.finish_reason == "stop"
                go_on = [{"role": "user", "content": "Go on"}]
                after = session.chat(go_on, max_new_tokens=2, verify=True)
                assert after.verify is not None
                assert after.verify.ok, (seed, k, stop, after.usage)
    assert tried >= 5


def preempt_at(runtime: Runtime, count: int) -> Callable[[], None]:
    """Preempt whatever runs once `count` ids were said; returns what undoes it."""
    engine, seen = runtime.engine, 0
    stepper = engine._stepper
    original = stepper._say

    def preempt() -> None:
        for request in list(stepper._scheduler.running):
            stepper._suspend(request)

    def say(request: Any, ids: tuple[int, ...], text: str) -> None:
        nonlocal seen
        seen += len(ids)
        if seen == count and ids:
            engine.post(preempt)
        original(request, ids, text)

    stepper._say = say  # type: ignore[method-assign]

    def undo() -> None:
        stepper._say = original  # type: ignore[method-assign]

    return undo


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
