"""What lies on the lower tier, in the order in which it is forgotten."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentcache.tree.node import Node

__all__ = ["Demoted"]


class Demoted:
    """Nodes with data on a lower tier, least recently used first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._ticket = itertools.count()
        self._compact_at = 1024

    def push(self, node: Node) -> None:
        """Put a node at its present place, if it has anything there."""
        if _is_demoted(node):
            heapq.heappush(self._heap, (node.last_access, next(self._ticket), node))
            if len(self._heap) > self._compact_at:
                self._compact()

    def pop(self) -> Node | None:
        """The least recently used; whoever leaves it something there pushes it again."""
        while self._heap:
            last_access, _, node = heapq.heappop(self._heap)
            if not _is_demoted(node):
                continue
            if last_access == node.last_access:
                return node
            self.push(node)
        return None

    def _compact(self) -> None:
        """Leave one entry per node; amortised O(1) per push."""
        nodes = dict.fromkeys(node for *_, node in self._heap if _is_demoted(node))
        self._heap = [(node.last_access, next(self._ticket), node) for node in nodes]
        heapq.heapify(self._heap)
        self._compact_at = max(1024, 2 * len(self._heap))


def _is_demoted(node: Node) -> bool:
    """Whether the node lives and has data on a lower tier."""
    return node.generation == 0 and any(data.tier > 1 for data in node.data.values())
