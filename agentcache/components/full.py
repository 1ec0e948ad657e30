"""FULL: attention KV. Every prefix of a cached run can be reused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.components.base import Component, tier_vote
from agentcache.tree.node import NO_SLOTS, Node, Residency
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from agentcache.types import Vote

__all__ = ["FullComponent"]


class FullComponent(Component):
    """Keys and values of attention that sees every earlier position: pages along the edges.

    Page `i` of a sequence holds positions [i * page_size, (i + 1) * page_size). A page that covers
    positions of two nodes on one path is held by both; where the two differ, the deeper node's page
    is the right one for the whole page (its writer copied the earlier tokens).
    """

    kind = Kind.FULL

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def vote(self, node: Node, at: int) -> Vote:
        return tier_vote(node.data.get(self.kind))

    def commit(self, node: Node, slots: IntArray) -> None:
        self._attach(node, slots, node.start)

    def on_split(self, upper: Node, lower: Node) -> IntArray:
        residency = lower.data.get(self.kind)
        if residency is None:
            return NO_SLOTS
        first = upper.start // self.page_size
        cut = upper.end // self.page_size - first
        shares_page = upper.end % self.page_size != 0
        slots = residency.slots
        above, below = slots[: cut + shares_page].copy(), slots[cut:].copy()
        upper.data[self.kind] = Residency(above, upper.start, residency.tier)
        lower.data[self.kind] = Residency(below, lower.start, residency.tier)
        return slots[cut : cut + shares_page]
