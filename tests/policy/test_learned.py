"""What the learned order lets go of first, on caches over pools that only count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from testkit.helpers import NAMESPACE, Agent, check, ids, rules_of, run

from agentcache.cache import HybridCache
from agentcache.clock import ManualClock
from agentcache.metrics import Metrics
from agentcache.policy.base import Costs
from agentcache.policy.cost import FlopsModel
from agentcache.policy.history import History
from agentcache.policy.learned import Learned
from agentcache.policy.scored import ScoredOrder
from agentcache.pools.base import Counting, RowAllocator
from agentcache.pools.pages import PageAllocator
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache.tree.node import Node

COSTS = Costs(FlopsModel(10.0, ((None, 2.0),)), token_bytes=4, checkpoint_bytes=32)


def make(num_pages: int = 4096) -> tuple[HybridCache, Learned]:
    policy = Learned(COSTS)
    pools = Counting(PageAllocator(num_pages), RowAllocator(4), 2)
    cache = HybridCache(RadixTree(rules_of(4)), pools, policy, ManualClock(), Metrics())
    return cache, policy


def wait(cache: HybridCache, seconds: float) -> None:
    clock = cache._clock
    assert isinstance(clock, ManualClock)
    clock.advance(seconds)


class Words:
    """Tokens that nobody has had before."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, count: int):
        self._next += count
        return ids(*range(self._next - count, self._next))


def in_tree(node: Node) -> bool:
    return not node.generation and Kind.STATE in node.data


def train(cache: HybridCache, words: Words, rounds: int = 30) -> None:
    """Agents that take four turns, two seconds apart, and close; an entry leaves after each."""
    for _ in range(rounds):
        agent = Agent(cache)
        for _ in range(4):
            agent.turn(words(12), words(4))
            wait(cache, 1.0)
        agent.close()
        cache.evict_one()


def test_dead_tails_leave_before_live_tips_that_are_older():
    cache, _ = make()
    words = Words()
    train(cache, words)
    live, dead = [Agent(cache) for _ in range(3)], [Agent(cache) for _ in range(3)]
    for group in (live, dead):
        for _ in range(3):
            for agent in group:
                agent.turn(words(12), words(4))
    for agent in dead:
        agent.close()
    tails = [agent.frontier for agent in dead]
    while any(in_tree(tail) for tail in tails):
        assert cache.evict_one()
    assert all(in_tree(agent.frontier) for agent in live)
    check(cache)


def test_what_its_own_session_has_passed_leaves_before_its_tip():
    cache, _ = make()
    words = Words()
    train(cache, words)
    agent, passed = Agent(cache), []
    for _ in range(3):
        agent.turn(words(12), words(4))
        passed.append(agent.frontier)
    tip = passed.pop()
    while any(in_tree(node) for node in passed):
        assert cache.evict_one()
    assert in_tree(tip)


def document(cache: HybridCache, words: Words, head) -> tuple[int, ...]:
    """One more prompt about a document; where checkpoints were planned."""
    return run(cache, np.concatenate([head, words(8)])).plan


def test_a_branch_point_is_planned_again_after_its_data_has_left():
    cache, _ = make()
    words = Words()
    head = words(40)
    assert document(cache, words, head) == ()
    assert document(cache, words, head) == (40,)
    cache.clear()
    assert cache.pools.pages.num_used == 0
    assert document(cache, words, head) == (40,)


def test_a_branch_point_that_was_seen_once_is_known_when_its_only_prompt_has_left():
    cache, _ = make()
    words = Words()
    head = words(40)
    document(cache, words, head)
    cache.clear()
    assert document(cache, words, head) == (40,)
    assert document(cache, words, words(40)) == ()


def test_a_remembered_branch_point_below_the_price_of_memory_is_not_planned():
    cache, policy = make()
    words = Words()
    head = words(40)
    train(cache, words)
    document(cache, words, head)
    cache.clear()
    policy.taken(cache.tree.root(NAMESPACE), 1e30, 0.0)  # what leaves is worth a fortune
    assert document(cache, words, head) == ()


def test_a_remembered_branch_point_is_planned_while_memory_costs_nothing():
    cache, policy = make()
    words = Words()
    head = words(40)
    train(cache, words)
    document(cache, words, head)
    cache.clear()
    for _ in range(500):
        policy.taken(cache.tree.root(NAMESPACE), 1e-30, 0.0)
    assert document(cache, words, head) == (40,)


def test_namespaces_share_no_memory():
    cache, _ = make()
    words = Words()
    head = words(40)
    document(cache, words, head)
    cache.clear()
    prompt = np.concatenate([head, words(8)])
    assert run(cache, prompt, namespace=b"others").plan == ()
    assert run(cache, prompt).plan == (40,)


def check_rows(policy: Learned) -> None:
    """Rows, boundaries and nodes of the cache belong together one by one."""
    remembered = policy._history._at
    for node, boundary in policy._known.items():
        assert boundary.live is node
        assert remembered[boundary.node] is boundary
    rows = [boundary.row for boundary in remembered.values()]
    assert sorted(rows) == np.flatnonzero(policy._rows.kind >= 0).tolist()
    for boundary in remembered.values():
        at, table = boundary.row, policy._rows
        assert (table.used_at[at], table.kind[at]) == (boundary.used_at, boundary.kind)
        own = boundary.gaps + 1 if boundary.uses > 1 and boundary.kind else 0.0
        assert table.gaps[at] == own
        if boundary.live is not None:
            assert policy._known.get(boundary.live, boundary) is boundary


