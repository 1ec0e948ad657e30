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
    """One tip's mark: its frontier, and what else its turn filed. Held until `leave`, once."""

    frontier: Cursor
    filed: tuple[Cursor, ...]
    held: bool = True


class References:
    """Counts live tips per node. Used on the engine thread only.

    `reorder` is told of every node whose place in the eviction order may have changed.
    """

    def __init__(self, reorder: Callable[[Node], None]) -> None:
        self._reorder = reorder

    def hold(self, frontier: Node, filed: Iterable[Node] = ()) -> SessionRef:
        """A live tip stands at `frontier`; `filed` are further checkpoints of its turn."""
        frontier.refs += 1
        frontier.superseded = False
        self._reorder(frontier)
        return SessionRef(Cursor.at(frontier), tuple(Cursor.at(n) for n in filed))

    def leave(self, ref: SessionRef) -> None:
        """The tip has moved on, was rewound, or its session is over. Twice is the same as once."""
        if not ref.held:
            return
        ref.held = False
        if ref.frontier.alive:
            ref.frontier.node.refs -= 1
        for cursor in (ref.frontier, *ref.filed):
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
