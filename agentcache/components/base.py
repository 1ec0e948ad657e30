"""The contract of a component: four questions about one node, answered with integers.

Three ways to keep data at a node, of which the cache knows how to fill and free each:

    FullComponent      pages along the node's own edge; the path to a node holds a prefix
    WindowComponent    pages of the positions [reach(end), end) that the boundary at `end` needs,
                       held by the node itself, so that no other node's eviction can break it
    SnapshotComponent  one copy of something at `end`

A tree has at most one of the first and of the last, and any number of windows: a new layer kind is
one more subclass. What a node holds besides its edge's pages is its checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from agentcache.tree.node import NO_SLOTS, Residency
from agentcache.types import Vote

if TYPE_CHECKING:
    from agentcache.tree.node import Node
    from agentcache.types import IntArray

__all__ = ["Component", "SnapshotComponent", "WindowComponent", "tier_vote"]


class Component(ABC):
    """A reuse rule attached to the tree.

    A component never frees, copies or moves anything: it says what is to be done and the cache does
    it. It never moves data between tiers.
    """

    kind: str
    """The name of its data at a node; one component of a kind per tree."""

    @abstractmethod
    def vote(self, node: Node, at: int) -> Vote:
        """Whether position `at`, inside the node's edge or at its end, can be a reuse boundary.

        RESIDENT: its data is on the device. LOADABLE: on a lower tier. ABSENT: not there. `at` lies
        in (node.start, node.end]. Changes nothing.
        """

    @abstractmethod
    def on_split(self, upper: Node, lower: Node) -> IntArray:
        """Divide the data that lies at `lower` between the two parts of a split.

        `upper` is the new node [start, upper.end), `lower` keeps [upper.end, lower.end) and, before
        the call, all data. Votes at positions of either must stay what they were. Returns the slots
        that both parts hold from now on, each of which needs one more reference.
        """

    @abstractmethod
    def commit(self, node: Node, slots: IntArray) -> None:
        """Attach `slots` to a node that holds no data of this kind yet."""

    def evict(self, node: Node) -> Residency | None:
        """Detach this kind's data, to be given back where it lies; None if it holds none."""
        return node.data.pop(self.kind, None)

    def _attach(self, node: Node, slots: IntArray, start: int) -> None:
        assert self.kind not in node.data, f"{node} already holds {self.kind} data"
        node.data[self.kind] = Residency(slots, start)


class WindowComponent(Component):
    """Data of the last positions before a boundary, held by the boundary's own node.

    Neighbouring boundaries hold the pages that their windows have in common together. Positions
    that no boundary needs any more are in nobody's hands: the tombstones of other caches.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    @abstractmethod
    def reach(self, at: int) -> int:
        """The first position that a request resumed at `at` reads, in [0, at]; grows with `at`."""

    def vote(self, node: Node, at: int) -> Vote:
        residency = node.data.get(self.kind)
        if residency is None or self.reach(at) < residency.start:
            return _ABSENT
        return tier_vote(residency)

    def commit(self, node: Node, slots: IntArray) -> None:
        self._attach(node, slots, self.reach(node.end))

    def on_split(self, upper: Node, lower: Node) -> IntArray:
        residency = lower.data.get(self.kind)
        if residency is None or self.reach(upper.end) < residency.start:
            return NO_SLOTS
        shared = self.pages_for(residency, upper.end).copy()
        upper.data[self.kind] = Residency(shared, residency.start, residency.tier)
        return shared

    def pages_for(self, residency: Residency, at: int) -> IntArray:
        """Those of a node's pages that cover [residency.start, at)."""
        first = residency.start // self.page_size
        return residency.slots[: -(-at // self.page_size) - first]


class SnapshotComponent(Component):
    """A copy of something at `node.end` exactly: what has absorbed `node.end` tokens.

    A request copies it when it is acquired and never reads it again.
    """

    def vote(self, node: Node, at: int) -> Vote:
        return _ABSENT if at < node.end else tier_vote(node.data.get(self.kind))

    def commit(self, node: Node, slots: IntArray) -> None:
        self._attach(node, slots, node.end)

    def on_split(self, upper: Node, lower: Node) -> IntArray:
        # The checkpoint stands at the lower part's end; the new border has none.
        return NO_SLOTS


def tier_vote(residency: Residency | None) -> Vote:
    """The vote of data that would do, by where it lies."""
    if residency is None:
        return _ABSENT
    return _RESIDENT if residency.tier == 1 else _LOADABLE


_RESIDENT, _LOADABLE, _ABSENT = Vote  # members of an enumeration are slow to reach by name
