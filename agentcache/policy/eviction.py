"""Eviction: which entry leaves first. A policy ranks nodes into queues, which are heaps."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Protocol

from agentcache.errors import UnknownPolicy
from agentcache.policy.coverage import is_checkpoint, spacing
from agentcache.tree.node import SLOT_BYTES, Node

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["POLICIES", "EvictionOrder", "Heads", "Policy", "Rank", "make_policy"]

Rank = tuple[int, float, float | None]
"""(queue, key, wakes): within a queue the smallest key leaves first; `wakes` is when the rank
changes by itself next, if it does."""


class Heads(Protocol):
    """What a policy chooses the next queue from.

    weights: pages each queue's entries hold. num_pages: pages there are.
    """

    weights: list[int]
    num_pages: int

    def first(self, queue: int) -> Node | None:
        """The entry of a queue that would leave first."""
        ...


class Policy(Protocol):
    """Ranks entries. A rank changes only where the cache says so, by pushing the node anew, or at
    the time that it names itself."""

    num_queues: int

    def rank(self, node: Node, now: float) -> Rank:
        """The node's queue, its key there, and how long that holds."""
        ...

    def choose(self, heads: Heads) -> int:
        """The queue whose first entry leaves; any if all are empty."""
        ...


class LRU:
    """Least recently used first, whatever any session says."""

    num_queues = 1

    def rank(self, node: Node, now: float) -> Rank:
        return 0, node.last_access, None

    def choose(self, heads: Heads) -> int:
        return 0


_SUPERSEDED, _ORDINARY, _IDLE, _ACTIVE = range(4)

_OVERDUE = 3
"""A session that has been away for so many times its usual gap is no longer expected."""


class SessionLRU:
    """Session-aware order, in four queues:

    1. what its own trajectory has moved past or left;
    2. ordinary entries, that no live session stands on: least recently used first;
    3. tips of sessions of which nobody knows when they will be back: least recently used first;
    4. tips of sessions that take turns: whoever is expected back last leaves first, for where
       sessions take turns in a round, the one used longest ago comes next. Shared boundaries above
       such tips leave after those, least recently used first.

    A reference reorders and never pins. It counts once, however many live sessions share it. It
    expires when its session has been idle for ten minutes, or for twice the time that
    `idle(expect=...)` announced; what it marked is an ordinary entry from then on. Ordinary entries
    have a share of the memory: while they hold less than `ordinary_share` of it, a reference that
    was used longer ago than all of them leaves before them.

    Superseded checkpoints of a path leave so that the gaps between the rest stay balanced (see
    `policy.coverage`); ends that nobody stands on any more before all of them.
    """

    num_queues = 4

    def __init__(self, ordinary_share: float = 1 / 8) -> None:
        self.ordinary_share = ordinary_share

    def rank(self, node: Node, now: float) -> Rank:
        if node.refs > 0:
            expires, due = node.expires, node.due
            if expires is not None and expires <= now:
                return _ORDINARY, node.last_access, None
            if due is None or now >= (overdue := _overdue(node, due)):
                return _IDLE, node.last_access, expires
            wakes = overdue if expires is None or overdue < expires else expires
            return _ACTIVE, node.last_access if node.structural else -due, wakes
        if node.superseded:
            if node.is_leaf or not is_checkpoint(node):  # of the latter nothing can be taken
                return _SUPERSEDED, -1.0, None
            return _SUPERSEDED, spacing(node), None
        return _ORDINARY, node.last_access, None

    def choose(self, heads: Heads) -> int:
        if heads.first(_SUPERSEDED) is not None:
            return _SUPERSEDED
        ordinary = heads.first(_ORDINARY)
        if ordinary is not None:
            few = heads.weights[_ORDINARY] < self.ordinary_share * heads.num_pages
            if not few:
                return _ORDINARY
        referenced = _ACTIVE if heads.first(_IDLE) is None else _IDLE
        held = heads.first(referenced)
        if ordinary is None or (held is not None and held.last_access < ordinary.last_access):
            return referenced
        return _ORDINARY


def _overdue(node: Node, due: float) -> float:
    """When a session that has not come back at `due` is no longer expected."""
    return node.last_access + _OVERDUE * (due - node.last_access)


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
        self.num_pages = num_pages
        self._policy = policy
        self._heaps: list[list[_Entry]] = [[] for _ in range(policy.num_queues)]
        self._timers: list[_Entry] = []
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
            heapq.heappop(self._heaps[queue])
            self._take_out(node)
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

    def _compact(self) -> None:
        """Throw stale entries out once they may be a sixth; amortised O(1) per push."""
        for heap in (*self._heaps, self._timers):
            live = [entry for entry in heap if entry[1] == entry[2].stamp]
            if len(live) < len(heap):  # else it is in order as it is
                heap[:] = live
                heapq.heapify(heap)
        self._num_entries = sum(map(len, self._heaps))
        self._compact_at = max(_MIN_ENTRIES, self._num_entries * 6 // 5)


_Entry = tuple[float, int, Node]
"""(key, ticket, node); the entry counts while the node's stamp is the ticket."""

_MOST_CHANGED = 4
"""Notes that are kept before nodes are ranked without anybody asking: about a turn's, so that each
turn pays for its own."""

_MIN_ENTRIES = 256
"""So few entries are kept, stale or not, before stale ones are looked for."""
