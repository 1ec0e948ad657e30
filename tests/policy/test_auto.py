"""`auto`: whoever leads is followed, and nothing gets lost where the order changes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from testkit.helpers import Agent, Forest, check, ids, rules_of

from agentcache.cache import HybridCache
from agentcache.clock import ManualClock
from agentcache.metrics import Metrics
from agentcache.policy.auto import CANDIDATES, Auto, candidate
from agentcache.policy.base import Costs, Served
from agentcache.policy.cost import FlopsModel
from agentcache.policy.learned import Learned
from agentcache.policy.ranked import EvictionOrder
from agentcache.policy.recency import Recency
from agentcache.policy.scored import ScoredOrder
from agentcache.policy.session_lru import SessionLRU
from agentcache.pools.base import Counting, RowAllocator
from agentcache.pools.pages import PageAllocator
from agentcache.tree.radix_tree import RadixTree

COSTS = Costs(FlopsModel(10.0, ((None, 2.0),)), token_bytes=4, checkpoint_bytes=32)
NAMES = list(CANDIDATES)


class Script:
    """A contest whose leader is whom the test says; notes what it is told."""

    def __init__(self) -> None:
        self.leader = NAMES[0]
        self.told: list[tuple[object, ...]] = []
        self.num_evicted = 0

    def served(self, request: Served) -> None:
        self.told.append(("served", request.session))

    def evicted(self) -> None:
        self.num_evicted += 1

    def over(self, session: str) -> None:
        self.told.append(("over", session))

    def expects(self, session: str, seconds: float) -> None:
        self.told.append(("expects", session, seconds))


def served(at: float = 0.0) -> Served:
    return Served(b"", ids(1, 2), 1, 0, (), at, session="me")


def make(contest: Script | None, num_pages: int = 4096) -> tuple[HybridCache, Auto]:
    policy = Auto(COSTS, contest)
    pools = Counting(PageAllocator(num_pages), RowAllocator(4), 2)
    cache = HybridCache(RadixTree(rules_of(4)), pools, policy, ManualClock(), Metrics())
    return cache, policy


def check_order(cache: HybridCache, policy: Auto) -> None:
    """The order that is followed knows its own entries and nobody else's."""
    assert policy._order is not None
    order = policy._order._order
    nodes = list(cache.tree.nodes())
    placed = [node for node in nodes if node.queue >= 0]
    if isinstance(order, ScoredOrder):
        assert sorted(node.queue for node in placed) == list(range(len(order)))
        assert all(order._table.nodes[node.queue] is node for node in placed)
        return
    assert isinstance(order, EvictionOrder)
    weights = [0] * len(order.weights)
    for node in placed:
        weights[node.queue] += node.weight
    assert order.weights == weights


def act(cache: HybridCache, rng: np.random.Generator, agents: list[Agent]) -> None:
    """One turn, fork, close, announcement or eviction."""
    action = rng.random()
    if action < 0.2 or not agents:
        agents.append(Agent(cache))
        agents[-1].tokens = np.arange(8, dtype=np.int32)
    agent = agents[rng.integers(len(agents))]
    if len(agent.tokens) > 80 or action > 0.9:
        agents.remove(agent)
        agent.close()
    elif action < 0.3:
        agents.append(agent.fork())
    elif action < 0.5:
        cache.evict_one()
    else:
        new = rng.integers(0, 9, rng.integers(1, 12)).astype(np.int32)
        agent.turn(new, new[:3], structural=(8,))
        if rng.random() < 0.3:
            assert agent.ref is not None
            cache.expect(float(rng.uniform(0.1, 9)), agent.ref)


