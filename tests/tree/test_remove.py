"""Removal takes a leaf, and with it what nobody can use any more; cursors notice."""

from __future__ import annotations

import pytest
from testkit.helpers import Forest, ids

from agentcache.tree.check import check_tree
from agentcache.tree.node import Cursor
from agentcache.types import Kind


def test_removal_of_a_leaf_takes_ancestors_that_are_no_boundary() -> None:
    forest = Forest()
    top = forest.add(ids(1, 2))
    middle = forest.add(ids(1, 2, 3, 4), state=False)
    leaf = forest.add(ids(1, 2, 3, 4, 5))
    data = {id(n): dict(n.data) for n in (middle, leaf)}
    freed = forest.tree.remove_leaf(leaf, now=8.0)
    assert freed.removed == [leaf, middle]
    assert freed.survivor is top
    assert freed.data == [
        (Kind.FULL, data[id(leaf)][Kind.FULL]),
        (Kind.STATE, data[id(leaf)][Kind.STATE]),
        (Kind.FULL, data[id(middle)][Kind.FULL]),
    ]
    assert top.is_leaf
    for node in (leaf, middle):
        assert node.generation == 1
        assert node.evicted_at == 8.0
        assert node.data == {}
        assert len(node.tokens) == 0
    assert top.generation == 0
    assert top.evicted_at is None
    check_tree(forest.tree)


@pytest.mark.parametrize("reason", ["boundary", "locked", "branch"])
def test_removal_stops_at_an_ancestor_that_is_of_use(reason: str) -> None:
    forest = Forest()
    middle = forest.add(ids(1, 2), state=reason == "boundary")
    leaf = forest.add(ids(1, 2, 3))
    if reason == "locked":
        forest.tree.lock(middle)
    if reason == "branch":
        forest.add(ids(1, 2, 4))
    freed = forest.tree.remove_leaf(leaf, now=1.0)
    assert freed.removed == [leaf]
    assert freed.survivor is middle
    assert middle.generation == 0


def test_the_root_survives_the_last_leaf() -> None:
    forest = Forest()
    leaf = forest.add(ids(1, 2, 3))
    freed = forest.tree.remove_leaf(leaf, now=1.0)
    assert freed.survivor is forest.root
    assert list(forest.tree.nodes()) == []
    assert not forest.tree.can_remove(forest.root)
    assert forest.root.generation == 0


def test_only_idle_living_leaves_can_be_removed() -> None:
    forest = Forest()
    inner, leaf = forest.add(ids(1, 2)), forest.add(ids(1, 2, 3))
    assert not forest.tree.can_remove(inner)
    assert forest.tree.can_remove(leaf)
    forest.tree.lock(leaf)
    assert not forest.tree.can_remove(leaf)
    forest.tree.unlock(leaf)
    forest.tree.remove_leaf(leaf, now=1.0)
    assert not forest.tree.can_remove(leaf)
    assert forest.tree.can_remove(inner)


def test_drop_leaves_the_node_and_tells_what_was_there() -> None:
    forest = Forest()
    node = forest.add(ids(1, 2, 3))
    data = node.data[Kind.STATE]
    dropped = forest.tree.drop(node, Kind.STATE, now=3.0)
    assert dropped is data
    assert node.evicted_at == 3.0
    assert set(node.data) == {Kind.FULL}
    assert not forest.tree.is_boundary(node)
    assert forest.tree.drop(node, Kind.STATE, now=4.0) is None
    assert node.evicted_at == 3.0, "nothing left this time"


def test_cursor_at_a_living_node_points_to_it_whatever_is_split() -> None:
    forest = Forest()
    node = forest.add(ids(1, 2, 3, 4))
    cursor = Cursor.at(node)
    forest.add(ids(1, 2, 9))
    assert cursor.alive
    assert cursor.living() is node


def test_cursor_whose_node_left_points_to_the_deepest_living_ancestor() -> None:
    forest = Forest()
    top = forest.add(ids(1, 2))
    middle = forest.add(ids(1, 2, 3, 4))
    leaf = forest.add(ids(1, 2, 3, 4, 5, 6))
    cursor = Cursor.at(leaf)
    forest.tree.remove_leaf(leaf, now=1.0)
    assert not cursor.alive
    assert cursor.living() is middle
    # a split after the leaf had left puts a node between the two that stand above it
    between = forest.add(ids(1, 2, 3, 9)).parent
    assert cursor.living() is middle
    forest.tree.remove_leaf(middle, now=2.0)
    assert between is not None
    assert between.parent is top
    assert cursor.living() is between


def test_cursor_of_a_tree_that_was_emptied_points_to_the_root() -> None:
    forest = Forest()
    leaf = forest.add(ids(1, 2, 3))
    cursor = Cursor.at(leaf)
    forest.tree.remove_leaf(leaf, now=1.0)
    # the same tokens again are another node
    again = forest.add(ids(1, 2, 3))
    assert again is not leaf
    assert not cursor.alive
    assert cursor.living() is forest.root
