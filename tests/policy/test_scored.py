"""The order by scores: exact where a batch is one, and few looks at everybody where it is more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import ids

from agentcache.policy.scored import ScoredOrder, ScoredPolicy
from agentcache.tree.node import Node

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentcache.policy.scored import Floats


class ByValue(ScoredPolicy):
    """The lowest of a number that nodes carry leaves first; counts what it is asked."""

    fields = ("value",)

    def __init__(self) -> None:
        self.filled = self.scored = 0
        self.taken_scores: list[float] = []

    def fill(self, node: Node, now: float) -> Sequence[float]:
        self.filled += 1
        return (node.last_access,)

    def scores(self, columns: Mapping[str, Floats], now: float) -> Floats:
        self.scored += 1
        return columns["value"] - now

    def taken(self, node: Node, score: float, now: float) -> None:
        self.taken_scores.append(score)


def leaf(value: float) -> Node:
    node = Node(0, ids(1), None, 1)
    node.last_access = value
    return node


def drain(order: ScoredOrder) -> list[Node]:
    out = []
    while (first := order.pop(0.0)) is not None:
        out.append(first)
    return out


STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "pop", "remove", "shelve", "gone"]), st.integers(0, 7)),
    max_size=60,
)


@given(STEPS, st.integers(0, 2**32 - 1))
def test_batch_of_one_takes_the_very_lowest_each_time(
    steps: list[tuple[str, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    order = ScoredOrder(ByValue(), least_batch=1, share=0.0)
    nodes = [leaf(0.0) for _ in range(8)]
    present: dict[int, int] = {}  # by when they came
    for time, (what, which) in enumerate(steps):
        node = nodes[which]
        if what == "pop":
            got = order.pop(0.0)
            first = min(present, key=lambda at: (nodes[at].last_access, present[at]), default=None)
            assert got is (None if first is None else nodes[first])
            present.pop(first, None)  # type: ignore[arg-type]
        elif what == "push" and not node.generation:
            node.last_access = float(rng.integers(5))
            order.push(node, 0.0)
            present.setdefault(which, time)
        elif what in ("remove", "shelve"):
            order.remove(node) if what == "remove" else order.shelve(node, 0.0)
            present.pop(which, None)
        elif what == "gone":
            node.generation = 1
            order.push(node, 0.0)
            present.pop(which, None)


def test_batches_take_the_lowest_in_order_while_nothing_changes() -> None:
    order = ScoredOrder(ByValue(), least_batch=4, share=1 / 8)
    values = np.random.default_rng(1).permutation(300).tolist()
    for value in values:
        order.push(leaf(value), 0.0)
    assert [node.last_access for node in drain(order)] == sorted(values)


def test_victim_that_was_pushed_meanwhile_is_none_any_more() -> None:
    order = ScoredOrder(ByValue(), least_batch=3, share=0.0)
    nodes = [leaf(value) for value in (1.0, 2.0, 3.0, 4.0)]
    for each in nodes:
        order.push(each, 0.0)
    assert order.pop(0.0) is nodes[0]
    nodes[1].last_access = 9.0
    order.push(nodes[1], 0.0)
    assert drain(order) == [nodes[2], nodes[3], nodes[1]]


def test_what_is_about_to_be_chosen_is_looked_at_again() -> None:
    order = ScoredOrder(ByValue(), least_batch=2, share=0.0)
    nodes = [leaf(value) for value in (1.0, 2.0, 3.0, 4.0)]
    for each in nodes:
        order.push(each, 0.0)
    assert order.pop(0.0) is nodes[0]
    order.remove(nodes[1])
    nodes[2].last_access = 9.0  # without a push
    assert drain(order) == [nodes[3], nodes[2]]


class Alone(ByValue):
    """The same, which says that no score depends on another candidate."""

    alone = True


class Together(ByValue):
    """Scores depend on all candidates: their distance from the highest."""

    def scores(self, columns: Mapping[str, Floats], now: float) -> Floats:
        self.scored += 1
        self.widths.append(len(columns["value"]))
        distance: Floats = columns["value"] - columns["value"].max()
        return distance

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []


@pytest.mark.parametrize("policy", [ByValue(), Alone(), Together()], ids=lambda p: type(p).__name__)
def test_values_that_changed_without_a_push_count_when_a_batch_is_chosen(policy: ByValue) -> None:
    order = ScoredOrder(policy, least_batch=4, share=0.0)
    first = [leaf(value) for value in (-4.0, -3.0, -2.0, -1.0)]
    nodes = [leaf(value) for value in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    for each in (*first, *nodes):
        order.push(each, 0.0)
    assert [order.pop(0.0) for _ in first] == first
    nodes[0].last_access, nodes[1].last_access = 3.5, 9.0
    assert drain(order) == [nodes[i] for i in (2, 0, 3, 4, 5, 1)]


def test_only_scores_that_stand_alone_are_computed_for_some_candidates() -> None:
    policy = Together()
    order = ScoredOrder(policy, least_batch=2, share=0.0)
    nodes = [leaf(float(value)) for value in range(8)]
    for each in nodes:
        order.push(each, 0.0)
    order.pop(0.0), order.pop(0.0)
    nodes[2].last_access = 2.5
    order.pop(0.0)
    assert policy.widths == [8, 6, 6]


def test_pop_looks_at_everybody_once_in_many_times() -> None:
    policy = ByValue()
    order = ScoredOrder(policy)
    for value in range(6400):
        order.push(leaf(float(value)), 0.0)
    for _ in range(100):
        assert order.pop(0.0) is not None
    assert policy.scored == 1
    assert policy.filled == 6400 + 100
    assert policy.taken_scores == [float(value) for value in range(100)]


def test_scores_are_those_of_the_time_of_the_choice() -> None:
    policy = ByValue()
    order = ScoredOrder(policy)
    order.push(leaf(5.0), 0.0)
    assert order.pop(2.0) is not None
    assert policy.taken_scores == [3.0]


def test_rows_of_those_who_left_are_used_again() -> None:
    order = ScoredOrder(ByValue())
    for _ in range(3):
        for value in range(200):
            order.push(leaf(float(value)), 0.0)
        drain(order)
        assert len(order) == 0
    assert order._table.capacity == 256
