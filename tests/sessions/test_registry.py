"""Sessions by id: which record an id means, which tips stand, and what a close leaves behind."""

from __future__ import annotations

import threading

import pytest
from testkit.helpers import ids

from agentcache.errors import AmbiguousTip, SessionClosed, SessionError, UnknownTip
from agentcache.sessions.refs import SessionRef
from agentcache.sessions.registry import MAX_TIPS, Registry, SessionRecord, Tip
from agentcache.tree.node import Cursor, Node


def mark() -> SessionRef:
    return SessionRef(Cursor.at(Node(0, ids(1), None, 1)), ())


def opened(registry: Registry[str] | None = None, id: str | None = "a") -> SessionRecord[str]:
    return (registry or Registry()).open(id, None, None, 0)


def turn(record: SessionRecord[str], parent: Tip[str] | None, history: str) -> Tip[str]:
    tip, _ = record.advance(parent, 99, history, mark())
    assert tip is not None
    return tip


def test_open_id_is_resumed_and_tenants_have_ids_of_their_own() -> None:
    registry: Registry[str] = Registry()
    first = registry.open("a", None, None, 3)
    assert registry.open("a", None, None, 0) is first
    assert first.priority == 3
    other = registry.open("a", "tenant", None, 0)
    assert other is not first
    assert registry.open("a", "", None, 0) not in (first, other)
    assert len(list(registry)) == 3


def test_sessions_without_an_id_are_always_new() -> None:
    registry: Registry[str] = Registry()
    records = [registry.open(None, None, None, 0) for _ in range(4)]
    assert len({record.id for record in records}) == 4


def test_closed_id_opened_again_is_a_new_generation() -> None:
    registry: Registry[str] = Registry()
    first = opened(registry)
    tip = turn(first, None, "one")
    first.close()
    second = opened(registry)
    assert second is not first
    assert second.generation > first.generation
    assert second.tips() == ()
    # a late finish of the old session's call touches neither
    late = mark()
    assert first.advance(tip, 99, "late", late) == (None, [late])
    assert second.tips() == first.tips() == ()


def test_forgetting_an_old_record_leaves_its_successor() -> None:
    registry: Registry[str] = Registry()
    first = opened(registry)
    first.close()
    second = opened(registry)
    registry.forget(first)
    assert opened(registry) is second
    second.close()
    registry.forget(second)
    assert list(registry) == []


def test_created_id_must_not_be_open() -> None:
    registry: Registry[str] = Registry()
    first = registry.create("a", "t", "parent", 2)
    assert (first.parent, first.tenant, first.priority) == ("parent", "t", 2)
    with pytest.raises(SessionError, match="already open"):
        registry.create("a", "t", None, 0)
    assert registry.create("a", None, None, 0) is not first
    first.close()
    again = registry.create("a", "t", None, 0)
    assert again.generation > first.generation


def test_forks_get_ids_of_their_own() -> None:
    record = opened()
    assert record.next_fork_id() != record.next_fork_id()


def test_fork_has_its_source_as_parent_and_an_id_nobody_has() -> None:
    registry: Registry[str] = Registry()
    source = registry.open("a", "t", None, 2)
    taken = registry.fork(source, None)
    assert (taken.parent, taken.tenant, taken.priority) == ("a", "t", 2)
    source.close()
    again = registry.open("a", "t", None, 0)
    other = registry.fork(again, None)
    assert other.id != taken.id
    with pytest.raises(SessionError, match="already open"):
        registry.fork(again, other.id)
    assert registry.fork(again, "named").id == "named"


def test_name_a_caller_chose_is_never_given_to_a_session_without_one() -> None:
    registry: Registry[str] = Registry()
    mine = [registry.open(f"session-{number}", None, None, 0) for number in range(1, 8)]
    assert registry.open(None, None, None, 0) not in mine


def test_turn_replaces_its_tip_and_gives_up_its_mark() -> None:
    record = opened()
    assert record.tip(None) is None
    first_mark = mark()
    first, left = record.advance(None, 0, "one", first_mark)
    assert first is not None
    assert left == []
    assert record.tip(None) is first
    second, left = record.advance(first, 99, "two", mark())
    assert second is not None
    assert left == [first_mark]
    assert record.tips() == (second,)
    assert (second.index, second.parent, second.history) == (2, first, "two")


