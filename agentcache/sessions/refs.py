"""Session references: marks from live tips to nodes. They reorder eviction and never pin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.tree.node import Cursor, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["References", "SessionRef"]


@dataclass(slots=True)
class SessionRef:
    """One tip's mark: its frontier, the shared boundaries above it, and what else its turn filed.

    Held until `leave`, once.
    """

    frontier: Cursor
    filed: tuple[Cursor, ...]
    shared: tuple[Cursor, ...] = ()
    held: bool = True


class References:
    """Counts, per frontier and shared boundary, the live tips that need it. Engine thread only.

    `reorder` is told of every node whose place in the eviction order may have changed.
    """

    def __init__(self, reorder: Callable[[Node], None]) -> None:
        self._reorder = reorder

    def hold(self, frontier: Node, filed: Iterable[Node] = ()) -> SessionRef:
        """A live tip stands at `frontier`; `filed` are further checkpoints of its turn."""
        shared = _structural_above(frontier)
        for node in (frontier, *shared):
            node.refs += 1
            node.superseded = False
            self._reorder(node)
        return SessionRef(
            Cursor.at(frontier),
            tuple(Cursor.at(node) for node in filed),
            tuple(Cursor.at(node) for node in shared),
        )

    def leave(self, ref: SessionRef) -> None:
        """The tip has moved on, was rewound, or its session is over. Twice is the same as once."""
        if not ref.held:
            return
        ref.held = False
        for cursor in (ref.frontier, *ref.shared):
            if cursor.alive:
                cursor.node.refs -= 1
        for cursor in (ref.frontier, *ref.shared, *ref.filed):
            if cursor.alive:
                self._supersede(cursor.node)

    def leave_all(self, refs: Iterable[SessionRef]) -> None:
        """`leave` each of them."""
        for ref in refs:
            self.leave(ref)

    def _supersede(self, node: Node) -> None:
        """Mark a checkpoint as worth little, unless others can still want it."""
        if node.refs == 0 and not node.structural and len(node.children) <= 1:
            node.superseded = True
        self._reorder(node)


def _structural_above(frontier: Node) -> list[Node]:
    """Shared boundaries on the way to a frontier: where a tip that is lost goes back to."""
    out: list[Node] = []
    node = frontier.parent
    while node is not None:
        if node.structural:
            out.append(node)
        node = node.parent
    return out