@pytest.mark.parametrize("seed", range(6))
def test_rows_never_mix_however_much_is_forgotten(seed):
    rng = np.random.default_rng(seed)
    cache, policy = make(96)
    policy._history = History(max_tokens=300, max_boundaries=12)
    agents: list[Agent] = []
    heads = [rng.integers(0, 9, 12).astype(np.int32) for _ in range(3)]
    for _ in range(150):
        action = rng.random()
        if action < 0.2 or not agents:
            agents.append(Agent(cache, bytes([rng.integers(2)])))
            agents[-1].tokens = heads[rng.integers(3)]
        agent = agents[rng.integers(len(agents))]
        if len(agent.tokens) > 80 or action > 0.9:
            agents.remove(agent)
            agent.close()
        elif action < 0.25:
            agents.append(agent.fork())
        else:
            new = rng.integers(0, 9, rng.integers(1, 12)).astype(np.int32)
            agent.turn(new, new[:3], structural=(12,), passing=(len(agent.tokens) + len(new) - 1,))
            if agent.ref is not None and rng.random() < 0.3:
                cache.expect(float(rng.uniform(0.1, 9)), agent.ref)
        if rng.random() < 0.2:
            cache.evict_one()
        check_rows(policy)
        check(cache)
    assert len(policy._history) <= 12
    cache.clear()
    assert cache.pools.pages.num_used == 0


def test_a_history_that_is_given_is_the_one_that_learns():
    history = History(max_boundaries=3)
    assert Learned(COSTS, history)._history is history


def test_no_entry_is_scored_by_the_row_of_another_after_its_own_was_forgotten():
    """The scores by the order's columns are those of entries looked up anew."""
    cache, policy = make()
    policy._history = History(max_boundaries=40)
    words = Words()
    for _ in range(40):
        run(cache, words(20))
    cache.evict_one()  # all are in the order's table now
    for _ in range(60):
        run(cache, words(20))
    cache.evict_one()
    order, now = cache.memory._order, cache._clock.now()
    assert isinstance(order, ScoredOrder)
    held = order._table.values()
    fresh = np.array([policy.fill(node, now) for node in order._table.nodes]).T
    anew = dict(zip(policy.fields, fresh, strict=True))
    assert policy.scores(held, now) == pytest.approx(policy.scores(anew, now))


def take_turns(cache: HybridCache, words: Words, rng, *, honest: bool) -> None:
    """Agents that stay away for very different times, and say how long: as it is, or any time."""
    for _ in range(40):
        agent = Agent(cache)
        for _ in range(4):
            agent.turn(words(12), words(4))
            away, other = np.exp(rng.uniform(0, 7, 2))
            assert agent.ref is not None
            cache.expect(float(away + 1 if honest else other), agent.ref)  # a turn takes 1 s
            wait(cache, float(away))
        agent.close()
        cache.evict_one()


def test_of_tips_whose_sessions_keep_their_word_the_one_due_first_stays():
    cache, policy = make()
    words = Words()
    take_turns(cache, words, np.random.default_rng(1), honest=True)
    assert policy._trust > 0
    late, soon = Agent(cache), Agent(cache)
    for _ in range(3):
        late.turn(words(12), words(4))
        soon.turn(words(12), words(4))
    cache.expect(3.0, soon.ref)
    cache.expect(900.0, late.ref)
    while in_tree(late.frontier):
        assert cache.evict_one()
    assert in_tree(soon.frontier)


def test_announcements_that_say_nothing_are_not_trusted():
    cache, policy = make()
    take_turns(cache, Words(), np.random.default_rng(1), honest=False)
    assert policy._trust < 0


def ask(cache: HybridCache, words: Words, head, rng: np.random.Generator) -> None:
    """One question about a declared head, by somebody who has no other; an entry leaves."""
    agent = Agent(cache)
    agent.turn(np.concatenate([head, words(4)]), words(2), structural=(len(head),))
    agent.close()
    wait(cache, float(rng.exponential(5.0)))
    cache.evict_one()


def heads_asked(turns: Iterable[int]) -> tuple[HybridCache, Learned, list[Node]]:
    """Heads of one length, each asked about when it is its turn, and then once more; and their
    nodes, the one asked last at the end."""
    cache, policy = make()
    words, rng = Words(), np.random.default_rng(1)
    heads = [words(40) for _ in range(10)]
    for at in turns:
        ask(cache, words, heads[at], rng)
    nodes = []
    for head in heads:
        ask(cache, words, head, rng)
        lease = cache.acquire(NAMESPACE, np.concatenate([head, words(4)]))
        nodes.append(lease.match.node)
        cache.release(lease)
    return cache, policy, nodes


def scores(cache: HybridCache, policy: Learned, nodes: list[Node]) -> np.ndarray:
    now = cache._clock.now()
    values = np.array([policy.fill(node, now) for node in nodes]).T
    return policy.scores(dict(zip(policy.fields, values, strict=True)), now)


def test_entries_that_are_used_more_than_others_of_their_class_go_by_their_own_rhythm():
    rng = np.random.default_rng(2)
    turns = rng.choice(10, 600, p=[0.4, 0.4, *[0.2 / 8] * 8])
    cache, policy, nodes = heads_asked(turns)
    assert policy._trust_in_rhythm > 0
    found = scores(cache, policy, nodes)
    assert found[:2].min() > 1.5 * found[2:].max()


def test_a_rhythm_is_not_followed_where_the_class_foretells_more():
    """All heads come once a round, in any order: who was used just now comes last."""
    rng = np.random.default_rng(2)
    turns = np.concatenate([rng.permutation(10) for _ in range(60)])
    cache, policy, nodes = heads_asked(turns)
    assert policy._trust_in_rhythm < 0
    first, *_, last = scores(cache, policy, nodes)
    assert first > last
    policy._trust_in_rhythm = 0.0
    first, *_, last = scores(cache, policy, nodes)
    assert first < last
