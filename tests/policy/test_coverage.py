"""Coverage: what a checkpoint in the middle is worth, and which ones are left of many."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from testkit.helpers import Forest, ids

from agentcache.policy.coverage import above, below, is_checkpoint, spacing
from agentcache.policy.eviction import make_policy
from agentcache.policy.ranked import EvictionOrder
from agentcache.tree.node import Node, Residency
from agentcache.types import Kind


def span(stop: int) -> np.ndarray:
    return np.arange(stop, dtype=np.int32)


def chain(forest: Forest, *ends: int) -> list[Node]:
    return [forest.add(span(end)) for end in ends]


def drop(forest: Forest, node: Node) -> tuple[Node | None, Node | None]:
    """A checkpoint leaves and its node stays; the neighbours."""
    forest.tree.drop(node, Kind.STATE, 0.0)
    return above(node), below(node)


def test_node_is_a_checkpoint_by_what_it_holds_besides_its_edge() -> None:
    node = Forest().add(span(4), state=False)
    assert not is_checkpoint(node)
    for kind in (Kind.STATE, Kind.SWA, "chunk"):
        node.data = {Kind.FULL: Residency(ids(0), 0), kind: Residency(ids(1), 4)}
        assert is_checkpoint(node)
        del node.data[Kind.FULL]
        assert is_checkpoint(node), "models without attention keep nothing at an edge"
    node.data = {}
    assert not is_checkpoint(node)


def test_hole_of_a_checkpoint_grows_when_its_neighbours_leave() -> None:
    forest = Forest()
    a, b, c, d = chain(forest, 10, 20, 30, 40)
    assert drop(forest, a) == (None, b)
    assert drop(forest, c) == (b, d)
    assert (above(d), above(b), below(b)) == (b, None, d)
    assert spacing(b) == pytest.approx(40 / sqrt(40))


def test_checkpoint_filed_between_two_is_the_neighbour_of_both() -> None:
    forest = Forest()
    a, c, d = chain(forest, 10, 40, 50)
    assert above(c) is a  # asked before there is another one, and of what lies below it too
    assert above(d) is c
    (b,) = chain(forest, 20)
    assert (above(b), above(c), below(a), below(b)) == (a, b, b, c)
    assert spacing(b) == pytest.approx(30 / sqrt(40))
    assert spacing(a) == pytest.approx(20 / sqrt(20))


def test_checkpoint_that_comes_back_is_the_neighbour_again() -> None:
    forest = Forest()
    a, b, c = chain(forest, 10, 20, 40)
    drop(forest, b)
    assert (above(c), below(a)) == (a, c)
    b.data[Kind.STATE] = Residency(ids(1), 20)
    assert (above(c), below(a)) == (b, b)


def test_hole_ends_where_the_path_parts_or_ends() -> None:
    forest = Forest()
    a, left = chain(forest, 10, 40)
    forest.add(np.append(span(20), [99] * 40).astype(np.int32))
    fork = left.parent
    assert fork is not None
    assert fork.end == 20
    assert (above(left), below(a)) == (a, fork)
    assert spacing(a) == pytest.approx(20 / sqrt(20))
    assert below(fork) is below(left) is None
    assert spacing(left) == pytest.approx(30 / sqrt(40))


def test_hole_is_measured_from_checkpoint_to_checkpoint_and_weighed_by_depth() -> None:
    forest = Forest()
    a, b, c = chain(forest, 9, 25, 64)
    assert spacing(b) == pytest.approx((64 - 9) / sqrt(64))
    assert spacing(a) == pytest.approx(25 / sqrt(25))
    assert spacing(c) == pytest.approx((64 - 25) / sqrt(64)), "at the end there is nothing below"


def test_equal_gaps_weigh_more_where_the_path_is_short() -> None:
    forest = Forest()
    nodes = chain(forest, *range(10, 110, 10))
    inner = [spacing(node) for node in nodes[:-1]]
    assert inner == sorted(inner, reverse=True)


def thinned(num: int, keep: int) -> list[int]:
    """The positions that are left when superseded checkpoints of one path leave one by one."""
    forest = Forest()
    nodes = chain(forest, *range(10, 10 * num + 10, 10))
    order = EvictionOrder(make_policy("session-lru"), 10_000)
    for node in nodes[:-1]:
        node.superseded = True
        order.push(node, 0.0)
    for _ in range(num - keep):
        gone = order.pop(0.0)
        assert gone is not None
        for each in drop(forest, gone):
            if each is not None and each is not nodes[-1]:
                order.push(each, 0.0)
    return [node.end for node in nodes if Kind.STATE in node.data]


@pytest.mark.parametrize("num", [12, 40, 200])
def test_third_of_the_checkpoints_gives_every_fork_at_least_half_its_depth(num: int) -> None:
    left = thinned(num, num // 3)
    assert len(left) == num // 3
    for fork in range(left[0], 10 * num + 1, 10):
        reused = max(end for end in left if end <= fork)
        assert reused >= fork / 2
    assert left[0] <= 10 * num / 4, "a fork at a quarter finds something"


@pytest.mark.parametrize("num", [40, 200])
def test_gaps_grow_with_depth_and_the_shallow_ones_are_not_the_first_to_go(num: int) -> None:
    left = thinned(num, num // 3)
    gaps = np.diff([0, *left])
    third = len(gaps) // 3
    assert gaps[:third].mean() < gaps[third:-third].mean() < gaps[-third:].mean()
    assert max(gaps) <= 2 * 10 * 3 * 2, "none is more than twice what equal gaps would be, or so"
    gone = set(range(10, 10 * num + 10, 10)) - set(left)
    assert np.mean(sorted(gone)) > np.mean(left), "more leave at the deep end"
