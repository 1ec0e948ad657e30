"""What each policy goes by: hand-worked numbers, and lists that are searched anew each time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import Forest, ids

from agentcache.errors import UnknownPolicy
from agentcache.policy.base import Costs
from agentcache.policy.cost import FlopsModel
from agentcache.policy.eviction import POLICIES, make_policy
from agentcache.policy.gdsf import GDSF
from agentcache.policy.marconi import Marconi
from agentcache.policy.ranked import EvictionOrder
from agentcache.policy.recency import SLRU
from agentcache.policy.scored import ScoredOrder
from agentcache.policy.worth import freed_bytes, is_entry, saved_flops, usable_above
from agentcache.tree.node import Node, Residency
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentcache.policy.base import Policy

COSTS = Costs(FlopsModel(10.0, ((None, 2.0),)), token_bytes=4, checkpoint_bytes=100)
"""A prefix of n tokens costs 10n + n(n + 1)."""


def leaf(
    end: int = 1, *, at: float = 0.0, hits: int = 0, priority: int = 0, num_pages: int = 0
) -> Node:
    """An entry of its own, from the root."""
    made = Node(0, ids(*range(end)), None, end)
    made.last_access, made.hits, made.priority = at, hits, priority
    made.data[Kind.FULL] = Residency(np.zeros(num_pages, dtype=np.int32), 0)
    made.data[Kind.STATE] = Residency(ids(), 0)
    return made


def drain(policy: Policy, nodes: Sequence[Node], num_pages: int = 0) -> list[Node]:
    order, out = policy.order(num_pages), []
    for each in nodes:
        order.push(each, 0.0)
    while (first := order.pop(0.0)) is not None:
        out.append(first)
    return out


def chain(forest: Forest, *ends: int) -> list[Node]:
    return [forest.add(ids(*range(end))) for end in ends]


def test_entry_saves_the_work_since_the_next_usable_ancestor() -> None:
    forest = Forest()
    top, end = chain(forest, 10, 30)
    middle = forest.add(ids(*range(20)), state=False)
    assert end.parent is middle
    assert [usable_above(each) for each in (top, end)] == [0, 10]
    assert saved_flops(top, COSTS) == 10 * 10 + 10 * 11
    assert saved_flops(end, COSTS) == (10 * 30 + 30 * 31) - (10 * 10 + 10 * 11)


def test_checkpoint_put_between_two_others_is_the_next_one_for_the_lower() -> None:
    forest = Forest()
    _, end = chain(forest, 10, 30)
    assert usable_above(end) == 10
    forest.add(np.append(ids(*range(10)), [99]).astype(np.int32))
    (middle,) = chain(forest, 20)
    assert end.parent is middle
    assert usable_above(end) == 20


def test_where_nothing_is_a_checkpoint_every_position_is_usable() -> None:
    forest = Forest(state=False)
    top, end = forest.add(ids(*range(10))), forest.add(ids(*range(30)))
    assert usable_above(end) == top.end
    assert saved_flops(end, COSTS) == COSTS.flops.between(10, 30)


def test_leaf_frees_what_nothing_else_needs_above_it_too() -> None:
    forest = Forest()
    _, end = chain(forest, 10, 30)
    middle = forest.add(ids(*range(20)), state=False)
    assert freed_bytes(end, COSTS) == 100 + 20 * 4
    middle.locks = 1
    assert freed_bytes(end, COSTS) == 100 + 10 * 4
    middle.locks = 0
    forest.add(np.append(ids(*range(20)), [99]).astype(np.int32))
    assert freed_bytes(end, COSTS) == 100 + 10 * 4, "the upper part is another's too"


def test_checkpoint_in_the_middle_frees_nothing_but_itself() -> None:
    forest = Forest()
    top, _ = chain(forest, 10, 30)
    assert freed_bytes(top, COSTS) == 100


def test_what_is_no_entry_is_not_taken_for_one() -> None:
    forest = Forest()
    _, end = chain(forest, 10, 30)
    middle = forest.add(ids(*range(20)), state=False)
    assert is_entry(end)
    assert not is_entry(middle)
    assert not is_entry(forest.root)
    kv = end.data[Kind.FULL]
    end.data = {Kind.FULL: Residency(kv.slots, kv.start, tier=2)}
    assert is_entry(middle), "nothing below it is on the device any more"


def test_lfu_takes_the_least_often_used_and_of_those_the_oldest() -> None:
    a, b, c = leaf(at=1, hits=2), leaf(at=3, hits=0), leaf(at=2, hits=0)
    assert drain(make_policy("lfu"), [a, b, c]) == [c, b, a]


def test_priority_goes_before_recency() -> None:
    low, old, young = leaf(at=9, priority=-1), leaf(at=1), leaf(at=2)
    high = leaf(at=0, priority=3)
    assert drain(make_policy("priority"), [high, young, old, low]) == [low, old, young, high]


def test_priority_of_what_was_moved_past_counts_no_more() -> None:
    past, ordinary = leaf(at=1, priority=5), leaf(at=2)
    past.superseded = True
    assert drain(make_policy("priority"), [ordinary, past]) == [past, ordinary]


def test_session_lru_heeds_priority_inside_its_queues_and_breaks_ties_by_references() -> None:
    low, high, tip = leaf(at=2), leaf(at=1, priority=1), leaf(at=0, priority=-1)
    tip.refs = 1
    assert drain(make_policy("session-lru"), [tip, high, low]) == [low, high, tip]
    few, many = leaf(at=1), leaf(at=1)
    few.refs, many.refs = 1, 4
    assert drain(make_policy("session-lru"), [many, few]) == [few, many]


def slru(*nodes: Node, num_pages: int) -> list[Node]:
    return drain(SLRU(0.5), nodes, num_pages)


def test_entry_that_was_used_again_is_protected() -> None:
    used, once = leaf(at=1, hits=1, num_pages=4), leaf(at=2, num_pages=4)
    assert slru(used, once, num_pages=10) == [once, used]


def test_protected_entries_beyond_their_share_are_the_latest_on_probation() -> None:
    old, young = leaf(at=1, hits=1, num_pages=4), leaf(at=3, hits=1, num_pages=4)
    once, later = leaf(at=2, num_pages=1), leaf(at=2.5, num_pages=1)
    # protected: 8 of 10 pages where 5 may be; the older goes back, behind those on probation
    assert slru(old, young, once, later, num_pages=10) == [once, later, old, young]


def test_what_was_sent_back_is_protected_again_once_it_is_used() -> None:
    policy = SLRU(0.5)
    order = policy.order(10)
    old, young, once = (
        leaf(at=1, hits=1, num_pages=4),
        leaf(at=3, hits=1, num_pages=4),
        leaf(at=2, num_pages=1),
    )
    for each in (old, young, once):
        order.push(each, 0.0)
    assert order.pop(0.0) is once, "and the old one was sent back meanwhile"
    order.push(old, 0.0)  # something around it has changed; it is on probation still
    order.remove(young)
    fresh = leaf(at=5, num_pages=1)
    order.push(fresh, 0.0)
    assert order.pop(0.0) is old
    old.last_access, old.hits = 6, 2
    policy.used(old, 6.0)
    order.push(old, 6.0)
    assert order.pop(6.0) is fresh


def gdsf_h(node: Node, inflation: float, frequency: int = 1) -> float:
    return inflation + frequency * saved_flops(node, COSTS) / freed_bytes(node, COSTS)


def test_gdsf_weighs_work_against_bytes_and_counts_uses() -> None:
    short, long = leaf(10, at=-1.0), leaf(100, at=-1.0)
    assert gdsf_h(short, 0) == pytest.approx(210 / 140)
    assert gdsf_h(long, 0) == pytest.approx(11_100 / 500)
    assert drain(GDSF(COSTS), [long, short]) == [short, long]
    often, policy = leaf(10), GDSF(COSTS)
    for _ in range(20):
        policy.used(often, 0.0)
    assert often.value == pytest.approx(gdsf_h(often, 0, 21))
    assert drain(policy, [often, long]) == [long, often]
    assert often.value is None
    policy.used(often, 0.0)
    assert often.value == pytest.approx(gdsf_h(often, 31.5, 2)), "counted anew"


def test_gdsf_ages_what_is_not_used_any_more() -> None:
    policy = GDSF(COSTS)
    order = policy.order(0)
    once_hot = leaf(10)
    for _ in range(9):
        policy.used(once_hot, 0.0)  # H = 15
    order.push(once_hot, 0.0)
    order.push(leaf(60), 0.0)  # H = 4260 / 340 = 12.5
    order.push(other := leaf(61), 0.0)
    assert order.pop(1.0) is not once_hot
    assert order.pop(1.0) is other
    fresh = leaf(20)  # H = 12.8 + 620 / 180 = 16.3
    order.push(fresh, 1.0)
    assert order.pop(2.0) is once_hot


def test_gdsf_keeps_the_worth_of_a_passed_tip() -> None:
    forest, policy = Forest(), GDSF(COSTS)
    order = policy.order(0)
    (tip,) = chain(forest, 10)
    policy.used(tip, 0.0)
    as_leaf = gdsf_h(tip, 0, 2)
    chain(forest, 10, 30)
    assert gdsf_h(tip, 0, 2) > as_leaf, "it would free its checkpoint alone"
    order.push(tip, 1.0)
    between = leaf(20)
    assert as_leaf < gdsf_h(between, 0) < gdsf_h(tip, 0, 2)
    order.push(between, 1.0)
    assert order.pop(2.0) is tip


def test_gdsf_leaves_what_was_filed_just_now_for_last_and_what_others_branch_off_from() -> None:
    forest = Forest()
    (head,) = chain(forest, 10)
    ends = [forest.add(np.append(ids(*range(10)), [at] * 90).astype(np.int32)) for at in (50, 60)]
    order = GDSF(COSTS).order(0)
    for each in (head, *ends):
        order.push(each, 1.0)
    order.push(fresh := leaf(5, at=1.0), 1.0)
    assert [order.pop(1.0) for _ in range(4)] == [*ends, head, fresh]
    order.push(again := leaf(5, at=1.0), 1.0)
    order.push(long := leaf(100, at=0.5), 1.0)
    assert order.pop(2.0) is again, "it has its H by now"
    assert order.pop(2.0) is long


def test_unknown_factor_and_factor_of_another_policy_are_refused() -> None:
    for name in ("marconi:x", "marconi:-1", "marconi:inf", "marconi:nan", "marconi:", "lru:1"):
        with pytest.raises(UnknownPolicy, match=f"unknown policy '{name}'"):
            make_policy(name)


def test_factor_is_part_of_the_name() -> None:
    policy = make_policy("marconi:1.5")
    assert isinstance(policy, Marconi)
    assert policy.alpha == 1.5
    assert not policy.wants_served


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_gives_each_entry_back_once(name: str) -> None:
    nodes = [leaf(5 + each, at=float(each)) for each in range(20)]
    assert sorted(drain(make_policy(name, COSTS), nodes, 100), key=id) == sorted(nodes, key=id)


def marconi_scores(nodes: Sequence[Node], alpha: float) -> list[float]:
    def scaled(values: list[float]) -> list[float]:
        low, high = min(values), max(values)
        return [(value - low) / (high - low) if high > low else 0.0 for value in values]

    recency = scaled([node.last_access for node in nodes])
    efficiency = scaled([saved_flops(each, COSTS) / freed_bytes(each, COSTS) for each in nodes])
    return [r + alpha * e for r, e in zip(recency, efficiency, strict=True)]


def test_marconi_adds_recency_and_efficiency_each_between_0_and_1() -> None:
    old_long, young_short, middle = leaf(100, at=0), leaf(10, at=10), leaf(50, at=4)
    # efficiency: 11100/500 = 22.2, 210/140 = 1.5, 3050/300 = 10.17; recency: 0, 1, 0.4
    nodes = [old_long, young_short, middle]
    assert marconi_scores(nodes, 1.0) == pytest.approx([1.0, 1.0, 0.4 + 0.41868], abs=1e-4)
    assert drain(Marconi(COSTS, 0.0), nodes) == [old_long, middle, young_short]
    assert drain(Marconi(COSTS, 0.9), nodes)[0] is middle
    assert ScoredOrder(Marconi(COSTS, 2.0)).pop(0.0) is None


def test_marconi_makes_room_before_what_is_filed_counts() -> None:
    order = Marconi(COSTS, 5.0).order(0)
    nodes = [leaf(100, at=1.0), leaf(50, at=2.0), leaf(10, at=3.0)]
    for each in nodes:
        order.push(each, 3.0)
    assert [order.pop(3.0) for _ in nodes] == [nodes[1], nodes[0], nodes[2]]


def test_marconi_leaves_what_others_branch_off_from_for_last() -> None:
    forest = Forest()
    (head,) = chain(forest, 10)
    ends = [forest.add(np.append(ids(*range(10)), [at] * 5).astype(np.int32)) for at in (50, 60)]
    for at, each in enumerate(ends):
        each.last_access = at + 1.0
    assert drain(Marconi(COSTS, 0.0), [head, *ends]) == [*ends, head]


CHANGES = st.lists(
    st.tuples(st.sampled_from(["use", "file", "pop", "drop"]), st.integers(0, 6)), max_size=40
)


def brute(name: str, nodes: Sequence[Node], h: dict[Node, float]) -> list[float]:
    """What the policy goes by, for nodes that are in the order."""
    keys: dict[str, Callable[[Node], float]] = {
        "lru": lambda node: node.last_access,
        "lfu": lambda node: 1e6 * node.hits + node.last_access,
        "priority": lambda node: 1e6 * node.priority + node.last_access,
        "gdsf": lambda node: h[node],
    }
    if name == "marconi:0.7":
        return marconi_scores(nodes, 0.7)
    return [keys[name](node) for node in nodes]


@given(CHANGES, st.sampled_from(["lru", "lfu", "priority", "gdsf", "marconi:0.7"]))
def test_policies_agree_with_a_list_that_is_searched_anew_each_time(
    steps: list[tuple[str, int]], name: str
) -> None:
    policy = make_policy(name, COSTS)
    order = policy.order(0)
    if isinstance(policy, Marconi):
        order = ScoredOrder(policy, least_batch=1, share=0.0)
    nodes = [leaf(10 * (each + 1), priority=each % 3) for each in range(7)]
    present: list[Node] = []
    h: dict[Node, float] = {}
    frequency: dict[Node, int] = {}
    level = 0.0

    def leaves(node: Node) -> None:
        present.remove(node)
        h.pop(node)
        frequency.pop(node)

    for time, (what, which) in enumerate(steps):
        node = nodes[which]
        if what == "pop":
            got = order.pop(float(time))
            assert (got is None) == (not present)
            if got is not None:
                keys = dict(zip(present, brute(name, present, h), strict=True))
                assert keys[got] == pytest.approx(min(keys.values()))
                level = max(level, keys[got])
                leaves(got)
            continue
        if what == "drop":
            order.remove(node)
            if node in present:
                leaves(node)
            continue
        frequency.setdefault(node, 1)
        if what == "use":
            node.hits += 1
            frequency[node] += 1
            h[node] = gdsf_h(node, level, frequency[node])
            policy.used(node, float(time))
        h.setdefault(node, gdsf_h(node, level))
        node.last_access = float(time)
        order.push(node, float(time))
        if node not in present:
            present.append(node)
    assert isinstance(order, EvictionOrder | ScoredOrder)
