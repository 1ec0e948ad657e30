"""A lock keeps a node and what stands above it, is undone by its own unlock, and only once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from testkit.helpers import Forest, ids

from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.errors import LeaseError
from agentcache.tree.radix_tree import RadixTree

if TYPE_CHECKING:
    from agentcache.tree.node import Node


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


def test_every_component_hears_of_lock_and_unlock() -> None:
    heard: list[tuple[str, Node]] = []

    class Listening(StateComponent):
        def lock(self, node: Node) -> None:
            heard.append(("lock", node))

        def unlock(self, node: Node) -> None:
            heard.append(("unlock", node))

    tree = RadixTree([FullComponent(4), Listening()])
    node = tree.insert(tree.root(b""), ids(1, 2), 2).node
    tree.lock(node)
    tree.unlock(node)
    assert heard == [("lock", node), ("unlock", node)]
