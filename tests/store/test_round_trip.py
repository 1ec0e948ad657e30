"""What was said comes back as it was: tokens, messages, tools, usage, misses."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from testkit.models import tokenizer
from testkit.stores import held, settled, sql, stored_runtime, user

from agentcache import InvalidRequest, Runtime, Store, StoreDamaged
from agentcache.store.base import FinishedTurn, SessionKey
from agentcache.store.writing import TurnWriter
from agentcache.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from agentcache import Session, Turn
    from agentcache.store.trajectories import StoredCall

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Keys in an order of their own: ünïcode, 漢字, 🙂.",
            "parameters": {"type": "object", "properties": {"z": {}, "a": {"type": "string"}}},
        },
    }
    for name in ("write", "read")
]


def check(call: StoredCall, turn: Turn, session: Session) -> None:
    """A stored call is the turn that its session just finished."""
    assert [*call.prompt_ids, *call.output_ids] == session.ids.tolist()
    assert call.output_ids.tolist() == turn.ids.tolist()
    assert call.reply_ids.tolist() == (turn.ids.tolist() if call.answer else [])
    assert [*call.messages, call.answer] == session.messages
    assert call.turn.usage == turn.usage
    assert call.turn.miss == (None if turn.miss is None else turn.miss.to_json())
    assert (call.turn.index, call.turn.tip) == (turn.index, turn.tip)
    assert call.turn.finish_reason == turn.finish_reason


def test_turns_come_back_with_tokens_messages_tools_usage_and_miss(
    runtime: Runtime, calls: Callable[[str], list[StoredCall]]
) -> None:
    with runtime.session("task") as session:
        for text in ("Run the tests.", "Again, ünïcode 漢字 🙂\u2028\x00.", "And \\u0041 again."):
            turn = session.chat([user(text)], tools=TOOLS, max_new_tokens=5)
            check(calls("task")[-1], turn, session)
        stored = calls("task")
    assert [call.turn.number for call in stored] == [1, 2, 3]
    assert all(call.tools == TOOLS for call in stored)
    functions = [tool["function"] for tool in stored[0].tools or ()]
    assert [*functions[0]["parameters"]["properties"]] == ["z", "a"]
    assert stored[1].turn.miss is not None


def test_a_later_list_of_tools_is_that_of_its_turn(
    runtime: Runtime, calls: Callable[[str], list[StoredCall]]
) -> None:
    with runtime.session("task") as session:
        for tools in (None, TOOLS, TOOLS[:1], TOOLS):
            session.complete([user("Hi.")], tools=tools, max_new_tokens=2)
    assert [call.tools for call in calls("task")] == [None, TOOLS, TOOLS[:1], TOOLS]


def test_an_edited_list_comes_back_edited(
    runtime: Runtime, calls: Callable[[str], list[StoredCall]]
) -> None:
    with runtime.session("task") as session:
        session.complete([user("One."), user("Two.")], max_new_tokens=3)
        turn = session.complete([user("One."), user("Other."), user("3")], max_new_tokens=3)
        check(calls("task")[1], turn, session)
    assert calls("task")[1].turn.miss is not None


def test_a_prompt_of_ids_has_tokens_and_no_messages(
    runtime: Runtime, calls: Callable[[str], list[StoredCall]]
) -> None:
    with runtime.session("ids") as session:
        session.generate([1, 2, 3, 4, 5], max_new_tokens=3)
        session.generate([*session.ids.tolist(), 7, 8], max_new_tokens=3)
        ids = session.ids.tolist()
    first, second = calls("ids")
    assert first.prompt_ids.tolist() == [1, 2, 3, 4, 5]
    assert [*second.prompt_ids, *second.output_ids] == ids
    assert first.messages == second.messages == ()


def test_a_prompt_without_a_reply_is_gone_on_from(
    runtime: Runtime, calls: Callable[[str], list[StoredCall]]
) -> None:
    with runtime.session("task") as session:
        session.chat([user("Warm up.")], max_new_tokens=0)
        turn = session.chat([user("Go.")], max_new_tokens=3)
        warm, went = calls("task")
        check(went, turn, session)
    assert warm.answer is None
    assert not len(warm.output_ids)
    assert warm.turn.finish_reason == "prefill"
    assert len(warm.messages) == 1


def test_a_reply_cut_within_a_token_is_gone_on_from(
    runtime: Runtime, calls: Callable[[str], list[StoredCall]], path: Path
) -> None:
    with runtime.session("task") as session:
        options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3}
        turn = session.chat([user("Say much.")], **options)
        pieces = [tokenizer().decode([token]) for token in turn.ids[4:].tolist()]
        inside = next(piece[1:] for piece in pieces if len(piece) > 4 and piece.isascii())
        session.rewind(0)
        cut = session.chat([user("Say much.")], stop=[inside], **options)
        assert cut.finish_reason == "stop"
        assert len(cut.text) < len(turn.text)
        after = session.chat([user("Go on.")], max_new_tokens=2)
        check(calls("task")[-1], after, session)
    stored, went_on = calls("task")[1:]
    assert stored.output_ids.tolist() == cut.ids.tolist()
    whole = [*stored.prompt_ids, *stored.output_ids]
    assert went_on.prompt_ids[: len(whole)].tolist() != whole  # it goes on from the cut
    kept = [*stored.prompt_ids, *stored.reply_ids]
    assert went_on.prompt_ids[: len(kept)].tolist() == kept
    assert stored.answer == cut.message
    assert sql(path, "SELECT length(history_tail) > 0 FROM turns WHERE number = 2") == [(1,)]


@pytest.mark.parametrize(
    "id",
    ["a\ud800b", "nul\x00", "back\\slash \\u0041", "../../etc", "x" * 10_000, "", "漢字🙂"],
    ids=["surrogate", "nul", "backslash", "path", "long", "empty", "unicode"],
)
def test_any_text_may_be_an_id_and_a_tenant(shared: Runtime, shared_store: Store, id: str) -> None:
    with shared.session(id, tenant=id, parent=id) as session:
        turn = session.chat([user("Hi.")], max_new_tokens=1)
        assert settled(shared)["failed"] == 0
        [found] = shared_store.sessions(id, tenants=(id,))
        [call] = shared_store.calls(found)
        check(call, turn, session)
    assert (found.id, found.tenant, found.parent) == (id, id, id)
    assert shared_store.sessions(id + "!") == shared_store.sessions(id, tenants=(None,)) == []


def test_tenants_are_told_apart_and_no_tenant_is_one(shared: Runtime, shared_store: Store) -> None:
    for tenant in (None, "None", "b"):
        with shared.session("same", tenant=tenant) as session:
            session.chat([user("Hi.")], max_new_tokens=1)
    settled(shared)
    assert [s.tenant for s in shared_store.sessions("same")] == [None, "None", "b"]
    assert [s.tenant for s in shared_store.sessions("same", tenants=(None,))] == [None]
    named = shared_store.sessions(tenants=("b", "None"))
    assert [s.tenant for s in named] == ["None", "b"]


def test_an_id_opened_again_is_another_session_and_says_when_it_ended(
    shared: Runtime, shared_store: Store
) -> None:
    for text in ("First.", "Second."):
        with shared.session("again") as session:
            session.chat([user(text)], max_new_tokens=1)
    left = shared.session("again")
    left.chat([user("Third.")], max_new_tokens=1)
    settled(shared)
    found = shared_store.sessions("again")
    assert [each.turns for each in found] == [1, 1, 1]
    assert [each.closed is None for each in found] == [False, False, True]
    texts = [call.messages[0]["content"] for each in found for call in shared_store.calls(each)]
    assert texts == ["First.", "Second.", "Third."]
    left.close()


def test_only_what_is_new_in_a_turn_is_written(runtime: Runtime, path: Path) -> None:
    history = 0
    with runtime.session("task") as session:
        for number in range(6):
            session.chat([user(f"Step {number} of the work.")], tools=TOOLS, max_new_tokens=4)
        history = len(session.ids)
    settled(runtime)
    [[num_bytes]] = sql(path, "SELECT sum(length(prompt_ids) + length(output_ids)) FROM turns")
    assert num_bytes == 4 * history
    assert sql(path, "SELECT count(*) FROM messages") == [(12,)]
    assert sql(path, "SELECT count(*) FROM toolsets") == [(1,)]


def test_a_caller_that_changes_its_objects_changes_nothing_stored(
    runtime: Runtime, calls: Callable[[str], list[StoredCall]]
) -> None:
    message: dict[str, Any] = user("As it was.")
    with runtime.session("task") as session:
        turn = session.chat([message], max_new_tokens=3)
        said, ids = turn.message["content"], turn.ids.tolist()
        message["content"] = turn.message["content"] = "changed"
        [call] = calls("task")
    assert call.messages[0]["content"] == "As it was."
    assert call.answer is not None
    assert call.answer["content"] == said
    assert call.output_ids.tolist() == ids


def test_a_turn_that_outlives_its_session_is_stored_as_part_of_it(
    runtime: Runtime, store: Store
) -> None:
    session = runtime.session("task")
    with session.chat([user("Hi.")], max_new_tokens=40, stream=True) as stream:
        next(iter(stream))
        session.close()
        turn = stream.turn
    settled(runtime)
    [found] = store.sessions("task")
    assert found.closed is not None
    [call] = store.calls(found)
    assert call.turn.tip is None
    assert call.output_ids.tolist() == turn.ids.tolist()


def test_the_url_may_be_a_path_or_a_text_and_closing_the_runtime_writes_everything(
    tmp_path: Path,
) -> None:
    for store in (tmp_path / "a.db", str(tmp_path / "b.db"), f"sqlite:///{tmp_path}/c.db"):
        with stored_runtime(store) as runtime:
            runtime.session("task").chat([user("Hi.")], max_new_tokens=1)
    for name in ("a.db", "b.db", "c.db"):
        with Store(tmp_path / name, create=False) as opened:
            assert [each.turns for each in opened.sessions("task")] == [1]


def test_readers_do_not_wait_for_a_writer(runtime: Runtime, store: Store, path: Path) -> None:
    runtime.session("task").chat([user("Hi.")], max_new_tokens=1)
    settled(runtime)
    assert sql(path, "PRAGMA journal_mode") == [("wal",)]
    with held(path):
        assert [each.id for each in store.sessions()] == ["task"]


class History:
    """Stands for a trajectory."""


def test_messages_that_no_encoding_has_come_back_as_they_were(store: Store) -> None:
    odd = {
        "role": "tool",
        "content": "a\ud800b\x00c\\ud800",
        "z": [1, None, {"é": "\udfff"}],
        "a": 1,
    }
    turn = finished("odd", odd, miss=lambda: {"got": "\udc00"})
    TurnWriter("m", "f").write(store._database, turn, 1.0)
    [call] = store.calls(store.sessions("odd")[0])
    assert call.messages == (odd,)
    assert [*call.messages[0]] == [*odd]
    assert call.answer == turn.answer
    assert call.tools == [odd]
    assert call.turn.miss == {"got": "\udc00"}
    assert call.turn.usage == turn.usage


def test_a_report_that_cannot_be_made_costs_no_turn(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> dict[str, Any]:
        raise InvalidRequest("the chat template refuses message 1")

    turn = finished("task", user("Hi."), miss=fails)
    with caplog.at_level(logging.ERROR, "agentcache"):
        TurnWriter("m", "f").write(store._database, turn, 1.0)
    [call] = store.calls(store.sessions("task")[0])
    assert call.messages == (user("Hi."),)
    assert call.turn.miss is None
    [record] = caplog.records
    assert "session 'task' is stored without the report of its miss" in record.message


def finished(
    session: str, message: Mapping[str, Any], miss: Callable[[], Mapping[str, Any]]
) -> FinishedTurn:
    """A session's first turn, with a message that is also its tool."""
    ids = np.array([5, 6], dtype=np.int32)
    return FinishedTurn(
        session=SessionKey(session, None, None, 1),
        session_closed=False,
        tip=1,
        index=1,
        history=History(),
        after=None,
        shared_len=0,
        prompt_ids=ids,
        output_ids=ids,
        history_ids=np.concatenate([ids, ids]),
        messages=[message],
        answer={"role": "assistant", "content": "\ud83d"},
        tools=[message],
        finish_reason="stop",
        usage=Usage(2, 0, 2, 2, 0.1, 0.2, (("device", 0),)),
        miss=miss,
    )


def test_a_store_that_lost_rows_says_so(runtime: Runtime, store: Store, path: Path) -> None:
    session = runtime.session("task")
    for text in ("One.", "Two."):
        session.chat([user(text)], max_new_tokens=2)
    settled(runtime)
    sql(path, "DELETE FROM turns WHERE number = 1")
    with pytest.raises(StoreDamaged, match="turn 1 is missing"):
        list(store.calls(store.sessions("task")[0]))
    sql(path, "UPDATE turns SET base_id = NULL")
    with pytest.raises(StoreDamaged, match="prompt tokens; prune"):
        list(store.calls(store.sessions("task")[0]))
