"""What the policy hears of requests and sessions, and the facts at nodes that it ranks them by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.policy.base import Arrival, Filed, Origin, Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from agentcache.cache.lease import Lease
    from agentcache.clock import Clock
    from agentcache.policy.base import Policy
    from agentcache.sessions.refs import SessionRef
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Split
    from agentcache.types import IntArray

__all__ = ["News"]


class News:
    """Tells a policy what it wants to know of, when it happens.

    `reorder` is told of every node whose place in the eviction order may have changed.
    """

    def __init__(self, policy: Policy, clock: Clock, reorder: Callable[[Node], None]) -> None:
        self._policy = policy
        self._clock = clock
        self._reorder = reorder

    def arrives(self, lease: Lease, tokens: IntArray, start: Node) -> Iterable[int]:
        """A request was matched from a node on; the lengths for which the policy asks."""
        if not self._policy.wants_boundaries:
            return ()
        arrival = Arrival(
            namespace=lease.namespace,
            tokens=tokens,
            salts=lease.salts,
            start=start,
            boundary_node=lease.match.node,
            boundary=lease.boundary,
            notes=lease.notes,
            at=self._clock.now(),
        )
        return self._policy.arrives(arrival)

    def used(self, lease: Lease) -> None:
        """A request goes on from its boundary; and through all of its known path, where the policy
        asks for that."""
        match, now = lease.match, self._clock.now()
        match.node.superseded = False
        node = match.known_node if self._policy.touches_path else match.node
        while not node.is_root:
            node.hits += 1
            node.last_access = now
            if lease.priority > node.priority:
                node.priority = lease.priority
            self._policy.used(node, now)
            self._reorder(node)
            if not self._policy.touches_path:
                break
            assert node.parent is not None
            node = node.parent

    def split(self, split: Split) -> None:
        """An edge was cut; its parts were used alike so far."""
        upper, lower = split.upper, split.lower
        upper.hits, upper.priority = lower.hits, lower.priority
        self._reorder(lower)  # less hangs on it now

    def extends(self, lease: Lease, tokens: IntArray) -> None:
        """A request is about to file so many of its tokens."""
        if self._policy.wants_served:
            lease.tokens = tokens

    def filed(self, lease: Lease, node: Node, tokens: IntArray) -> None:
        """A request filed a boundary, the end of a node."""
        node.structural = node.structural or node.end in lease.structural
        now = self._clock.now()
        if self._policy.wants_boundaries:
            origin = _origin(lease, node.end)
            self._policy.filed(
                Filed(node, lease.namespace, tokens, lease.salts, origin, lease.notes, now)
            )
        node.priority = max(node.priority, lease.priority)
        node.last_access = now
        node.superseded = False
        self._reorder(node)

    def served(self, lease: Lease) -> None:
        """A request is over, and was released."""
        if lease.tokens is None:
            return
        tokens, lease.tokens = lease.tokens, None
        self._policy.served(
            Served(
                namespace=lease.namespace,
                tokens=tokens,
                prompt_len=lease.prompt_len,
                cached_len=min(lease.boundary, lease.prompt_len),
                declared=tuple(sorted(lease.structural)),
                at=self._clock.now(),
                passing=tuple(sorted(lease.passing)),
                salts=lease.salts,
                session=lease.session,
            )
        )

    def stands(self, node: Node, now: float) -> None:
        """A live session stands on a node."""
        self._policy.stands(node, now)

    def expects(self, ref: SessionRef, seconds: float, now: float) -> None:
        """The session of a mark is expected back in about that many seconds."""
        if ref.held and ref.frontier.alive:
            self._policy.expects(ref.frontier.node, seconds, now, ref.session)

    def over(self, session: str) -> None:
        """A session is over."""
        self._policy.over(session)


def _origin(lease: Lease, length: int) -> Origin:
    """Why there is a boundary."""
    if length in lease.structural:
        return Origin.DECLARED
    if length not in lease.plan:
        return Origin.END
    return Origin.PASSING if length in lease.passing else Origin.BRANCH
