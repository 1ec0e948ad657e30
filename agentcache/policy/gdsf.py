"""GDSF: greedy dual by size and frequency, with work in place of cost."""

from __future__ import annotations

from math import inf, nextafter
from typing import TYPE_CHECKING

from agentcache.policy.ranked import EvictionOrder, RankedPolicy
from agentcache.policy.worth import freed_bytes, is_entry, saved_flops

if TYPE_CHECKING:
    from agentcache.policy.base import Costs, Key, Rank
    from agentcache.tree.node import Node

__all__ = ["GDSF"]


class GDSF(RankedPolicy):
    """The lowest H leaves first, where H = L + frequency x FLOPs saved / bytes freed.

    FLOPs are those that a hit saves against the nearest usable ancestor; bytes, those that really
    become free. The frequency is one, and one more for each use since the entry was filed. L is the
    H of what left last, which only rises. An entry keeps the H of its last use, or of when it was
    filed, whatever is filed or leaves around it afterwards: what is not used any more is overtaken
    in time, a passed tip too, which as a checkpoint in the middle would free little and seem dear.

    Room is made for a request before what it files has an H: that leaves last of all. Entries that
    several others branch off from stay until there are no others.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._inflation = 0.0
        self._frequency: dict[Node, int] = {}  # of what was used; once where there is no entry

    def order(self, num_pages: int) -> EvictionOrder:
        return _Order(self, num_pages)

    def used(self, node: Node, now: float) -> None:
        self._frequency[node] = self._frequency.get(node, 1) + 1
        node.value = self._h(node)

    def rank(self, node: Node, now: float) -> Rank:
        if not is_entry(node):
            return 0, (_NOTHING, 0.0), None
        if node.value is None:
            h = self._h(node)
            if node.last_access >= now:
                return 0, (_JUST_FILED, h), nextafter(now, inf)
            node.value = h
        return 0, (_SHARED if node.num_children > 1 else _ORDINARY, node.value), None

    def taken(self, key: Key) -> None:
        assert isinstance(key, tuple)
        self._inflation = max(self._inflation, key[1])

    def forget(self, node: Node) -> None:
        """The entry has left; should there be one again, it is new."""
        node.value = None
        self._frequency.pop(node, None)

    def _h(self, node: Node) -> float:
        size = max(1, freed_bytes(node, self._costs))
        worth = saved_flops(node, self._costs) / size
        return self._inflation + self._frequency.get(node, 1) * worth


class _Order(EvictionOrder):
    """Tells the policy what has left."""

    def __init__(self, policy: GDSF, num_pages: int) -> None:
        super().__init__(policy, num_pages)
        self._forget = policy.forget

    def remove(self, node: Node) -> None:
        super().remove(node)
        self._forget(node)

    def pop(self, now: float) -> Node | None:
        node = super().pop(now)
        if node is not None:
            self._forget(node)
        return node


_ORDINARY, _SHARED, _JUST_FILED, _NOTHING = range(4)
"""Who leaves first, before H is looked at."""
