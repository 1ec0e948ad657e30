"""Policies of the textbooks: what was used when and how often, whatever it saves or holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.policy.ranked import RankedPolicy

if TYPE_CHECKING:
    from agentcache.policy.base import Heads, Rank
    from agentcache.tree.node import Node

__all__ = ["LFU", "LRU", "SLRU", "Priority", "Recency"]


class Recency(RankedPolicy):
    """Least recently used first, where a request uses only the node that it goes on from, and those
    that it files."""

    def rank(self, node: Node, now: float) -> Rank:
        return 0, node.last_access, None


class LRU(Recency):
    """Least recently used first, whatever any session says.

    A request uses all of its path that is known, what lies beyond the boundary included: so the
    radix caches of serving engines count.
    """

    touches_path = True


class LFU(RankedPolicy):
    """Least often used first, and of those the least recently used. A request uses all of its known
    path."""

    touches_path = True

    def rank(self, node: Node, now: float) -> Rank:
        return 0, (node.hits, node.last_access), None


class Priority(RankedPolicy):
    """Lowest priority first, and of those the least recently used.

    An entry has the highest priority of the sessions that use it. What its trajectory has moved
    past or left keeps no priority above the usual one.
    """

    touches_path = True

    def rank(self, node: Node, now: float) -> Rank:
        priority = min(node.priority, 0) if node.superseded else node.priority
        return 0, (priority, node.last_access), None


_PROBATION, _PROTECTED = range(2)


class SLRU(RankedPolicy):
    """Segmented LRU: entries that were used again are protected, up to a share of the memory.

    New entries are on probation, and leave from there, least recently used first. One that is used
    again becomes protected; while the protected ones hold more than their share, the least
    recently used of them goes back on probation, as the latest there.
    """

    num_queues = 2

    def __init__(self, protected_share: float = 0.8) -> None:
        self.protected_share = protected_share
        self._latest = 0.0

    def used(self, node: Node, now: float) -> None:
        node.value = None

    def rank(self, node: Node, now: float) -> Rank:
        self._latest = max(self._latest, node.last_access)
        if node.value is not None:  # sent back at that time
            return _PROBATION, node.value, None
        return _PROTECTED if node.hits else _PROBATION, node.last_access, None

    def choose(self, heads: Heads) -> int:
        limit = self.protected_share * heads.num_pages
        while heads.weights[_PROTECTED] > limit:
            node = heads.first(_PROTECTED)
            if node is None:
                break  # what is over is in use, and counted only
            node.value = self._latest
            heads.move(node, _PROBATION, self._latest)
        return _PROBATION if heads.first(_PROBATION) is not None else _PROTECTED
