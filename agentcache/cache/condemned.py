"""Paths that turned out wrong: what was computed on them is found no more, and leaves.

A path shares the KV of its first tokens with everything that branches off it, so all of that is in
doubt together. It is taken out of its namespace as one piece, under a root that no request starts
from, and goes at once but for what running requests read through: that follows when they are over,
with what they have filed in the meantime.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentcache.cache.listeners import Listeners
    from agentcache.cache.memory import Memory
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import RadixTree

__all__ = ["Condemned", "Hidden"]


class Hidden:
    """Roots that no request starts from; what hangs there is in use, or about to leave."""

    def __init__(self) -> None:
        self.roots: set[Node] = set()

    def holds(self, node: Node) -> bool:
        """Whether a node hangs from one of them. O(1) while there is none."""
        if not self.roots:
            return False
        while node.parent is not None:
            node = node.parent
        return node in self.roots


class Condemned:
    """What was taken out and has not left yet. Engine thread only."""

    def __init__(
        self, tree: RadixTree, memory: Memory, listeners: Listeners, hidden: Hidden
    ) -> None:
        self._tree = tree
        self._memory = memory
        self._listeners = listeners
        self._roots = hidden.roots

    def take(self, node: Node) -> int:
        """Take out the path to a node with all that branches off it; entries that left at once."""
        top = _below_root(node)
        if top is None or top.generation:
            return 0
        if top.parent not in self._roots:
            self._move(top)
        return self.sweep()

    def sweep(self) -> int:
        """Forget what no running request reads any more; how many entries that were."""
        tops = [top for root in self._roots for top in root.children.values()]
        num = sum(self._memory.forget(top) for top in tops)
        self._roots.difference_update([root for root in self._roots if root.is_leaf])
        return num

    def _move(self, top: Node) -> None:
        """Hang a path under a root of its own. No namespace's digest is as short as its name."""
        assert top.parent is not None
        for node in reversed(self._memory.below(top)):
            self._listeners.note("remove", node)  # for listeners it is gone, whoever still reads it
        roots = (self._tree.root(b"condemned %d" % number) for number in itertools.count())
        root = next(root for root in roots if root not in self._roots)
        top.parent.detach(top)
        top.parent = root
        root.attach(top)
        self._roots.add(root)


def _below_root(node: Node) -> Node | None:
    """The first node of a node's path; None for a root."""
    while node.parent is not None and not node.parent.is_root:
        node = node.parent
    return None if node.is_root else node
