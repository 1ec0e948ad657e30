"""The contract of a component: five questions about one node, answered with integers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from agentcache.tree.node import Node, Residency

if TYPE_CHECKING:
    from agentcache.types import IntArray, Kind, Vote

__all__ = ["Component"]


class Component(ABC):
    """A reuse rule attached to the tree.

    A component never frees, copies or moves anything: it says what is to be done and the cache does
    it. It never moves data between tiers. The walk asks it from the root downwards.
    """

    kind: Kind

    @abstractmethod
    def vote(self, node: Node) -> Vote:
        """Whether `node.end` can be a reuse boundary for this layer kind.

        RESIDENT: data is on the device. LOADABLE: on a lower tier. ABSENT: not there. Only asked
        when every ancestor was visited; does not change anything.
        """

    @abstractmethod
    def on_split(self, upper: Node, lower: Node) -> IntArray:
        """Divide the data that lies at `lower` between the two parts of a split.

        `upper` is the new node [start, upper.end), `lower` keeps [upper.end, lower.end) and, before
        the call, all data. Returns the slots that both parts hold from now on, each of which needs
        one more reference.
        """

    def commit(self, node: Node, slots: IntArray) -> None:
        """Attach `slots` to a node that holds no data of this kind yet."""
        assert self.kind not in node.data, f"{node} already holds {self.kind.value} data"
        node.data[self.kind] = Residency(slots)

    def lock(self, node: Node) -> None:  # noqa: B027 - most components need no more
        """Keep what a running request reads through `node` until `unlock`.

        The tree itself keeps a locked node, and with it every ancestor; a component that needs no
        more than that keeps this as it is.
        """

    def unlock(self, node: Node) -> None:  # noqa: B027
        """Undo one `lock` of the same node."""

    def evict(self, node: Node) -> IntArray | None:
        """Detach this kind's data; the slots to give back, or None if it holds none."""
        residency = node.data.pop(self.kind, None)
        return None if residency is None else residency.slots
