"""A policy with a stopwatch."""

from __future__ import annotations

from contextlib import contextmanager
from time import thread_time
from typing import TYPE_CHECKING

from agentcache.policy.base import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.policy.base import Arrival, Filed, Order, Served
    from agentcache.tree.node import Node

__all__ = ["TimedPolicy"]


class Stopwatch:
    """Seconds of this thread's CPU that were spent inside."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        begin = thread_time()
        try:
            yield
        finally:
            self.seconds += thread_time() - begin


class TimedPolicy(Policy):
    """Another policy; `watch` counts what it and its order take."""

    def __init__(self, policy: Policy) -> None:
        self.touches_path = policy.touches_path
        self.wants_served = policy.wants_served
        self.wants_boundaries = policy.wants_boundaries
        self.watch = Stopwatch()
        self._policy = policy

    def order(self, num_pages: int) -> Order:
        return _TimedOrder(self._policy.order(num_pages), self.watch)

    def used(self, node: Node, now: float) -> None:
        with self.watch.running():
            self._policy.used(node, now)

    def arrives(self, arrival: Arrival) -> tuple[int, ...]:
        with self.watch.running():
            return self._policy.arrives(arrival)

    def filed(self, filed: Filed) -> None:
        with self.watch.running():
            self._policy.filed(filed)

    def stands(self, node: Node, now: float) -> None:
        with self.watch.running():
            self._policy.stands(node, now)

    def expects(self, node: Node, seconds: float, now: float, session: str | None = None) -> None:
        with self.watch.running():
            self._policy.expects(node, seconds, now, session)

    def over(self, session: str) -> None:
        with self.watch.running():
            self._policy.over(session)

    def served(self, request: Served) -> None:
        with self.watch.running():
            self._policy.served(request)


class _TimedOrder:
    def __init__(self, order: Order, watch: Stopwatch) -> None:
        self._order = order
        self._watch = watch

    def push(self, node: Node, now: float) -> None:
        begin = thread_time()  # called too often for a context
        self._order.push(node, now)
        self._watch.seconds += thread_time() - begin

    def remove(self, node: Node) -> None:
        with self._watch.running():
            self._order.remove(node)

    def pop(self, now: float) -> Node | None:
        with self._watch.running():
            return self._order.pop(now)

    def shelve(self, node: Node, now: float) -> None:
        with self._watch.running():
            self._order.shelve(node, now)
