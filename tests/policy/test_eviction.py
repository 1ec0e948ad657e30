"""Who leaves first: the keys of the policies, and the order that keeps them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import ids

from agentcache.errors import ConfigError, UnknownPolicy
from agentcache.policy.eviction import EvictionOrder, make_policy
from agentcache.tree.node import Node


def node(last_access: float, *, refs: int = 0, superseded: bool = False) -> Node:
    made = Node(0, ids(1), None, 1)
    made.last_access, made.refs, made.superseded = last_access, refs, superseded
    return made


def order_of(policy: str, num_pages: int = 0) -> EvictionOrder:
    return EvictionOrder(make_policy(policy), num_pages)


def drain(order: EvictionOrder) -> list[Node]:
    out = []
    while (first := order.pop(0.0)) is not None:
        out.append(first)
    return out


def ordered(policy: str, *nodes: Node) -> list[Node]:
    order = order_of(policy)
    for each in nodes:
        order.push(each, 0.0)
    return drain(order)


def test_lru_asks_for_recency_only() -> None:
    tip, old, past = node(1, refs=1), node(2), node(3, superseded=True)
    assert ordered("lru", past, old, tip) == [tip, old, past]


@pytest.mark.parametrize("policy", ["session-lru", "auto"])
def test_session_lru_takes_superseded_then_unreferenced_then_tips(policy: str) -> None:
    tip, old_tip = node(2, refs=3), node(1, refs=1)
    idle, old_idle = node(4), node(3)
    past, old_past = node(9, superseded=True), node(8, superseded=True)
    referenced_past = node(7, refs=1, superseded=True)
    nodes = [tip, idle, past, old_idle, old_past, old_tip, referenced_past]
    assert ordered(policy, *nodes) == [
        past,
        old_past,
        old_idle,
        idle,
        old_tip,
        tip,
        referenced_past,
    ]


def test_number_of_references_does_not_matter() -> None:
    many, one = node(1, refs=9), node(2, refs=1)
    assert ordered("session-lru", one, many) == [many, one]


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(UnknownPolicy, match=r"'fifo'.*auto, lru, session-lru") as error:
        make_policy("fifo")
    assert error.value.name == "fifo"
    assert isinstance(error.value, ConfigError)


def test_nodes_of_equal_rank_leave_in_the_order_they_came() -> None:
    nodes = [node(1) for _ in range(5)]
    assert ordered("lru", *nodes) == nodes


def test_node_pushed_anew_leaves_once_and_at_its_new_place() -> None:
    order = order_of("lru")
    a, b = node(1), node(2)
    order.push(a, 0.0)
    order.push(b, 0.0)
    a.last_access = 3
    order.push(a, 0.0)
    assert drain(order) == [b, a]
    assert order.pop(0.0) is None


def test_node_taken_out_comes_back_only_when_pushed_again() -> None:
    order = order_of("lru")
    a = node(1)
    order.push(a, 0.0)
    order.push(a, 0.0)
    assert order.pop(0.0) is a
    assert order.pop(0.0) is None
    order.push(a, 0.0)
    assert order.pop(0.0) is a


def test_node_that_left_the_tree_is_skipped() -> None:
    order = order_of("lru")
    gone, stays = node(1), node(2)
    order.push(gone, 0.0)
    order.push(stays, 0.0)
    gone.generation += 1
    order.push(gone, 0.0)
    assert drain(order) == [stays]


def test_order_of_few_nodes_stays_small_over_many_changes() -> None:
    order = order_of("lru")
    nodes = [node(0) for _ in range(10)]
    rng = np.random.default_rng(0)
    largest = 0
    for time in range(100_000):
        each = nodes[int(rng.integers(10))]
        each.last_access = float(time)
        order.push(each, 0.0)
        largest = max(largest, len(order._heaps[0]))
    assert largest <= 1025
    assert drain(order) == sorted(nodes, key=lambda n: n.last_access)


def test_compaction_takes_only_what_is_stale() -> None:
    order = order_of("lru")
    nodes = [node(float(at)) for at in range(3000)]
    for each in nodes:
        order.push(each, 0.0)
    for each in nodes[::3]:
        each.generation = 1
    for each in nodes[1::3]:
        each.last_access += 10_000
        order.push(each, 0.0)
    for _ in range(3):
        for each in nodes[2::3]:
            order.push(each, 0.0)
    assert drain(order) == [*nodes[2::3], *nodes[1::3]]


changes = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), st.integers(0, 5)),
        st.tuples(st.just("refs"), st.integers(0, 5)),
        st.tuples(st.just("supersede"), st.integers(0, 5)),
        st.tuples(st.just("remove"), st.integers(0, 5)),
        st.just(("pop", 0)),
    ),
    max_size=40,
)


@given(changes, st.sampled_from(["lru", "session-lru"]))
def test_order_agrees_with_a_sorted_list(steps: list[tuple[str, int]], policy: str) -> None:
    order, nodes, present = order_of(policy), [node(0) for _ in range(6)], set()

    def key(of: Node) -> tuple[int, float]:
        return make_policy(policy).rank(of, 0.0)

    for time, (what, which) in enumerate(steps):
        each = nodes[which]
        if what == "pop":
            first = order.pop(0.0)
            least = min((key(nodes[at]) for at in present), default=None)
            assert (first is None) == (least is None)
            if first is not None:
                assert key(first) == least
                present.remove(nodes.index(first))
            continue
        if what == "touch":
            each.last_access = float(time)
        elif what == "refs":
            each.refs = 1 - each.refs
        elif what == "supersede":
            each.superseded = not each.superseded
        else:
            each.generation = 1
            present.discard(which)
        order.push(each, 0.0)
        if not each.generation:
            present.add(which)
