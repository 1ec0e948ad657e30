"""STATE: a recurrent state. It can be resumed at the one position where it was saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.components.base import Component
from agentcache.types import IntArray, Kind, Vote

if TYPE_CHECKING:
    from agentcache.tree.node import Node

__all__ = ["StateComponent"]


class StateComponent(Component):
    """A checkpoint at `node.end`: the state that has absorbed exactly `node.end` tokens.

    A request copies it when it is acquired and never reads it again, so a lock does not keep it.
    """

    kind = Kind.STATE

    def vote(self, node: Node) -> Vote:
        residency = node.data.get(Kind.STATE)
        if residency is None:
            return Vote.ABSENT
        return Vote.RESIDENT if residency.tier == 1 else Vote.LOADABLE

    def on_split(self, upper: Node, lower: Node) -> IntArray:
        # The checkpoint stands at the lower part's end; the new border has none.
        return upper.tokens[:0]
