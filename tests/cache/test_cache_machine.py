"""Sessions in any order against an oracle that knows, position by position, what was filed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from testkit.oracle import COMPOSITIONS, Layout, snapshot
from testkit.world import Ask, World

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBER = st.integers(0, 7)


def tokens(min_size: int, max_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Of two ids, so that most sequences share a prefix with many others."""
    return st.lists(st.integers(0, 1), min_size=min_size, max_size=max_size).map(tuple)


ASKS = st.builds(
    Ask,
    new=tokens(1, 9),
    reply=tokens(0, 5),
    cut=st.sampled_from([0, 0, 0, 1, 3, 9]),
    structural=st.lists(st.integers(1, 12), max_size=2).map(tuple),
    passing=st.lists(st.integers(1, 24), max_size=2).map(tuple),
    salt=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 1)),
    from_mark=st.booleans(),
    limit=st.none() | st.integers(0, 30),
)


def needs(what: Callable[[World], object]) -> Any:
    """A precondition on the world."""
    return precondition(lambda machine: bool(what(machine.world)))


RUNNING = needs(lambda world: world.running)
STANDING = needs(lambda world: any(actor.tips for actor in world.actors))


class CacheMachine(RuleBasedStateMachine):
    """Turns in pieces, forks, rewinds and evictions; the pools are small, so evictions are many."""

    composition: dict[str, Any]
    is_sound = False

    @initialize(
        page_sizes=st.sampled_from([(1, 1), (4, 4), (4, 3), (1, 4), (4, 1)]),
        num_pages=st.sampled_from([10, 20, 40]),
        policy=st.sampled_from(["lru", "session-lru"]),
        min_gain=st.sampled_from([1, 1, 3]),
    )
    def start(
        self, page_sizes: tuple[int, int], num_pages: int, policy: str, min_gain: int
    ) -> None:
        page_size, swa_page = page_sizes
        self.layout = Layout(
            page_size=page_size,
            swa_page=swa_page,
            num_pages=num_pages,
            policy=policy,
            min_gain=min_gain,
            **self.composition,
        )
        self.world = World(self.layout)
        self.program: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.do("open", 0)

    def do(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.is_sound = False  # until the invariant has been looked at
        self.program.append((name, args, kwargs))
        getattr(self.world, name)(*args, **kwargs)

    @rule(namespace=st.integers(0, 1))
    def open(self, namespace: int) -> None:
        self.do("open", namespace)

    @rule(actor=NUMBER, tip=NUMBER, ask=ASKS)
    def begin(self, actor: int, tip: int, ask: Ask) -> None:
        self.do("advance", 1.0)
        self.do("begin", actor, tip, ask)

    @rule(actor=NUMBER, tip=NUMBER, ask=ASKS, num=st.integers(1, 30))
    def whole_turn(self, actor: int, tip: int, ask: Ask, num: int) -> None:
        self.do("advance", 1.0)
        self.do("begin", actor, tip, ask)
        self.do("step", -1, num)
        self.do("step", -1, 30)
        self.do("finish", -1)

    @RUNNING
    @rule(flight=NUMBER, num=st.integers(1, 9))
    def step(self, flight: int, num: int) -> None:
        self.do("step", flight, num)

    @RUNNING
    @rule(flight=NUMBER, stopped=st.booleans(), release_first=st.booleans())
    def finish(self, flight: int, stopped: bool, release_first: bool) -> None:
        self.do("step", flight, 30)
        self.do("finish", flight, stopped=stopped, release_first=release_first)

    @RUNNING
    @rule(flight=NUMBER)
    def abort(self, flight: int) -> None:
        self.do("abort", flight)

    @RUNNING
    @rule(flight=NUMBER)
    def suspend(self, flight: int) -> None:
        self.do("suspend", flight)

    @needs(lambda world: world.suspended)
    @rule(flight=NUMBER)
    def resume(self, flight: int) -> None:
        self.do("resume", flight)

    @STANDING
    @rule(actor=NUMBER, tip=NUMBER)
    def fork(self, actor: int, tip: int) -> None:
        self.do("fork", actor, tip)

    @STANDING
    @rule(actor=NUMBER, tip=NUMBER, turns=st.integers(0, 3))
    def rewind(self, actor: int, tip: int, turns: int) -> None:
        self.do("rewind", actor, tip, turns)

    @needs(lambda world: len(world.actors) > 1)
    @rule(actor=NUMBER)
    def close(self, actor: int) -> None:
        self.do("close", actor)

    @STANDING
    @rule(actor=NUMBER, seconds=st.sampled_from([0.0, 5.0, 3600.0]))
    def idle(self, actor: int, seconds: float) -> None:
        self.do("idle", actor, seconds)

    @rule(seconds=st.sampled_from([1.0, 20.0, 1000.0]))
    def advance(self, seconds: float) -> None:
        self.do("advance", seconds)

    @rule()
    def evict(self) -> None:
        self.do("evict")

    @rule()
    def clear(self) -> None:
        self.do("clear")

    @rule(ask=ASKS)
    def look(self, ask: Ask) -> None:
        self.do("look", ask)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            self.is_sound = True

    def teardown(self) -> None:
        if not self.is_sound:
            return
        again = World(self.layout)
        for name, args, kwargs in self.program:
            getattr(again, name)(*args, **kwargs)
        assert again.events == self.world.events
        assert snapshot(again.cache)[:2] == snapshot(self.world.cache)[:2]
        self.world.end()


def machine(name: str) -> type[CacheMachine]:
    """The machine on a cache of that composition."""
    return type(name, (CacheMachine,), {"composition": COMPOSITIONS[name]})


@pytest.mark.timeout(600)  # a failure is shrunk first
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_any_order_of_operations_agrees_with_the_oracle(name: str) -> None:
    run_state_machine_as_test(
        machine(name), settings=settings(max_examples=70, stateful_step_count=50, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_any_order_of_operations_agrees_with_the_oracle_for_long(name: str) -> None:
    run_state_machine_as_test(
        machine(name),
        settings=settings(
            max_examples=1500,
            stateful_step_count=60,
            deadline=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
