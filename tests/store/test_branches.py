"""Forks, rewinds, parallel calls and many sessions at once; and sessions that are deleted."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from testkit.held import engine_held
from testkit.stores import settled, sql, stored_runtime, user

from agentcache import ConfigError, Runtime, Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agentcache import Session
    from agentcache.store.trajectories import StoredCall

    Calls = Callable[[str], list[StoredCall]]


def grow(session: Session, *texts: str) -> None:
    for text in texts:
        session.chat([user(text)], max_new_tokens=3)


def told(call: StoredCall) -> list[str]:
    """What the user said so far."""
    return [message["content"] for message in call.messages if message["role"] == "user"]


def whole(call: StoredCall) -> list[int]:
    return [*call.prompt_ids.tolist(), *call.output_ids.tolist()]


def test_a_fork_goes_on_from_its_parents_turn_and_writes_only_its_own(
    runtime: Runtime, store: Store, calls: Calls, path: Path
) -> None:
    session = runtime.session("parent")
    grow(session, "One.", "Two.")
    fork = session.fork("child")
    grow(fork, "Left.", "More.")
    grow(session, "Right.")
    assert [told(call) for call in calls("child")] == [
        ["One.", "Two.", "Left."],
        ["One.", "Two.", "Left.", "More."],
    ]
    assert told(calls("parent")[-1]) == ["One.", "Two.", "Right."]
    assert whole(calls("child")[-1]) == fork.ids.tolist()
    assert whole(calls("parent")[-1]) == session.ids.tolist()
    assert [each.parent for each in store.sessions()] == [None, "parent"]
    assert sql(path, "SELECT count(*) FROM messages") == [(10,)]


def test_a_rewound_session_goes_on_from_the_turn_it_went_back_to(
    runtime: Runtime, calls: Calls
) -> None:
    session = runtime.session("task")
    grow(session, "One.", "Two.", "Three.")
    session.rewind(1)
    grow(session, "Other.")
    session.rewind(0)
    grow(session, "Anew.")
    stored = calls("task")
    assert [told(call) for call in stored[3:]] == [["One.", "Other."], ["Anew."]]
    assert [call.turn.index for call in stored] == [1, 2, 3, 2, 1]
    assert [call.turn.number for call in stored] == [1, 2, 3, 4, 5]
    assert whole(stored[-1]) == session.ids.tolist()


def test_parallel_calls_leave_a_tip_each(runtime: Runtime, calls: Calls) -> None:
    session = runtime.session("task")
    grow(session, "One.")
    with engine_held(runtime):
        streams = [
            session.chat([user(text)], tip=1, max_new_tokens=8, stream=True)
            for text in ["a", "b", "c"]
        ]
    for stream in streams:
        list(stream)
    *_, last = stored = calls("task")
    assert len({call.turn.tip for call in stored[1:]}) == 3
    assert sorted(told(call)[-1] for call in stored[1:]) == ["a", "b", "c"]
    assert len({tuple(call.prompt_ids[:10]) for call in stored}) == 1
    assert [*last.messages[:2]] == [*stored[1].messages[:2]]


def test_sessions_at_once_do_not_mix(runtime: Runtime, calls: Calls) -> None:
    sessions = [runtime.session(f"s{number}") for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda s: grow(s, f"I am {s.id}.", "Two.", "Three."), sessions))
    for session in sessions:
        stored = calls(session.id)
        assert [len(told(call)) for call in stored] == [1, 2, 3]
        assert {told(call)[0] for call in stored} == {f"I am {session.id}."}
        assert whole(stored[-1]) == session.ids.tolist()


def test_runtimes_that_share_a_store_keep_their_sessions(target: str, store: Store) -> None:
    with stored_runtime(store) as one, stored_runtime(target) as two:
        for runtime, text in ((one, "One."), (two, "Two."), (one, "Three."), (two, "Four.")):
            grow(runtime.session("same"), text)
    found = store.sessions("same")
    last = [told(list(store.calls(each))[-1]) for each in found]
    assert last == [["One.", "Three."], ["Two.", "Four."]]


def test_pruning_closed_sessions_leaves_forks_of_them_whole(
    runtime: Runtime, store: Store, calls: Calls, path: Path
) -> None:
    with runtime.session("parent") as session:
        grow(session, "One.", "Two.")
        fork = session.fork("child")
        grow(fork, "Left.", "More.")
    before = calls("child")
    settled(runtime)
    assert store.prune(closed=True) == 1
    assert [each.id for each in store.sessions()] == ["child"]
    after = calls("child")
    assert [whole(call) for call in after] == [whole(call) for call in before]
    assert [[*call.messages, call.answer] for call in after] == [
        [*call.messages, call.answer] for call in before
    ]
    assert sql(path, "SELECT count(*) FROM turns") == [(2,)]
    assert sql(path, "SELECT count(*) FROM messages") == [(8,)]


def test_a_session_goes_on_after_its_turns_were_pruned(
    runtime: Runtime, store: Store, calls: Calls
) -> None:
    session = runtime.session("task")
    grow(session, "One.", "Two.")
    settled(runtime)
    assert store.prune(before=float("inf")) == 1
    grow(session, "Three.")
    [call] = calls("task")
    assert told(call) == ["One.", "Two.", "Three."]
    assert whole(call) == session.ids.tolist()


def test_tools_nobody_uses_go_with_the_sessions_that_did(
    runtime: Runtime, store: Store, path: Path
) -> None:
    tools = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
    with runtime.session("task") as session:
        session.chat([user("Hi.")], tools=tools, max_new_tokens=1)
    settled(runtime)
    assert sql(path, "SELECT count(*) FROM toolsets") == [(1,)]
    store.prune(closed=True)
    assert sql(path, "SELECT count(*) FROM toolsets") == [(0,)]


def test_only_sessions_that_are_old_enough_and_closed_are_pruned(target: str) -> None:
    now = [100.0]
    with Store(target, now=lambda: now[0]) as store, stored_runtime(store) as runtime:
        for name, at in (("old", 100.0), ("old-open", 100.0), ("new", 300.0)):
            now[0] = at
            session = runtime.session(name)
            grow(session, "Hi.")
            if name != "old-open":
                session.close()
            settled(runtime)
        assert store.prune(closed=True, before=200.0) == 1
        assert [each.id for each in store.sessions()] == ["old-open", "new"]
        assert store.prune(before=200.0) == 1
        assert [each.id for each in store.sessions()] == ["new"]
        assert store.prune(before=200.0) == 0
        with pytest.raises(ConfigError, match="what to prune"):
            store.prune()


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_sessions_do_their_last_turn_comes_back_whole(
    runtime: Runtime, store: Store, calls: Calls, seed: int
) -> None:
    draw = random.Random(seed)
    sessions = [runtime.session("s0")]
    for step in range(25):
        session = draw.choice(sessions)
        match draw.choice(["chat", "chat", "chat", "edit", "fork", "rewind", "close", "prune"]):
            case "chat":
                session.chat([user(f"Step {step}.")], max_new_tokens=draw.choice([0, 2, 4]))
            case "edit":
                kept = session.messages[: draw.randrange(3)]
                session.complete([*kept, user(f"Edit {step}.")], max_new_tokens=2)
            case "fork":
                sessions.append(session.fork(f"s{step + 1}"))
                grow(sessions[-1], f"Fork {step}.")
                session = sessions[-1]
            case "rewind":
                session.rewind(draw.randrange(1 + session.stats()["turns"]))
                grow(session, f"Back {step}.")
            case "close":
                session.close()
                sessions.remove(session)
                session = runtime.session(session.id)
                sessions.append(session)
                grow(session, f"Anew {step}.")
            case _:
                settled(runtime)
                store.prune(closed=True)
                grow(session, f"Pruned {step}.")
        last = calls(session.id)[-1]
        if last.answer is not None:
            assert whole(last) == session.ids.tolist()
        assert [*last.messages, *([] if last.answer is None else [last.answer])] == session.messages
    for each in store.sessions():
        assert len(list(store.calls(each))) == each.turns
