"""Marconi's eviction: recency and FLOP efficiency, weighed by a factor that is tuned by replay.

Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025, section 4.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentcache.policy.scored import ScoredOrder, ScoredPolicy
from agentcache.policy.tuning import Tuning
from agentcache.policy.worth import freed_bytes, saved_flops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentcache.policy.base import Costs, Served
    from agentcache.policy.scored import Bools, Floats
    from agentcache.policy.tuning import AlphaTuner
    from agentcache.tree.node import Node

__all__ = ["Marconi"]


class Marconi(ScoredPolicy):
    """The lowest S leaves first, where S = recency + alpha x FLOP efficiency, each between 0 and 1
    over all candidates.

    Recency is the time at which a request last went on from the very entry, or filed it; use of
    what lies below does not count. FLOP efficiency is the work that a hit saves against the nearest
    usable ancestor, per byte that really becomes free. Room is made before a request files
    anything: what it has used or filed, and entries that several others branch off from, are
    candidates only when nothing else is left.

    alpha: given, it stays as it is. Else it is 0 until the tuner has found a better one, see
    `policy.tuning`; without a tuner too.
    """

    fields = ("last_access", "efficiency", "is_shared")

    def __init__(
        self, costs: Costs, alpha: float | None = None, tuner: AlphaTuner | None = None
    ) -> None:
        self.alpha = alpha or 0.0
        self._costs = costs
        self._tuning = Tuning(tuner) if tuner is not None and alpha is None else None
        self.wants_served = self._tuning is not None

    def order(self, num_pages: int) -> ScoredOrder:
        return ScoredOrder(self, least_batch=1, share=_BATCH_SHARE)

    def fill(self, node: Node, now: float) -> Sequence[float]:
        size = max(1, freed_bytes(node, self._costs))
        efficiency = saved_flops(node, self._costs) / size
        return node.last_access, efficiency, node.num_children > 1

    def scores(self, columns: Mapping[str, Floats], now: float) -> Floats:
        chosen = self._candidates(columns, now)
        recency = _normalised(columns["last_access"], chosen)
        scores = recency + self.alpha * _normalised(columns["efficiency"], chosen)
        return np.where(chosen, scores, np.inf)

    def _candidates(self, columns: Mapping[str, Floats], now: float) -> Bools:
        is_single: Bools = columns["is_shared"] == 0
        is_idle: Bools = columns["last_access"] < now
        if (is_single & is_idle).any():
            return is_single & is_idle
        return is_single if is_single.any() else ~is_single

    def taken(self, node: Node, score: float, now: float) -> None:
        if self._tuning is not None:
            self._tuning.evicted()

    def served(self, request: Served) -> None:
        assert self._tuning is not None
        found = self._tuning.served(request)
        if found is not None:
            self.alpha = found


def _normalised(values: Floats, chosen: Bools) -> Floats:
    """Values moved and scaled so that the chosen ones lie between 0 and 1."""
    low, high = values[chosen].min(), values[chosen].max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


_BATCH_SHARE = 1 / 256
"""Of all candidates, how many leave at one look. What leaves makes others candidates, and what was
used since should not go by an old look: four at a time of some sixty cost eight points."""
