"""`auto`: the learned order, as long as no simple one does better on the same traffic.

The requests that are over are replayed on shadow caches, which hold no data, one for each order
that could be followed (see `simulate.shadows`). Whichever has reused clearly more of late is
followed from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from agentcache.policy.base import Policy
from agentcache.policy.learned import Learned
from agentcache.policy.recency import Recency
from agentcache.policy.session_lru import SessionLRU

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.policy.base import Arrival, Costs, Filed, Order, Served
    from agentcache.tree.node import Node

__all__ = ["CANDIDATES", "Auto", "Contest", "candidate"]

CANDIDATES: dict[str, Callable[[Costs], Policy]] = {
    "learned": lambda costs: Learned(costs),
    "session-lru": lambda costs: SessionLRU(),
    "lru": lambda costs: Recency(),
}
"""The orders that `auto` chooses from; the first until something is known."""


def candidate(name: str, costs: Costs) -> Policy:
    """One of the orders that `auto` chooses from, alone."""
    return CANDIDATES[name](costs)


class Contest(Protocol):
    """Which of the candidates does best on what was asked so far."""

    def served(self, request: Served) -> None:
        """A request is over."""
        ...

    def evicted(self) -> None:
        """An entry has left. Until the first has, all candidates keep the same."""
        ...

    def over(self, session: str) -> None:
        """A session is over."""
        ...

    def expects(self, session: str, seconds: float) -> None:
        """A session said that it would be back in about so many seconds."""
        ...

    @property
    def leader(self) -> str:
        """A name of CANDIDATES."""
        ...


class Auto(Policy):
    """Follows the candidate that leads a contest; without one, the learned order.

    Learning goes on whoever is followed.
    """

    wants_boundaries = True

    def __init__(self, costs: Costs, contest: Contest | None = None) -> None:
        self._learned = Learned(costs)
        self._simple = {name: candidate(name, costs) for name in ("session-lru", "lru")}
        self._contest = contest
        self.wants_served = contest is not None
        self.following = next(iter(CANDIDATES))
        self._order: _Switching | None = None
        self._num_pages = 0

    def order(self, num_pages: int) -> Order:
        self._num_pages = num_pages
        evicted = None if self._contest is None else self._contest.evicted
        self._order = _Switching(self._learned.order(num_pages), evicted)
        return self._order

    def arrives(self, arrival: Arrival) -> tuple[int, ...]:
        return self._learned.arrives(arrival)

    def filed(self, filed: Filed) -> None:
        self._learned.filed(filed)

    def stands(self, node: Node, now: float) -> None:
        self._learned.stands(node, now)

    def expects(self, node: Node, seconds: float, now: float, session: str | None = None) -> None:
        self._learned.expects(node, seconds, now)
        if self._contest is not None and session is not None:
            self._contest.expects(session, seconds)

    def over(self, session: str) -> None:
        if self._contest is not None:
            self._contest.over(session)

    def served(self, request: Served) -> None:
        if self._contest is None:
            return
        self._contest.served(request)
        leader = self._contest.leader
        if leader != self.following and self._order is not None:
            self._follow(leader, self._order, request.at)

    def _follow(self, leader: str, order: _Switching, now: float) -> None:
        self.following = leader
        followed = self._simple.get(leader, self._learned)
        order.switch(followed.order(self._num_pages), now)


class _Switching:
    """Another order, which may be replaced: the new one gets all entries."""

    def __init__(self, order: Order, evicted: Callable[[], None] | None) -> None:
        self._order = order
        self._evicted = evicted
        self._nodes: dict[Node, None] = {}
        self._shelved: dict[Node, None] = {}

    def push(self, node: Node, now: float) -> None:
        self._shelved.pop(node, None)
        self._nodes[node] = None
        self._order.push(node, now)

    def remove(self, node: Node) -> None:
        self._nodes.pop(node, None)
        self._shelved.pop(node, None)
        self._order.remove(node)

    def pop(self, now: float) -> Node | None:
        node = self._order.pop(now)
        if node is not None:
            self._nodes.pop(node, None)
            if self._evicted is not None:
                self._evicted()
        return node

    def shelve(self, node: Node, now: float) -> None:
        self._nodes.pop(node, None)
        self._shelved[node] = None
        self._order.shelve(node, now)

    def switch(self, order: Order, now: float) -> None:
        """Follow another order from now on. O(entries)."""
        for node in (*self._nodes, *self._shelved):
            self._order.remove(node)
        self._shelved.clear()
        self._order = order
        for node in list(self._nodes):
            order.push(node, now)
