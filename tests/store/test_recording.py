"""Writing beside the work: who waits, who does not, and what a failure costs."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from testkit.stores import held, settled, sql, stored_runtime, user

from agentcache import ConfigError, Runtime, Store
from agentcache.session.recording import key_of
from agentcache.store import database

if TYPE_CHECKING:
    from pathlib import Path

    from agentcache import Session


def whole(store: Store, id: str) -> list[int]:
    """The tokens of the last stored call of a session."""
    *_, last = store.calls(store.sessions(id)[-1])
    return [*last.prompt_ids.tolist(), *last.output_ids.tolist()]


def is_ready(runtime: Runtime, session: Session) -> bool:
    assert runtime.recorder is not None
    return runtime.recorder.is_ready(key_of(session._record))


def test_the_next_call_of_a_session_waits_for_its_turn_to_be_written(
    runtime: Runtime, path: Path
) -> None:
    session, other = runtime.session("a"), runtime.session("b")
    with held(path):
        session.chat([user("Hi.")], max_new_tokens=1)  # the reply does not wait
        assert not is_ready(runtime, session)
        assert is_ready(runtime, other)
        other.chat([user("Hi.")], max_new_tokens=1)
        assert runtime.stats()["store"] == {"written": 0, "failed": 0, "waiting": 2}
    session.chat([user("Again.")], max_new_tokens=1)
    assert settled(runtime) == {"written": 3, "failed": 0, "waiting": 0}


def test_when_too_many_turns_wait_callers_do_and_the_engine_does_not(path: Path) -> None:
    with Store(path, capacity=1) as store, stored_runtime(store) as runtime:
        first, second = runtime.session("a"), runtime.session("b")
        caller = threading.Thread(target=lambda: second.chat([user("Hi.")], max_new_tokens=1))
        with held(path):
            first.chat([user("Hi.")], max_new_tokens=1)
            assert not is_ready(runtime, second)
            caller.start()
            assert runtime.stats()["store"]["waiting"] == 1
            assert second.tips == ()
        caller.join()
        assert second.tips == (1,)
        assert settled(runtime)["written"] == 2


async def test_async_callers_wait_without_holding_up_their_loop(path: Path) -> None:
    with Store(path, capacity=1) as store, stored_runtime(store) as runtime:
        session = runtime.session("a")
        with held(path):
            await session.achat([user("Hi.")], max_new_tokens=1)
            call = asyncio.ensure_future(session.achat([user("Again.")], max_new_tokens=1))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not call.done()
        await call
        assert settled(runtime) == {"written": 2, "failed": 0, "waiting": 0}


def test_a_write_that_fails_is_logged_and_counted_and_the_next_turn_is_written_whole(
    runtime: Runtime, store: Store, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = runtime.session("task")
    session.chat([user("One.")], max_new_tokens=3)
    settled(runtime)
    sql(path, "ALTER TABLE messages RENAME TO away")
    with caplog.at_level(logging.ERROR, "agentcache"):
        turn = session.chat([user("Two, a secret.")], max_new_tokens=3)
        assert len(turn.ids) == 3
        assert settled(runtime) == {"written": 1, "failed": 1, "waiting": 0}
    [record] = caplog.records
    assert "a turn of session 'task' was not stored" in record.message
    assert "secret" not in record.message
    sql(path, "ALTER TABLE away RENAME TO messages")
    session.chat([user("Three.")], max_new_tokens=3)
    assert settled(runtime)["written"] == 2
    assert whole(store, "task") == session.ids.tolist()
    *_, last = store.calls(store.sessions("task")[0])
    assert [*last.messages, last.answer] == session.messages


def test_a_locked_database_fails_no_call(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "_BUSY_S", 0.05)
    with stored_runtime(path) as runtime:
        session = runtime.session("task")
        with held(path):
            for text in ("One.", "Two."):
                assert len(session.chat([user(text)], max_new_tokens=2).ids) == 2
            assert settled(runtime)["failed"] == 2
        session.chat([user("Three.")], max_new_tokens=2)
        assert settled(runtime)["written"] == 1
        ids = session.ids.tolist()
    assert "locked" in caplog.records[0].message
    with Store(path) as store:
        assert whole(store, "task") == ids


def test_a_full_disk_fails_no_call(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Store(path) as store, stored_runtime(store) as runtime:
        [[pages]] = sql(path, "PRAGMA page_count")
        engine = store._database._engine
        engine.dispose()
        event.listen(
            engine, "connect", lambda made, _: made.execute(f"PRAGMA max_page_count={pages + 1}")
        )
        session = runtime.session("task")
        for number in range(6):
            session.chat([user(f"{number} " + "word " * 300)], max_new_tokens=1)
        counts = settled(runtime)
        assert counts["failed"] > 0
        assert counts["written"] + counts["failed"] == 6
        assert "full" in caplog.records[0].message
        stored = [call for each in store.sessions() for call in store.calls(each)]
        assert len(stored) == counts["written"]


def test_capacity_has_to_hold_a_turn(path: Path) -> None:
    with pytest.raises(ConfigError, match="capacity is 0"):
        Store(path, capacity=0)


def test_a_program_that_ends_without_closing_has_stored_its_turns(target: str) -> None:
    program = f"""
import numpy as np
from agentcache.store.base import FinishedTurn, SessionKey
from agentcache.store.trajectories import Store
from agentcache.types import Usage

class History: pass
history, ids = History(), np.arange(3, dtype=np.int32)
recorder = Store({target!r}).record(model="m", fingerprint="f")
for number in range(20):
    recorder.add(FinishedTurn(
        session=SessionKey("task", None, None, 1), session_closed=False, tip=1, index=1,
        history=history, after=None, shared_len=0, prompt_ids=ids, output_ids=ids,
        history_ids=np.concatenate([ids, ids]), messages=[], answer=None, tools=None,
        finish_reason="stop", usage=Usage(3, 0, 3, 3, 0.1, 0.2), miss=lambda: None))
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with Store(target, create=False) as store:
        assert [each.turns for each in store.sessions("task")] == [20]


def test_a_program_that_is_killed_loses_at_most_the_turn_in_flight(target: str) -> None:
    done = run(
        target,
        "for number in range(8): session.chat([user(f'Step {number}.')], max_new_tokens=2)",
        "print(session.ids.tolist(), flush=True)",
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert done.returncode == -9, done.stderr
    with Store(target, create=False) as store:
        [found] = store.sessions("task")
        stored = list(store.calls(found))
        assert len(stored) in (7, 8)
        assert found.closed is None
        ids = json.loads(done.stdout)
        last = stored[-1]
        known = [*last.prompt_ids.tolist(), *last.output_ids.tolist()]
        assert known == ids[: len(known)]
        with stored_runtime(store) as runtime:
            runtime.session("task").chat([user("After.")], max_new_tokens=1)
            assert settled(runtime)["written"] == 1


def run(target: str, *lines: str) -> Any:
    """A program with a session on a runtime that stores."""
    begin = (
        "import os, signal, sys",
        f"sys.path[:0] = {sys.path!r}",
        "from testkit.stores import stored_runtime, user",
        "assert 'sqlalchemy' not in sys.modules  # who stores nothing does not pay for it",
        f"runtime = stored_runtime({target!r})",
        "session = runtime.session('task')",
    )
    program = "\n".join([*begin, *lines])
    return subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=110
    )
