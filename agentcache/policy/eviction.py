"""Eviction: which entry leaves first. A policy is an ordering key; the order is a heap of nodes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from agentcache.errors import UnknownPolicy
from agentcache.tree.node import Node

__all__ = ["POLICIES", "EvictionOrder", "Key", "policy_key"]

Key = Callable[[Node], tuple[float, ...]]
"""Smaller leaves first. Must depend only on the node, and change only where the cache says so."""


def lru(node: Node) -> tuple[float, ...]:
    """Least recently used first, whatever any session says."""
    return (node.last_access,)


def session_lru(node: Node) -> tuple[float, ...]:
    """Superseded checkpoints first, then what no live session stands on, then the tips; LRU within.

    A checkpoint that its own trajectory has moved past, or whose trajectory is over, is worth
    little at once. The boundaries that live tips share rank with them. A reference reorders and
    never pins: tips leave too when nothing else is left.
    """
    if node.refs > 0:
        return (2.0, node.last_access)
    return (0.0 if node.superseded else 1.0, node.last_access)


POLICIES: dict[str, Key] = {"lru": lru, "session-lru": session_lru, "auto": session_lru}
"""By name; `auto` is the best one this version has."""


def policy_key(name: str) -> Key:
    """The ordering key of a policy. Raises UnknownPolicy."""
    try:
        return POLICIES[name]
    except KeyError:
        raise UnknownPolicy(name, list(POLICIES)) from None


class EvictionOrder:
    """Nodes by their key, lowest first, in O(log n) per change.

    A node whose key may have changed is pushed anew; its older entries are skipped when they come
    up. `pop` takes the entry out: whoever lets the node live on pushes it again.
    """

    def __init__(self, key: Key) -> None:
        self._key = key
        self._heap: list[tuple[tuple[float, ...], int, int, Node]] = []
        self._ticket = itertools.count()
        self._compact_at = 1024

    def push(self, node: Node) -> None:
        """Put a node at its present place."""
        if node.generation:
            return
        node.stamp += 1
        heapq.heappush(self._heap, (self._key(node), next(self._ticket), node.stamp, node))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> Node | None:
        """The node that should leave first; None when there is none."""
        while self._heap:
            _, _, stamp, node = heapq.heappop(self._heap)
            if stamp == node.stamp and node.generation == 0:
                return node
        return None

    def _compact(self) -> None:
        self._heap = [e for e in self._heap if e[2] == e[3].stamp and e[3].generation == 0]
        heapq.heapify(self._heap)
        self._compact_at = max(1024, 4 * len(self._heap))
