"""Coverage: what a checkpoint in the middle is worth, and which ones are left of many."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from testkit.helpers import Forest, ids

from agentcache.policy.coverage import is_checkpoint, neighbours, spacing
from agentcache.policy.eviction import EvictionOrder, make_policy
from agentcache.tree.node import Node, Residency
from agentcache.types import Kind


def span(stop: int) -> np.ndarray:
    return np.arange(stop, dtype=np.int32)


def chain(forest: Forest, *ends: int) -> list[Node]:
    return [forest.add(span(end)) for end in ends]


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


def test_neighbours_are_the_next_checkpoints_on_the_path() -> None:
    forest = Forest()
    a, b, c, d = chain(forest, 10, 20, 30, 40)
    assert neighbours(b) == (a, c)
    forest.tree.drop(a, Kind.STATE, 0.0)
    forest.tree.drop(c, Kind.STATE, 0.0)
    assert neighbours(b) == (forest.root, d)
    assert neighbours(d) == (b, None)


def test_what_lies_below_a_branch_is_no_neighbour() -> None:
    forest = Forest()
    a, b = chain(forest, 10, 40)
    branch = forest.add(np.append(span(20), 99).astype(np.int32)).parent
    assert branch is not None
    assert not is_checkpoint(branch)
    assert neighbours(a) == (forest.root, branch), "the branch itself can be wanted"
    assert neighbours(b) == (a, None)


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


def test_search_for_neighbours_is_bounded() -> None:
    forest = Forest()
    nodes = chain(forest, *range(2, 802, 2))
    for node in nodes[1:-1]:
        forest.tree.drop(node, Kind.STATE, 0.0)
    above, below = neighbours(nodes[200])
    assert above is None
    assert below is not None
    assert below.end - nodes[200].end <= 2 * 64


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
        around = neighbours(gone)
        forest.tree.drop(gone, Kind.STATE, 0.0)
        for each in around:
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
