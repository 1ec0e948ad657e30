"""GDSF: greedy dual by size and frequency, with work in place of cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.policy.ranked import RankedPolicy
from agentcache.policy.worth import freed_bytes, saved_flops

if TYPE_CHECKING:
    from agentcache.policy.base import Costs, Key, Rank
    from agentcache.tree.node import Node

__all__ = ["GDSF"]


class GDSF(RankedPolicy):
    """The lowest H leaves first, where H = L + frequency x FLOPs saved / bytes freed.

    FLOPs are those that a hit saves against the nearest usable ancestor; bytes, those that really
    become free. L is the H of what left last, which only rises: an entry keeps the L of its last
    use, so what is not used any more is overtaken in time. The frequency is one, and one more for
    each use.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._inflation = 0.0

    def used(self, node: Node, now: float) -> None:
        node.value = self._inflation

    def rank(self, node: Node, now: float) -> Rank:
        if node.value is None:
            node.value = self._inflation
        size = max(1, freed_bytes(node, self._costs))
        worth = (node.hits + 1) * saved_flops(node, self._costs) / size
        return 0, node.value + worth, None

    def taken(self, key: Key) -> None:
        assert isinstance(key, float)
        self._inflation = max(self._inflation, key)
