"""Session references: marks from live tips to nodes. They reorder eviction and never pin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentcache.tree.node import Cursor, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["References", "SessionRef"]

_NEVER = float("inf")


@dataclass(slots=True, eq=False)
class _Anchor:
    """One shared boundary above some tips of one line of descent, and the next one above it.

    Tips that go on from one another, or were forked, hold the same chain; `holders` counts the tips
    and chains that hang on it, so that a turn touches only what it adds. until: no boundary of the
    chain expires earlier.
    """

    at: Cursor
    above: _Anchor | None
    holders: int = 0
    until: float = -1.0


@dataclass(slots=True, eq=False)
class SessionRef:
    """One tip's mark: its frontier, the shared boundaries above it, and what else its turn filed.

    namespace: what its path is kept under, where that is known. session: whose it is. memo: what
    the cache wants back when the trajectory goes on; opaque here. Held until `leave`. at: when it
    was made. gap: seconds between turns of the trajectory so far, the later the more they count;
    None before the second turn.
    """

    frontier: Cursor
    filed: tuple[Cursor, ...]
    at: float = 0.0
    gap: float | None = None
    memo: Any = None
    held: bool = True
    namespace: bytes | None = None
    session: str | None = None
    _anchor: _Anchor | None = field(default=None, repr=False)


class References:
    """Counts, per frontier and shared boundary, the live tips that need it. Engine thread only.

    `reorder` is told of every node whose place in the eviction order may have changed. Moving a
    mark along its trajectory costs O(what the turn added), however long the trajectory is.

    patience_s: seconds without a turn after which a mark stops to count.
    """

    def __init__(self, reorder: Callable[[Node], None], patience_s: float = 600.0) -> None:
        self._reorder = reorder
        self._patience_s = patience_s

    def hold(
        self,
        frontier: Node,
        filed: Iterable[Node] = (),
        *,
        after: SessionRef | None = None,
        now: float = 0.0,
    ) -> SessionRef:
        """A live tip stands at `frontier`; `filed` are further checkpoints of its turn.

        after: the mark that the turn went on from, which may have been left meanwhile.
        """
        gap = None
        if after is not None:
            gap = now - after.at if after.gap is None else (now - after.at + after.gap) / 2
        return self._hold(frontier, filed, after, now, gap)

    def hold_again(self, ref: SessionRef, now: float = 0.0) -> SessionRef:
        """One more tip where a mark is, or at what is left of its path; no turn was taken."""
        return self._hold(ref.frontier.living(), (), ref, now, ref.gap)

    def _hold(
        self,
        frontier: Node,
        filed: Iterable[Node],
        after: SessionRef | None,
        now: float,
        gap: float | None,
    ) -> SessionRef:
        frontier.refs += 1
        frontier.superseded = False
        anchor = self._anchors(frontier, after, now)
        if anchor is not None:
            anchor.holders += 1
        marks = tuple(Cursor.at(node) for node in filed)
        ref = SessionRef(Cursor.at(frontier), marks, at=now, gap=gap, _anchor=anchor)
        self.expect(ref, now, self._patience_s, due=None if gap is None else now + gap)
        return ref

    def expect(self, ref: SessionRef, now: float, seconds: float, due: float | None = None) -> None:
        """The tip's mark counts for that many seconds; its session should be back at `due`.

        Where several tips stand on one node, the longest time and the earliest return hold.
        """
        until = now + seconds
        node = ref.frontier.node
        if ref.held and ref.frontier.alive:
            if node.refs > 1:
                until = max(until, node.expires or until)
                due = min(due or _NEVER, node.due or _NEVER)
                due = None if due == _NEVER else due
            node.expires, node.due = until, due
            self._reorder(node)
        until = now + seconds
        anchor = ref._anchor
        if anchor is not None and anchor.at.alive:
            shared = anchor.at.node  # in use with the tips below it
            shared.last_access = max(shared.last_access, now)
            shared.due = due if due is not None else shared.due
            self._reorder(shared)
        if anchor is None or anchor.until >= until - seconds / 2:
            return  # prolonged not long ago, with all that lies above it
        while anchor is not None:
            anchor.until = until
            at = anchor.at.node
            if anchor.at.alive and (at.expires is None or at.expires < until):
                at.expires = until
                self._reorder(at)
            anchor = anchor.above

    def _anchors(self, frontier: Node, after: SessionRef | None, now: float) -> _Anchor | None:
        """The chain of shared boundaries above a frontier, built on that of `after`."""
        chain, begun = None, None
        if after is not None and after.held:  # its chain has all that lies above its frontier
            chain, begun = after._anchor, after.frontier.living()
        new: list[Node] = []
        chain = _above(chain, frontier)
        node = None if begun is frontier else frontier.parent
        while node is not None and not node.is_root:
            if chain is not None and chain.at.node is node:
                break
            if node.structural:
                new.append(node)
            if node is begun:
                break
            chain = _above(chain, node)
            node = node.parent
        else:  # up to the root, past all of the chain, unless there was nothing to walk
            chain = chain if begun is frontier else None
        for node in reversed(new):
            until = now + self._patience_s
            node.refs += 1
            node.superseded = False
            node.expires = until if node.expires is None else max(node.expires, until)
            self._reorder(node)
            if chain is not None:
                chain.holders += 1
                until = min(until, chain.until)
            chain = _Anchor(Cursor.at(node), chain, until=until)
        return chain

    def leave(self, ref: SessionRef) -> None:
        """The tip has moved on, was rewound, or its session is over. Twice is the same as once."""
        if not ref.held:
            return
        ref.held = False
        ref.memo = None
        self._drop(ref.frontier)
        for cursor in ref.filed:
            if cursor.alive:
                self._supersede(cursor.node)
        anchor = ref._anchor
        ref._anchor = None
        while anchor is not None:
            anchor.holders -= 1
            if anchor.holders:
                return
            self._drop(anchor.at)
            anchor = anchor.above

    def leave_all(self, refs: Iterable[SessionRef]) -> None:
        """`leave` each of them."""
        for ref in refs:
            self.leave(ref)

    def _drop(self, cursor: Cursor) -> None:
        if cursor.alive:
            cursor.node.refs -= 1
            self._supersede(cursor.node)

    def _supersede(self, node: Node) -> None:
        """Mark a checkpoint as worth little, unless others can still want it."""
        if node.refs == 0:
            node.expires = node.due = None
            if not node.structural and node.num_children <= 1:
                node.superseded = True
        self._reorder(node)


def _above(chain: _Anchor | None, node: Node) -> _Anchor | None:
    """The part of a chain that is left above a node."""
    while chain is not None and (not chain.at.alive or chain.at.node.end >= node.end):
        chain = chain.above
    return chain