def test_turn_that_leaves_its_tip_goes_on_from_the_last_turn_it_shares_whole() -> None:
    record = opened()
    first = turn(record, None, "one ")
    second = turn(record, first, "one two ")
    regenerated, left = record.advance(second, len("one t"), "one tea", mark())
    assert regenerated is not None
    assert (regenerated.index, regenerated.parent) == (2, first)
    assert left == [second.ref]
    elsewhere, _ = record.advance(regenerated, 2, "on", mark())
    assert elsewhere is not None
    assert (elsewhere.index, elsewhere.parent) == (1, None)


def test_parallel_turns_on_one_tip_leave_one_tip_each() -> None:
    record = opened()
    first = turn(record, None, "one")
    a, left_a = record.advance(first, 99, "a", mark())
    b, left_b = record.advance(first, 99, "b", mark())
    assert a is not None
    assert b is not None
    assert record.tips() == (a, b)
    assert (left_a, left_b) == ([first.ref], [])
    with pytest.raises(AmbiguousTip, match=f"{a.number}, {b.number}"):
        record.tip(None)
    assert record.tip(a.number) is a
    with pytest.raises(UnknownTip):
        record.tip(first.number)
    c = turn(record, b, "c")
    assert record.tips() == (a, c)


def test_of_too_many_tips_the_one_unused_for_longest_leaves() -> None:
    record = opened()
    tips = [turn(record, None, str(number)) for number in range(MAX_TIPS)]
    record.use(tips[0])
    new, left = record.advance(None, 0, "new", mark())
    assert new is not None
    assert left == [tips[1].ref]
    assert record.tips() == (tips[0], *tips[2:], new)
    # the one that a call goes on from makes room itself, and used again is no tip anew
    on, left = record.advance(tips[2], 99, "on", mark())
    assert on is not None
    assert left == [tips[2].ref]
    record.use(tips[2])
    assert record.tips() == (tips[0], *tips[3:], new, on)


def test_first_turns_in_parallel_are_tips_side_by_side() -> None:
    record = opened()
    a, b = turn(record, None, "a"), turn(record, None, "b")
    assert record.tips() == (a, b)
    assert (a.index, b.index) == (1, 1)


def test_ancestors_are_counted_along_the_path() -> None:
    record = opened()
    first = turn(record, None, "one")
    second = turn(record, first, "two")
    third = turn(record, second, "three")
    assert [third.ancestor(index) for index in (1, 2, 3)] == [first, second, third]
    for index in (0, -1, 4):
        with pytest.raises(UnknownTip, match="turns 1 to 3"):
            third.ancestor(index)


def test_rewound_session_stands_at_the_target_and_leaves_the_tip() -> None:
    record = opened()
    first = turn(record, None, "one")
    second = turn(record, first, "two")
    new = mark()
    assert record.stand_at(second, first, new) == [second.ref]
    [tip] = record.tips()
    assert (tip.index, tip.history, tip.ref, tip.parent) == (1, "one", new, None)
    assert tip.number not in (first.number, second.number)
    branch = turn(record, tip, "other two")
    assert branch.index == 2
    assert branch.ancestor(1) is tip
    assert record.stand_at(branch, None, None) == [branch.ref]
    assert record.tip(None) is None


def test_fork_stands_beside_nothing_and_leaves_nothing() -> None:
    source = turn(opened(), None, "one")
    child = opened(id="b")
    assert child.stand_at(None, source, mark()) == []
    tip = child.tip(None)
    assert tip is not None
    assert tip.history == "one"


def test_close_gives_up_every_mark_once() -> None:
    record = opened()
    first = turn(record, None, "one")
    a, b = turn(record, first, "a"), turn(record, first, "b")
    assert record.close() == [a.ref, b.ref]
    assert record.closed
    assert record.close() == []
    with pytest.raises(SessionClosed, match="'a'"):
        record.check_open()
    with pytest.raises(SessionClosed):
        record.stand_at(None, first, mark())
    assert record.tips() == ()


def test_calls_are_counted() -> None:
    record = opened()
    record.count(10, 4)
    record.count(5, 5)
    assert record.counts() == {"calls": 2, "prompt_tokens": 15, "cached_tokens": 9}


def test_many_threads_share_registry_and_record() -> None:
    registry: Registry[str] = Registry()
    record = opened(registry)
    first = turn(record, None, "one")
    start = threading.Barrier(4)
    numbers: list[int] = []

    def work(number: int) -> None:
        start.wait()
        for at in range(50):
            numbers.append(turn(record, first, f"{number}/{at}").number)
            record.count(2, 1)
            record.next_fork_id()
            registry.open(None, None, None, 0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(numbers)) == 200
    assert len(record.tips()) == MAX_TIPS
    assert record.counts()["prompt_tokens"] == 400
    assert record.forks == 200
    assert len(list(registry)) == 201
