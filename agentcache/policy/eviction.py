"""Eviction: which entry leaves first. A policy ranks nodes into queues, which are heaps."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from agentcache.errors import UnknownPolicy
from agentcache.policy.coverage import spacing
from agentcache.tree.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["POLICIES", "EvictionOrder", "Heads", "Policy", "make_policy"]

Rank = tuple[int, float]
"""(queue, key): within a queue the smallest key leaves first."""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a policy chooses the next queue from.

    nodes: the first of each queue, None where it is empty. weights: pages each queue's entries
    hold. num_pages: pages there are.
    """

    nodes: tuple[Node | None, ...]
    weights: tuple[int, ...]
    num_pages: int


class Policy(Protocol):
    """Ranks entries. A rank depends on the node and the time, and changes only where the cache
    says so (by pushing the node anew) or when `node.expires` has passed."""

    num_queues: int

    def rank(self, node: Node, now: float) -> Rank:
        """The node's queue and its key there."""
        ...

    def choose(self, heads: Heads) -> int:
        """The queue whose head leaves; at least one has one."""
        ...


class LRU:
    """Least recently used first, whatever any session says."""

    num_queues = 1

    def rank(self, node: Node, now: float) -> Rank:
        return 0, node.last_access

    def choose(self, heads: Heads) -> int:
        return 0


_SUPERSEDED, _ORDINARY, _REFERENCED = range(3)


class SessionLRU:
    """Session-aware order: what its own trajectory has moved past or left, then what no live
    session stands on, then what one does; least recently used first within the last two.

    A reference reorders and never pins. It counts once, however many live sessions share it. It
    expires when its session has been idle for `patience_s`, or for twice the time that
    `idle(expect=...)` announced; what it marked is an ordinary entry from then on. Ordinary entries
    have a share of the memory: while they hold less than `ordinary_share` of it, a reference that
    was used longer ago than all of them leaves before them.

    Superseded checkpoints of a path leave so that the gaps between the rest stay balanced (see
    `policy.coverage`); ends that nobody stands on any more before all of them.
    """

    num_queues = 3

    def __init__(self, ordinary_share: float = 1 / 8) -> None:
        self.ordinary_share = ordinary_share

    def rank(self, node: Node, now: float) -> Rank:
        if node.refs > 0 and (node.expires is None or node.expires > now):
            return _REFERENCED, node.last_access
        if node.superseded and node.refs == 0:
            return _SUPERSEDED, -1.0 if node.is_leaf else spacing(node)
        return _ORDINARY, node.last_access

    def choose(self, heads: Heads) -> int:
        superseded, ordinary, referenced = heads.nodes
        if superseded is not None:
            return _SUPERSEDED
        if ordinary is None:
            return _REFERENCED
        if referenced is None:
            return _ORDINARY
        few = heads.weights[_ORDINARY] < self.ordinary_share * heads.num_pages
        if few and referenced.last_access < ordinary.last_access:
            return _REFERENCED
        return _ORDINARY


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": LRU,
    "session-lru": SessionLRU,
    "auto": SessionLRU,
}
"""By name; `auto` is the best one this version has."""


def make_policy(name: str) -> Policy:
    """A policy by its name. Raises UnknownPolicy."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise UnknownPolicy(name, list(POLICIES)) from None


class EvictionOrder:
    """Nodes by their rank, in O(log n) per change.

    A node whose rank may have changed is pushed anew; its older entries are skipped when they come
    up. Pushing only makes a note: nodes are ranked when somebody asks who is first, so a node that
    changes often meanwhile is ranked once. `pop` takes the entry out: whoever lets the node live on
    pushes it again.
    """

    def __init__(self, policy: Policy, num_pages: int) -> None:
        self._policy = policy
        self._num_pages = num_pages
        self._heaps: list[list[_Entry]] = [[] for _ in range(policy.num_queues)]
        self._timers: list[_Entry] = []
        self._weights = [0] * policy.num_queues
        self._changed: dict[Node, None] = {}
        self._ticket = itertools.count(1)
        self._compact_at = 1024

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
        heads = tuple(self._head(heap) for heap in self._heaps)
        if all(head is None for head in heads):
            return None
        queue = self._policy.choose(Heads(heads, tuple(self._weights), self._num_pages))
        node = heapq.heappop(self._heaps[queue])[2]
        self._take_out(node)
        return node

    def _take_out(self, node: Node) -> None:
        node.stamp = 0
        if node.queue >= 0:
            self._weights[node.queue] -= node.weight
            node.queue = -1

    def _expire(self, now: float) -> None:
        """References that have expired are ranked anew."""
        while self._timers and self._timers[0][0] <= now:
            _, ticket, node = heapq.heappop(self._timers)
            if ticket == node.stamp:
                self._changed[node] = None

    def _rank_changed(self, now: float) -> None:
        for node in self._changed:
            self._take_out(node)
            if not node.generation and not node.is_root:
                self._place(node, now)
        self._changed.clear()
        if sum(map(len, self._heaps)) + len(self._timers) > self._compact_at:
            self._compact()

    def _place(self, node: Node, now: float) -> None:
        queue, key = self._policy.rank(node, now)
        node.stamp, node.queue, node.weight = next(self._ticket), queue, 0
        for data in node.data.values():
            if data.tier == 1:
                node.weight += data.num_slots
        self._weights[queue] += node.weight
        heapq.heappush(self._heaps[queue], (key, node.stamp, node))
        if node.expires is not None and node.expires > now:
            heapq.heappush(self._timers, (node.expires, node.stamp, node))

    def _head(self, heap: list[_Entry]) -> Node | None:
        while heap:
            _, ticket, node = heap[0]
            if ticket == node.stamp:
                return node
            heapq.heappop(heap)
        return None

    def _compact(self) -> None:
        """Throw stale entries out once they may be the most; amortised O(1) per push."""
        for heap in (*self._heaps, self._timers):
            heap[:] = [entry for entry in heap if entry[1] == entry[2].stamp]
            heapq.heapify(heap)
        self._compact_at = max(1024, 2 * sum(map(len, self._heaps)))


_Entry = tuple[float, int, Node]
"""(key, ticket, node); the entry counts while the node's stamp is the ticket."""

_MOST_CHANGED = 256
"""Notes that are kept before nodes are ranked without anybody asking."""
