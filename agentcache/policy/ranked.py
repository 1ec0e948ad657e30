"""The order of policies that rank: entries in queues, which are heaps."""

from __future__ import annotations

import heapq
import itertools
from abc import abstractmethod
from typing import TYPE_CHECKING, TypeVar

from agentcache.policy.base import Key, Policy
from agentcache.tree.node import SLOT_BYTES, Node

if TYPE_CHECKING:
    from agentcache.policy.base import Heads, Rank, Ranking

__all__ = ["EvictionOrder", "RankedPolicy"]


class RankedPolicy(Policy):
    """A policy that ranks, with one queue unless it says otherwise."""

    num_queues = 1

    def order(self, num_pages: int) -> EvictionOrder:
        return EvictionOrder(self, num_pages)

    @abstractmethod
    def rank(self, node: Node, now: float) -> Rank:
        """The node's queue, its key there, and how long that holds."""

    def choose(self, heads: Heads) -> int:
        return 0

    def taken(self, key: Key) -> None:
        """The entry with that key was chosen to leave."""


class EvictionOrder:
    """Nodes by their rank, in O(log n) per change.

    A node whose rank may have changed is pushed anew; its older entries are skipped when they come
    up. Pushing only makes a note: nodes are ranked when somebody asks who is first, so a node that
    changes often meanwhile is ranked once. `pop` takes the entry out: whoever lets the node live on
    pushes it again.
    """

    def __init__(self, policy: Ranking, num_pages: int) -> None:
        self.num_pages = num_pages
        self._policy = policy
        self._heaps: list[list[_Entry]] = [[] for _ in range(policy.num_queues)]
        self._timers: list[tuple[float, int, Node]] = []
        self.weights = [0] * policy.num_queues
        self._changed: dict[Node, None] = {}
        self._ticket = itertools.count(1)
        self._num_entries = 0  # at most, since the last time stale ones were thrown out
        self._compact_at = _MIN_ENTRIES

    def push(self, node: Node, now: float) -> None:
        """Put a node at its present place."""
        self._changed[node] = None
        if len(self._changed) >= _MOST_CHANGED:
            self._rank_changed(now)

    def remove(self, node: Node) -> None:
        """Take a node out, if it is in."""
        self._changed.pop(node, None)
        self._take_out(node)

    def pop(self, now: float) -> Node | None:
        """The node that should leave first; None when there is none."""
        self._expire(now)
        self._rank_changed(now)
        queue = self._policy.choose(self)
        node = self.first(queue)
        if node is not None:
            key, _, _ = heapq.heappop(self._heaps[queue])
            self._take_out(node)
            self._policy.taken(key)
        return node

    def shelve(self, node: Node, now: float) -> None:
        """Count what a node holds to its queue without its being an entry: there is nothing to take
        from it until it is pushed again."""
        self._place(node, now)
        node.stamp = 0

    def _take_out(self, node: Node) -> None:
        node.stamp = 0
        if node.queue >= 0:
            self.weights[node.queue] -= node.weight
            node.queue = -1

    def _expire(self, now: float) -> None:
        """What has become of less worth by time alone is ranked anew."""
        while self._timers and self._timers[0][0] <= now:
            _, ticket, node = heapq.heappop(self._timers)
            if ticket == node.stamp:
                self._changed[node] = None

    def _rank_changed(self, now: float) -> None:
        for node in self._changed:
            self._take_out(node)
            if node.end and not node.generation:
                self._place(node, now)
        self._num_entries += len(self._changed)
        self._changed.clear()
        if self._num_entries > self._compact_at:
            self._compact()

    def _place(self, node: Node, now: float) -> None:
        queue, key, wakes = self._policy.rank(node, now)
        stamp, packed = next(self._ticket), 0
        for data in node.data.values():
            if data.tier == 1:
                packed += len(data.packed)
        node.stamp, node.queue, node.weight = stamp, queue, packed // SLOT_BYTES
        self.weights[queue] += node.weight
        heapq.heappush(self._heaps[queue], (key, stamp, node))
        if wakes is not None:
            heapq.heappush(self._timers, (wakes, stamp, node))

    def first(self, queue: int) -> Node | None:
        """The entry of a queue that would leave first."""
        heap = self._heaps[queue]
        while heap:
            _, ticket, node = heap[0]
            if ticket == node.stamp:
                return node
            heapq.heappop(heap)
        return None

    def move(self, node: Node, queue: int, key: Key) -> None:
        """Put an entry into another queue, until it is pushed again."""
        self.weights[node.queue] -= node.weight
        self.weights[queue] += node.weight
        node.queue, node.stamp = queue, next(self._ticket)
        heapq.heappush(self._heaps[queue], (key, node.stamp, node))
        self._num_entries += 1

    def _compact(self) -> None:
        """Throw stale entries out once they may be a sixth; amortised O(1) per push."""
        self._timers = _live(self._timers)
        self._heaps = [_live(heap) for heap in self._heaps]
        self._num_entries = sum(map(len, self._heaps))
        self._compact_at = max(_MIN_ENTRIES, self._num_entries * 6 // 5)


def _live(heap: list[tuple[_K, int, Node]]) -> list[tuple[_K, int, Node]]:
    """A heap without its stale entries."""
    live = [entry for entry in heap if entry[1] == entry[2].stamp]
    if len(live) == len(heap):  # in order as it is
        return heap
    heapq.heapify(live)
    return live


_K = TypeVar("_K", float, Key)

_Entry = tuple[Key, int, Node]
"""(key, ticket, node); the entry counts while the node's stamp is the ticket."""

_MOST_CHANGED = 4
"""Notes that are kept before nodes are ranked without anybody asking: about a turn's, so that each
turn pays for its own."""

_MIN_ENTRIES = 256
"""So few entries are kept, stale or not, before stale ones are looked for."""
