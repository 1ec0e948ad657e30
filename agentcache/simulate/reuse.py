"""How much of what was ever filed was reused at least once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.tree.node import Node, Residency

__all__ = ["Reuse"]


class Reuse:
    """Counts each checkpoint and each token's KV once, however often it is reused.

    Reuse is of a whole path, so a node below which something was reused has been reused itself:
    counting goes up only to the first node that was counted.
    """

    def __init__(self) -> None:
        self.states = 0
        self.tokens = 0
        self._states: dict[int, Residency] = {}
        self._upto: dict[int, int] = {}  # by node: where its counted tokens end

    def read(self, node: Node, boundary: int) -> None:
        """A request went on from `boundary`, which lies in the node's edge or at its end."""
        state = node.data.get(Kind.STATE.value)
        if state is not None and self._states.get(node.id) is not state:
            self._states[node.id] = state
            self.states += 1
        while not node.is_root:
            stop = min(boundary, node.end)
            counted = self._upto.get(node.id, node.start)
            if counted < stop:
                self.tokens += stop - counted
                self._upto[node.id] = stop
            elif counted >= node.end:
                return
            assert node.parent is not None
            node = node.parent

    def filed(self, node: Node) -> None:
        """A path was filed down to a node; where that cut an edge, both parts count as it did."""
        while not node.is_root and node.id not in self._upto:
            upto = max((self._upto.get(child.id, 0) for child in node.children.values()), default=0)
            if upto > node.start:
                self._upto[node.id] = min(upto, node.end)
                return
            assert node.parent is not None
            node = node.parent
