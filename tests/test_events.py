"""Listeners hear what happens, in order and once, and cannot harm those who make it happen."""

from __future__ import annotations

import gc
import json
import logging
import random
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.models import idle_counts, micro_runtime
from testkit.tiers import Crowd, make_tiered, wander

from agentcache.errors import SessionError
from agentcache.events import Event, EventName, Events
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agentcache.runtime import Runtime

SESSION_EVENTS = ("open", "move", "close")


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with micro_runtime() as made:
        yield made


def sessions_of(runtime: Runtime) -> list[Event]:
    """What is told of sessions from now on."""
    told: list[Event] = []

    def listen(event: Event) -> None:
        if event.name in SESSION_EVENTS:
            told.append(event)

    runtime.events.subscribe(listen)
    return told


def named(told: list[Event]) -> list[tuple[str, str | None]]:
    return [(event.name, event.session) for event in told]


def test_every_listener_hears_every_event_in_order() -> None:
    events = Events()
    one: list[Event] = []
    two: list[Event] = []
    assert not events.active
    events.subscribe(one.append)
    events.emit(Event("open", session="a"))
    events.subscribe(two.append)
    events.emit(Event("close", session="a"))
    assert events.active
    assert named(one) == [("open", "a"), ("close", "a")]
    assert named(two) == [("close", "a")]


def test_unsubscribing_ends_it_for_that_subscription_alone() -> None:
    events, seen = Events(), []
    hear = seen.append
    stops = [events.subscribe(hear) for _ in range(2)]
    events.emit(Event("open"))
    assert len(seen) == 2
    stops[0]()
    events.emit(Event("open"))
    assert len(seen) == 3, "subscribed twice, ended once"
    stops[0]()
    assert events.active
    stops[1]()
    events.emit(Event("open"))
    assert len(seen) == 3
    assert not events.active


def test_listener_may_end_itself_and_others_still_hear() -> None:
    events, seen = Events(), []
    stops: list[Callable[[], None]] = []

    def once(event: Event) -> None:
        seen.append("once")
        stops[0]()

    stops.append(events.subscribe(once))
    events.subscribe(lambda event: seen.append("other"))
    events.emit(Event("open"))
    events.emit(Event("open"))
    assert seen == ["once", "other", "other"]


def test_listener_that_raises_is_logged_and_told_nothing_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, seen, calls = Events(), [], []

    def bad(event: Event) -> None:
        calls.append(event)
        raise ValueError("out of order")

    events.subscribe(bad)
    events.subscribe(seen.append)
    with caplog.at_level(logging.ERROR, logger="agentcache"):
        for name in ("open", "close"):
            events.emit(Event(name))
    assert len(calls) == 1
    assert [event.name for event in seen] == ["open", "close"]
    [record] = caplog.records
    assert record.name == "agentcache"
    assert "out of order" in str(record.exc_info)


TEXTS = st.none() | st.text(max_size=4)
EVENTS = st.builds(
    Event,
    name=st.sampled_from(get_args(EventName)),
    key=st.integers(-1, 9),
    boundary=st.integers(0, 9),
    start=st.integers(0, 9),
    kind=st.none() | st.sampled_from([*Kind, "other"]),
    parent=st.integers(-1, 9),
    tokens=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    namespace=TEXTS,
    salt=TEXTS,
    session=TEXTS,
    tenant=TEXTS,
    tier=st.integers(1, 3),
)


def from_json(values: dict[str, Any]) -> Event:
    return Event(**{**values, "tokens": tuple(values.get("tokens", ()))})


@given(EVENTS)
def test_json_of_an_event_is_plain_and_holds_all_of_it(event: Event) -> None:
    values = event.to_json()
    text = json.dumps(values)
    assert json.loads(text) == values
    assert {type(value) for value in values.values()} <= {str, int, list}
    assert from_json(json.loads(text)) == event
    assert values["name"] == event.name
    defaults = {field.name: field.default for field in fields(Event)}
    assert not [n for n, v in values.items() if n != "name" and v in (defaults[n], [])]


def test_events_of_a_cache_are_plain_json_too() -> None:
    events = Events()
    seen: list[Event] = []
    events.subscribe(seen.append)
    cache = make_tiered(num_pages=20, window=5, state_pages=1, events=events)
    wander(Crowd(cache), random.Random(3), 120)
    assert {event.name for event in seen} == set(get_args(EventName)) - set(SESSION_EVENTS)
    for event in seen:
        values = event.to_json()
        plain = [*values.values(), *values.get("tokens", ())]
        assert {type(value) for value in plain} <= {str, int, list}
        assert from_json(json.loads(json.dumps(values))) == event


def test_nothing_is_told_of_what_only_looks(runtime: Runtime) -> None:
    session = runtime.session("a")
    session.generate(list(range(5, 30)), max_new_tokens=2)
    seen: list[Event] = []
    runtime.events.subscribe(seen.append)
    runtime.stats()
    assert session.stats()["turns"] == 1
    assert runtime.session("a").ids.tolist() == session.ids.tolist()
    assert not seen