@pytest.mark.parametrize("num_pages", [64, 4096])
@pytest.mark.parametrize("seed", range(4))
def test_no_entry_gets_lost_however_often_the_order_changes(seed, num_pages):
    rng = np.random.default_rng(seed)
    contest = Script()
    cache, policy = make(contest, num_pages)
    agents: list[Agent] = []
    changes = Counter[str]()
    for _ in range(200):
        if rng.random() < 0.2:
            contest.leader = NAMES[rng.integers(len(NAMES))]
        act(cache, rng, agents)
        check(cache)
        check_order(cache, policy)
        changes[policy.following] += 1
    assert set(changes) == set(NAMES)
    cache.clear()
    assert not list(cache.tree.nodes())
    assert cache.pools.pages.num_used == 0


def entries(forest: Forest, count: int):
    """Leaves of a forest, each of its own tokens."""
    return [forest.add(ids(*range(10 * at, 10 * at + 5))) for at in range(count)]


@pytest.mark.parametrize("leaders", [["lru"], ["session-lru", "lru", "learned"], NAMES[::-1]])
def test_what_was_pushed_comes_out_once_after_any_changes(leaders):
    contest = Script()
    policy = Auto(COSTS, contest)
    order = policy.order(100)
    nodes = entries(Forest(), 12)
    for at, node in enumerate(nodes):
        node.last_access = float(at)
        order.push(node, 0.0)
    gone, shelved = order.pop(0.0), order.pop(0.0)
    assert gone is not None
    assert shelved is not None
    order.shelve(shelved, 0.0)
    removed = next(node for node in nodes if node not in (gone, shelved))
    order.remove(removed)
    for leader in leaders:
        contest.leader = leader
        policy.served(served())
        assert policy.following == leader
    out = []
    while (node := order.pop(0.0)) is not None:
        out.append(node)
    kept = [node for node in nodes if node not in (gone, shelved, removed)]
    assert Counter(out) == Counter(kept)
    order.push(shelved, 1.0)  # it has something to give again
    assert order.pop(1.0) is shelved
    assert order.pop(1.0) is None


def test_after_a_change_entries_leave_in_the_order_of_the_new_leader():
    contest = Script()
    policy = Auto(COSTS, contest)
    order = policy.order(100)
    nodes = entries(Forest(), 6)
    for at, node in enumerate(nodes):
        node.last_access = float(-at)
        order.push(node, 0.0)
    contest.leader = "lru"
    policy.served(served())
    assert [order.pop(0.0) for _ in nodes] == nodes[::-1]


def test_without_a_contest_the_first_is_followed_and_nobody_asks_for_requests():
    cache, policy = make(None)
    agent = Agent(cache)
    agent.turn(ids(1, 2, 3, 4), ids(5, 6))
    agent.close()
    assert policy.following == NAMES[0] == "learned"
    assert not policy.wants_served
    policy.served(served())
    policy.over("me")


def test_a_contest_is_told_of_requests_announcements_and_ends():
    contest = Script()
    cache, _ = make(contest)
    tokens = ids(1, 2, 3, 4, 5)
    lease = cache.acquire(b"", tokens, session="me")
    cache.reserve(lease, 5)
    cache.commit(lease, tokens, 5, lease.row)
    ref = cache.stand(lease.frontier, lease=lease)
    cache.release(lease)
    cache.expect(4.0, ref)
    cache.over("me")
    assert contest.told == [("served", "me"), ("expects", "me", 4.0), ("over", "me")]


def test_learning_goes_on_while_another_is_followed():
    contest = Script()
    cache, policy = make(contest)
    contest.leader = "lru"
    head = np.arange(40, dtype=np.int32)
    for at in (100, 200):
        agent = Agent(cache)
        agent.turn(np.concatenate([head, ids(*range(at, at + 8))]), ids(1))
        agent.close()
    assert policy.following == "lru"
    cache.clear()
    lease = cache.acquire(b"tests", np.concatenate([head, ids(*range(300, 308))]))
    assert lease.plan == (40,)
    cache.release(lease)


def test_candidates_by_name():
    kinds = {name: type(candidate(name, COSTS)) for name in NAMES}
    assert kinds == {
        "learned": Learned,
        "session-lru": SessionLRU,
        "lru": Recency,
    }
