"""Eviction policies by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.errors import UnknownPolicy
from agentcache.policy.auto import Auto
from agentcache.policy.base import Costs
from agentcache.policy.gdsf import GDSF
from agentcache.policy.marconi import Marconi
from agentcache.policy.recency import LFU, LRU, SLRU, Priority
from agentcache.policy.session_lru import SessionLRU

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.policy.auto import Contest
    from agentcache.policy.base import Policy
    from agentcache.policy.tuning import AlphaTuner

__all__ = ["POLICIES", "make_policy"]

POLICIES: dict[str, Callable[[Costs, AlphaTuner | None], Policy]] = {
    "lru": lambda costs, tuner: LRU(),
    "lfu": lambda costs, tuner: LFU(),
    "slru": lambda costs, tuner: SLRU(),
    "gdsf": lambda costs, tuner: GDSF(costs),
    "priority": lambda costs, tuner: Priority(),
    "session-lru": lambda costs, tuner: SessionLRU(),
    "marconi": lambda costs, tuner: Marconi(costs, tuner=tuner),
    "auto": lambda costs, tuner: Auto(costs),
}
"""What makes each policy."""


def make_policy(
    name: str,
    costs: Costs | None = None,
    tuner: AlphaTuner | None = None,
    contest: Contest | None = None,
) -> Policy:
    """A policy by its name, for one cache; "marconi:2" is marconi with alpha = 2.

    costs: of the model whose states are cached; policies that weigh work against memory need them.
    tuner: finds marconi's alpha, which stays 0 without one. contest: which of its candidates auto
    should follow; without one it follows the first. Raises UnknownPolicy.
    """
    kind, _, factor = name.partition(":")
    costs = costs or Costs()
    alpha = _number(factor)
    if kind == "marconi" and alpha is not None:
        return Marconi(costs, alpha)
    if name == "auto":
        return Auto(costs, contest)
    if name not in POLICIES:
        raise UnknownPolicy(name, list(POLICIES))
    return POLICIES[name](costs, tuner)


def _number(text: str) -> float | None:
    """A finite number of at least 0, if the text is one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