def test_session_opens_moves_with_each_turn_and_closes_once(runtime: Runtime) -> None:
    told = sessions_of(runtime)
    session = runtime.session("a", tenant="t")
    again = runtime.session("a", tenant="t")
    ends = []
    for turn in range(3):
        again.generate([*again.ids.tolist(), 5 + turn, 9], max_new_tokens=2)
        ends.append(len(again.ids) - 1)
    session.close()
    again.close()
    assert named(told) == [("open", "a"), *[("move", "a")] * 3, ("close", "a")]
    assert {event.tenant for event in told} == {"t"}
    assert [event.boundary for event in told if event.name == "move"] == ends
    assert len({event.key for event in told if event.name == "move"}) == 3
    with runtime.session("a", tenant="t"):
        pass
    assert named(told)[5:] == [("open", "a"), ("close", "a")]


def test_move_names_a_node_that_was_told_before(runtime: Runtime) -> None:
    told: list[Event] = []
    runtime.events.subscribe(told.append)
    session = runtime.session("a")
    session.generate(list(range(5, 30)), max_new_tokens=3)
    session.generate([*session.ids.tolist(), 7], max_new_tokens=3)
    known: dict[int, int] = {}
    moved = 0
    for event in told:
        if event.name == "insert":
            known[event.key] = event.boundary
            assert event.session == "a"
        if event.name == "move":
            assert known[event.key] == event.boundary
            moved += 1
    assert moved == 2


def test_fork_is_a_session_of_its_own(runtime: Runtime) -> None:
    told = sessions_of(runtime)
    with runtime.session("a") as session:
        session.generate(list(range(5, 30)), max_new_tokens=2)
        with session.fork("b") as child:
            child.generate([*child.ids.tolist(), 9], max_new_tokens=2)
        with session.fork("c"):
            pass
    assert named(told) == [
        ("open", "a"),
        ("move", "a"),
        ("open", "b"),
        ("move", "b"),  # where its parent stands
        ("move", "b"),  # its own turn
        ("close", "b"),
        ("open", "c"),
        ("move", "c"),
        ("close", "c"),
        ("close", "a"),
    ]


def test_refused_fork_or_reopening_opens_nothing(runtime: Runtime) -> None:
    told = sessions_of(runtime)
    session = runtime.session("a")
    with pytest.raises(SessionError):
        session.fork("a")
    with pytest.raises(SessionError):
        runtime.session("a", parent="other")
    assert named(told) == [("open", "a")]


def test_handle_that_is_collected_closes_its_session(runtime: Runtime) -> None:
    told = sessions_of(runtime)
    session = runtime.session()
    name = session.id
    session.generate(list(range(5, 30)), max_new_tokens=2)
    del session
    gc.collect()
    runtime.stats()  # what the collection left to the engine is done by then
    assert named(told) == [("open", name), ("move", name), ("close", name)]


def test_closed_handle_that_is_collected_is_not_told_again(runtime: Runtime) -> None:
    told = sessions_of(runtime)
    with runtime.session() as session:
        name = session.id
    del session
    gc.collect()
    runtime.stats()
    assert named(told) == [("open", name), ("close", name)]


def test_named_handle_that_is_collected_leaves_its_session_open(runtime: Runtime) -> None:
    told = sessions_of(runtime)
    runtime.session("a").generate([5, 6, 7], max_new_tokens=1)
    kept = runtime.session()
    kept.detach()
    name = kept.id
    del kept
    gc.collect()
    runtime.stats()
    assert named(told) == [("open", "a"), ("move", "a"), ("open", name)]


def test_session_closed_during_its_call_does_not_move(runtime: Runtime) -> None:
    told = sessions_of(runtime)
    session = runtime.session("a")
    stream = session.generate(list(range(5, 30)), max_new_tokens=30, stream=True)
    next(stream)
    session.close()
    for _ in stream:
        pass
    assert named(told) == [("open", "a"), ("close", "a")]


@pytest.mark.parametrize("name", ["open", "insert", "file", "move", "remove", "close"])
def test_call_is_unharmed_by_a_listener_that_raises(
    runtime: Runtime, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = list(range(5, 40))
    expected = runtime.session().generate(prompt, max_new_tokens=4)
    runtime.clear()
    failed = []

    def bad(event: Event) -> None:
        if event.name == name:
            failed.append(event)
            raise RuntimeError("no")

    runtime.events.subscribe(bad)
    told = sessions_of(runtime)
    with runtime.session("a") as session:
        turn = session.generate(prompt, max_new_tokens=4, verify=True)
        session.generate([*session.ids.tolist(), 9], max_new_tokens=2)
    runtime.clear()
    assert turn.ids.tolist() == expected.ids.tolist()
    assert turn.verify is not None
    assert turn.verify.ok
    assert len(failed) == 1
    assert "a listener to cache events failed" in caplog.text
    assert named(told) == [("open", "a"), ("move", "a"), ("move", "a"), ("close", "a")]
    assert set(idle_counts(runtime).values()) == {0}
