"""Shadow caches: deterministic, equal to simulations of the candidates, and never in the way."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from testkit.helpers import ids, rules_of

from agentcache.policy.auto import CANDIDATES, candidate
from agentcache.policy.base import Costs, Served
from agentcache.simulate import shadows as shadows_module
from agentcache.simulate.driver import Simulator
from agentcache.simulate.generate import agents
from agentcache.simulate.results import Setup
from agentcache.simulate.shadows import Shadows, Standings
from agentcache.simulate.shapes import load_shape

if TYPE_CHECKING:
    from agentcache.simulate.trace import Trace

NAMES = list(CANDIDATES)


def test_the_lead_changes_only_beyond_a_hundredth_of_the_tokens():
    for ahead, leader in [(9, "a"), (11, "b")]:
        standings = Standings(["a", "b"])
        for _ in range(400):
            standings.add(1000, [500, 500 + ahead])
        assert standings.leader == leader


def test_the_lead_changes_only_beyond_what_single_requests_differ_by():
    """As far ahead in sum, once by a few tokens each time, once by many here and less there."""
    for ahead, leader in [([5] * 40, "b"), ([200, -200] * 19 + [200, 0], "a")]:
        standings = Standings(["a", "b"])
        for each in ahead:
            standings.add(100, [200, 200 + each])
        assert standings.leader == leader


def test_it_takes_more_than_two_requests_to_change_the_lead_however_much_they_differ():
    for num_ahead, leader in [(1, "a"), (2, "a"), (3, "b")]:
        standings = Standings(["a", "b"])
        for at in range(40):
            standings.add(100, [0, 100 if at < num_ahead else 0])
        assert standings.leader == leader


def test_a_single_request_gives_the_lead_back_to_the_first():
    standings = Standings(["a", "b"])
    for _ in range(40):
        standings.add(100, [0, 1 + 100 * (standings.leader == "a")])
    assert standings.leader == "b"
    standings.add(10_000, [10_000, 0])
    assert standings.leader == "a"


def test_nobody_else_leads_before_enough_requests_were_seen():
    standings = Standings(["a", "b"])
    leaders = []
    for _ in range(40):
        standings.add(100, [0, 100])
        leaders.append(standings.leader)
    assert leaders == ["a"] * 29 + ["b"] * 11


def test_of_those_ahead_the_first_by_far_leads_and_a_tie_changes_nothing():
    standings = Standings(["a", "b", "c"])
    for _ in range(60):
        standings.add(100, [10, 40, 70])
    assert standings.leader == "c"
    standings = Standings(["a", "b"])
    for _ in range(60):
        standings.add(100, [50, 50])
    assert standings.leader == "a"


def test_old_requests_count_less_so_that_the_lead_can_come_back():
    standings = Standings(["a", "b"])
    for _ in range(3000):
        standings.add(100, [10, 50])
    assert standings.leader == "b"
    for _ in range(600):
        standings.add(100, [90, 10])
    assert standings.leader == "a"


class Noted(Standings):
    """Standings that keep what each has reused of every request."""

    def __init__(self) -> None:
        super().__init__(NAMES)
        self.rows: list[tuple[int, ...]] = []

    def add(self, prompt_tokens, reused) -> None:
        self.rows.append(tuple(reused))
        super().add(prompt_tokens, reused)


SHAPE = load_shape("marconi-7b")


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Sessions that go on and never close, under a budget that holds a part of them."""
    found = agents(seed=2, num_sessions=8, num_turns=8)
    requests = tuple(replace(each, closes=False) for each in found.requests)
    return replace(found, requests=requests)


def setup(policy: str) -> Setup:
    return Setup(policy=policy, budget_bytes=600_000_000)


def shadowed(trace: Trace) -> tuple[Noted, Simulator]:
    simulator = Simulator(trace, SHAPE, setup("auto"))
    assert simulator._shadows is not None
    noted = simulator._shadows._standings = Noted()
    simulator.run()
    return noted, simulator


@pytest.fixture(scope="module")
def noted(trace) -> Noted:
    return shadowed(trace)[0]


def test_shadows_are_the_same_every_time(trace, noted):
    again, _ = shadowed(trace)
    assert again.rows == noted.rows
    assert len(noted.rows) == len(trace.requests)
    assert again.leader == noted.leader


@pytest.mark.parametrize("name", NAMES)
def test_a_shadow_reuses_what_a_simulation_of_its_candidate_does(trace, noted, name):
    policy = candidate(name, Costs.of(SHAPE))
    result = Simulator(trace, SHAPE, setup("lru"), policy=policy).run()
    assert result.evictions  # or all candidates were alike
    assert [row[NAMES.index(name)] for row in noted.rows] == list(result.cached)


def test_candidates_differ_on_that_trace(noted):
    totals = {sum(column) for column in zip(*noted.rows, strict=True)}
    assert len(totals) > 1


def test_what_sessions_announce_holds_for_the_turn_that_it_follows(trace):
    requests = tuple(replace(each, expect_s=1234.0) for each in trace.requests[:6])
    _, simulator = shadowed(replace(trace, requests=requests))
    assert simulator._shadows is not None
    own = announced(simulator.cache)
    assert set(own) == {1234.0}
    assert all(announced(cache) == own for cache in caches(simulator._shadows))


def announced(cache) -> list[float | None]:
    """For how long each tip said that it would be away."""
    tips = [node for node in cache.tree.nodes() if node.refs and not node.structural]
    return [None if tip.due is None else round(tip.due - tip.last_access, 6) for tip in tips]


