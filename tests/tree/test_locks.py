"""A lock keeps a node and what stands above it, is undone by its own unlock, and only once."""

from __future__ import annotations

import pytest
from testkit.helpers import Forest, ids

from agentcache.errors import LeaseError


def test_lock_survives_a_split_of_the_locked_node() -> None:
    forest = Forest()
    node = forest.add(ids(1, 2, 3, 4, 5))
    forest.tree.lock(node)
    upper = forest.add(ids(1, 2), state=False)
    assert upper.locks == 0
    assert node.locks == 1
    assert not forest.tree.can_remove(node)
    forest.tree.unlock(node)
    assert node.locks == 0
    assert forest.tree.can_remove(node)


def test_locks_of_one_node_are_counted() -> None:
    forest = Forest()
    node = forest.add(ids(1, 2, 3))
    forest.tree.lock(node)
    forest.tree.lock(node)
    forest.tree.unlock(node)
    assert not forest.tree.can_remove(node)
    forest.tree.unlock(node)
    assert forest.tree.can_remove(node)


def test_unlock_without_a_lock_is_an_error_and_changes_nothing() -> None:
    forest = Forest()
    node = forest.add(ids(1, 2, 3))
    forest.tree.lock(node)
    forest.tree.unlock(node)
    with pytest.raises(LeaseError, match="exactly once"):
        forest.tree.unlock(node)
    assert node.locks == 0
