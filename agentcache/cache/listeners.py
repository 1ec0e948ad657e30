"""What listeners to events hear of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.events import Event

if TYPE_CHECKING:
    from agentcache.cache.condemned import Hidden
    from agentcache.events import EventName, Events
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import RadixTree, Split

__all__ = ["Listeners"]


class Listeners:
    """Told of changes at nodes, but for those that are hidden. O(1) where nobody listens."""

    def __init__(self, tree: RadixTree, events: Events, hidden: Hidden) -> None:
        self._tree = tree
        self._events = events
        self._hidden = hidden

    def _hear_of(self, node: Node) -> bool:
        return self._events.active and not self._hidden.holds(node)

    def note(
        self, name: EventName, node: Node, kind: str | None = None, session: str | None = None
    ) -> None:
        """Something happened to a node's data of a kind, or to the node."""
        if not self._hear_of(node):
            return
        data = None if kind is None else node.data.get(kind)
        self._events.emit(
            Event(
                name,
                key=node.id,
                boundary=node.end,
                start=node.start if data is None else data.start,
                kind=kind,
                session=session,
                tier=1 if data is None else data.tier,
            )
        )

    def insert(self, node: Node, session: str | None) -> None:
        """A node's tokens became known."""
        if not self._hear_of(node):
            return
        parent = node.parent
        assert parent is not None
        namespace = self._tree.namespace(parent) if parent.is_root else None
        self._events.emit(
            Event(
                "insert",
                key=node.id,
                parent=parent.id,
                start=node.start,
                boundary=node.end,
                tokens=tuple(node.tokens.tolist()),
                namespace=None if namespace is None else namespace.hex(),
                salt=None if node.salt is None else node.salt.hex(),
                session=session,
            )
        )

    def split(self, split: Split) -> None:
        """An edge was cut, with the data of both parts in place."""
        upper, lower = split.upper, split.lower
        if not self._hear_of(lower):
            return
        self._events.emit(Event("split", key=lower.id, parent=upper.id, boundary=upper.end))
        for kind in upper.data:
            self.note("file", upper, kind)