def make(*, num_pages: int = 64, limit_pages: int = 48, in_background: bool = False) -> Shadows:
    return Shadows(
        Costs(),
        lambda: rules_of(4),
        num_pages=num_pages,
        limit_pages=limit_pages,
        state_pages=2,
        in_background=in_background,
    )


def served(*tokens: int, at: float = 0.0, session: str | None = None) -> Served:
    return Served(b"", ids(*tokens), len(tokens) - 1, 0, (), at, session=session)


def conversation(count: int, session: str = "me") -> list[Served]:
    return [served(*range(2 + 2 * turn), at=float(turn), session=session) for turn in range(count)]


def caches(shadows: Shadows):
    return [shadow._cache for shadow in shadows._caches]


def test_sessions_stand_go_on_and_end_on_every_shadow():
    shadows = make()
    for request in conversation(4):
        shadows.served(request)
    for cache in caches(shadows):
        assert [node.end for node in cache.tree.nodes() if node.refs] == [8]
    shadows.expects("me", 5.0)
    for cache in caches(shadows):
        assert [node.due for node in cache.tree.nodes() if node.refs] == [3.0 + 5.0]
    shadows.over("me")
    shadows.over("me")
    for cache in caches(shadows):
        assert not any(node.refs for node in cache.tree.nodes())


def test_the_limit_holds_between_requests_and_what_does_not_fit_is_nobodys_gain():
    shadows = make(num_pages=16, limit_pages=6)
    noted = shadows._standings = Noted()
    for start in range(0, 400, 40):
        shadows.served(served(*range(start, start + 20), at=float(start)))
        assert all(cache.pools.pages.num_used <= 6 for cache in caches(shadows))
        assert not any(cache.leases for cache in caches(shadows))
    shadows.served(served(*range(200), at=1000.0))
    assert noted.rows[-1] == (0,) * len(NAMES)
    assert not any(cache.leases for cache in caches(shadows))


def test_a_thread_of_its_own_does_the_same_and_ends_when_it_is_closed():
    here, there = make(), make(in_background=True)
    assert there._thread is None, "nothing has left yet"
    there.evicted()
    thread = there._thread
    assert thread is not None
    notes = []
    for shadows in (here, there):
        noted = shadows._standings = Noted()
        notes.append(noted)
        for request in conversation(20):
            shadows.served(request)
            shadows.expects("me", 2.0)
        shadows.over("me")
    there.close()
    assert not thread.is_alive()
    there.close()
    assert notes[0].rows == notes[1].rows
    assert len(notes[0].rows) == 20
    for cache in caches(there):
        assert not any(node.refs for node in cache.tree.nodes())
    assert there.leader == here.leader


def test_what_came_before_the_first_eviction_is_not_lost():
    here, there = make(), make(in_background=True)
    rows = []
    for shadows in (here, there):
        noted = shadows._standings = Noted()
        rows.append(noted.rows)
        for request in conversation(20):
            shadows.served(request)
    there.over("me")
    here.over("me")
    assert rows[1] == []
    there.evicted()
    there.close()
    assert rows[0] == rows[1]


def test_what_waits_for_an_eviction_that_never_comes_is_bounded_and_costs_no_thread():
    shadows = make(in_background=True)
    most = shadows_module._MOST_WAITING
    for number in range(most):
        shadows.served(served(1, 2, 3, at=float(number)))
        shadows.over(f"session-{number}")
    assert shadows._work.qsize() == most
    shadows.close()
    shadows.evicted()
    assert shadows._thread is None


def test_without_a_thread_closing_does_nothing():
    shadows = make()
    shadows.close()
    shadows.close()
    assert shadows.leader == NAMES[0]


def test_tokens_may_change_after_they_were_handed_over():
    """The caller's array is its own again as soon as it was told."""
    shadows = make(in_background=True)
    shadows.evicted()
    noted = shadows._standings = Noted()
    held = threading.Event()
    shadows._work.put(held.wait)
    request = served(1, 2, 3, 4, 5, 6)
    shadows.served(request)
    request.tokens[:] = 9
    shadows.served(served(1, 2, 3, 4, 5, 6, 7, 8))
    held.set()
    shadows.close()
    assert noted.rows[-1] == (6,) * len(NAMES)


def test_a_full_queue_leaves_requests_out_and_holds_nobody_up():
    shadows = make(in_background=True)
    shadows.evicted()
    noted = shadows._standings = Noted()
    held, begun = threading.Event(), threading.Event()
    shadows._work.put(lambda: (begun.set(), held.wait()))
    begun.wait()
    most = shadows_module._MOST_WAITING
    for number in range(most + 50):
        shadows.served(served(1, 2, 3, at=float(number)))
    assert shadows._work.qsize() == most
    shadows.over("me")  # ends are never left out
    assert shadows._work.qsize() == most + 1
    held.set()
    shadows.close()
    assert len(noted.rows) == most


def test_random_requests_leave_every_shadow_whole():
    rng = np.random.default_rng(5)
    shadows = make(num_pages=48, limit_pages=40)
    history: dict[str, list[int]] = {}
    for step in range(200):
        name = str(rng.integers(5))
        tokens = history.setdefault(name, [1, 2, 3, 4])
        tokens += rng.integers(0, 9, rng.integers(2, 12)).tolist()
        shadows.served(served(*tokens, at=float(step), session=name))
        if len(tokens) > 100 or rng.random() < 0.1:
            shadows.over(name)
            del history[name]
    for cache in caches(shadows):
        cache.clear()
        assert not list(cache.tree.nodes())
        assert cache.pools.pages.num_used == 0
