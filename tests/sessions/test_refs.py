"""Session references: counted per node, left once, and what moving on says about a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from testkit.helpers import Forest, ids

from agentcache.sessions.refs import References

if TYPE_CHECKING:
    from agentcache.tree.node import Node


class Marks:
    """References that note whom they reorder."""

    def __init__(self) -> None:
        self.reordered: list[Node] = []
        self.refs = References(self.reordered.append)


def chain() -> tuple[Forest, Node, Node, Node]:
    forest = Forest()
    return (
        forest,
        forest.add(ids(1, 2)),
        forest.add(ids(1, 2, 3, 4)),
        forest.add(ids(1, 2, 3, 4, 5, 6)),
    )


def test_live_tips_are_counted_per_node() -> None:
    marks, (_, top, _, leaf) = Marks(), chain()
    first, second = marks.refs.hold(leaf), marks.refs.hold(leaf)
    assert (leaf.refs, top.refs) == (2, 0)
    assert marks.reordered == [leaf, leaf]
    marks.refs.leave(first)
    assert leaf.refs == 1
    marks.refs.leave(second)
    assert leaf.refs == 0
    assert marks.reordered == [leaf] * 4


def test_leaving_twice_is_leaving_once() -> None:
    marks, (_, _, _, leaf) = Marks(), chain()
    keeps, leaves = marks.refs.hold(leaf), marks.refs.hold(leaf)
    assert keeps.held
    marks.refs.leave(leaves)
    marks.refs.leave(leaves)
    marks.refs.leave_all([leaves, leaves])
    assert not leaves.held
    assert leaf.refs == 1


def test_checkpoints_moved_past_are_superseded_and_told_to_the_order() -> None:
    marks, (_, top, middle, leaf) = Marks(), chain()
    ref = marks.refs.hold(leaf, [middle])
    marks.reordered.clear()
    marks.refs.leave(ref)
    assert leaf.superseded
    assert middle.superseded
    assert not top.superseded
    assert marks.reordered == [leaf, middle]


@pytest.mark.parametrize("reason", ["structural", "branching", "another tip"])
def test_checkpoint_that_others_can_want_is_not_superseded(reason: str) -> None:
    marks, (forest, _, middle, leaf) = Marks(), chain()
    ref = marks.refs.hold(middle, [leaf])
    if reason == "structural":
        middle.structural = True
    if reason == "branching":
        forest.add(ids(1, 2, 3, 4, 9))
    if reason == "another tip":
        marks.refs.hold(middle)
    marks.refs.leave(ref)
    assert not middle.superseded
    assert leaf.superseded


def test_a_new_tip_at_a_superseded_checkpoint_gives_it_its_worth_back() -> None:
    marks, (_, _, _, leaf) = Marks(), chain()
    marks.refs.leave(marks.refs.hold(leaf))
    assert leaf.superseded
    marks.refs.hold(leaf)
    assert not leaf.superseded


def test_leaving_what_was_evicted_touches_no_node() -> None:
    marks, (forest, _, middle, leaf) = Marks(), chain()
    ref = marks.refs.hold(leaf, [middle])
    forest.tree.remove_leaf(leaf, now=1.0)
    marks.reordered.clear()
    marks.refs.leave(ref)
    assert leaf.refs == 1
    assert not leaf.superseded
    assert middle.superseded
    assert marks.reordered == [middle]
