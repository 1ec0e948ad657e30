"""FULL: attention KV. Every prefix of a cached run can be reused."""

from __future__ import annotations

from agentcache.components.base import Component
from agentcache.tree.node import Node, Residency
from agentcache.types import IntArray, Kind, Vote

__all__ = ["FullComponent"]


class FullComponent(Component):
    """Pages that cover the node's positions: page `i` of a sequence holds [i*P, (i+1)*P).

    A page that covers positions of two nodes on one path is held by both; where the two differ, the
    deeper node's page is the right one for the whole page (its writer copied the earlier tokens).
    """

    kind = Kind.FULL

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def vote(self, node: Node) -> Vote:
        residency = node.data.get(Kind.FULL)
        if residency is None:
            return Vote.ABSENT
        return Vote.RESIDENT if residency.tier == 1 else Vote.LOADABLE

    def on_split(self, upper: Node, lower: Node) -> IntArray:
        residency = lower.data.get(Kind.FULL)
        if residency is None:
            return upper.tokens[:0]
        first = upper.start // self.page_size
        cut = upper.end // self.page_size - first
        shares_page = upper.end % self.page_size != 0
        slots = residency.slots
        upper.data[Kind.FULL] = Residency(slots[: cut + shares_page], residency.tier)
        lower.data[Kind.FULL] = Residency(slots[cut:], residency.tier)
        return slots[cut : cut + shares_page]
