"""Session-aware recency: what live sessions need leaves after what they have moved past."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.policy.coverage import is_checkpoint, spacing
from agentcache.policy.ranked import RankedPolicy

if TYPE_CHECKING:
    from agentcache.policy.base import Heads, Rank
    from agentcache.tree.node import Node

__all__ = ["SessionLRU"]

_SUPERSEDED, _ORDINARY, _IDLE, _ACTIVE = range(4)

_OVERDUE = 3
"""A session that has been away for so many times its usual gap is no longer expected."""


class SessionLRU(RankedPolicy):
    """Session-aware order, in four queues:

    1. what its own trajectory has moved past or left;
    2. ordinary entries, that no live session stands on: least recently used first;
    3. tips of sessions of which nobody knows when they will be back: least recently used first;
    4. tips of sessions that take turns: whoever is expected back last leaves first, for where
       sessions take turns in a round, the one used longest ago comes next. Shared boundaries above
       such tips leave after those, least recently used first.

    Within queues 2 to 4 the lowest priority leaves first; what is equal in all this leaves by the
    number of references, fewest first.

    A reference reorders and never pins. It counts once, however many live sessions share it. It
    expires when its session has been idle for ten minutes, or for twice the time that
    `idle(expect=...)` announced; what it marked is an ordinary entry from then on. Ordinary entries
    have a share of the memory: while they hold less than `ordinary_share` of it, a reference that
    was used longer ago than all of them leaves before them.

    Superseded checkpoints of a path leave so that the gaps between the rest stay balanced (see
    `policy.coverage`); ends that nobody stands on any more before all of them.
    """

    num_queues = 4

    def __init__(self, ordinary_share: float = 1 / 8) -> None:
        self.ordinary_share = ordinary_share

    def rank(self, node: Node, now: float) -> Rank:
        if node.refs > 0:
            expires, due = node.expires, node.due
            if expires is not None and expires <= now:
                return _ORDINARY, (node.priority, node.last_access, node.refs), None
            if due is None or now >= (overdue := _overdue(node, due)):
                return _IDLE, (node.priority, node.last_access, node.refs), expires
            wakes = overdue if expires is None or overdue < expires else expires
            at = node.last_access if node.structural else -due
            return _ACTIVE, (node.priority, at, node.refs), wakes
        if node.superseded:
            if node.is_leaf or not is_checkpoint(node):  # of the latter nothing can be taken
                return _SUPERSEDED, -1.0, None
            return _SUPERSEDED, spacing(node), None
        return _ORDINARY, (node.priority, node.last_access, 0), None

    def choose(self, heads: Heads) -> int:
        if heads.first(_SUPERSEDED) is not None:
            return _SUPERSEDED
        ordinary = heads.first(_ORDINARY)
        if ordinary is not None:
            few = heads.weights[_ORDINARY] < self.ordinary_share * heads.num_pages
            if not few:
                return _ORDINARY
        referenced = _ACTIVE if heads.first(_IDLE) is None else _IDLE
        held = heads.first(referenced)
        if ordinary is None or (held is not None and held.last_access < ordinary.last_access):
            return referenced
        return _ORDINARY


def _overdue(node: Node, due: float) -> float:
    """When a session that has not come back at `due` is no longer expected."""
    return node.last_access + _OVERDUE * (due - node.last_access)
