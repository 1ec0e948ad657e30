"""What was asked before, remembered after its data has left: a tree of tokens, bounded, no data.

It answers two questions that the cache itself cannot once it has evicted: how much of a prompt was
ever seen, which is where a checkpoint would have been of use; and how long it took until something
was used again, whether it was still there or not.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.tree.radix_tree import RadixTree
from agentcache.types import Vote

if TYPE_CHECKING:
    from agentcache.policy.base import Origin
    from agentcache.tree.node import Node, Residency
    from agentcache.tree.radix_tree import Salts
    from agentcache.types import IntArray

__all__ = ["Boundary", "History"]


@dataclass(slots=True, eq=False)
class Boundary:
    """What is remembered of one boundary.

    node: its place among the remembered tokens. used_at: when it was last used, or made. uses: how
    often since. gaps, gap_s: number and length of the times between uses, older ones fading. turn:
    how many turns of its line of descent precede it. live: the node of the cache that it was filed
    as last. row: a number that no other boundary has while this one is remembered. kind, group:
    what it is counted as by whoever learns from it; -1 as long as nobody does.
    """

    node: Node
    origin: Origin
    used_at: float
    turn: int
    row: int
    uses: int = 0
    gaps: float = 0.0
    gap_s: float = 0.0
    live: Node | None = None
    kind: int = -1
    group: int = -1


class _Tokens:
    """A rule that finds every prefix usable: nothing but tokens is kept."""

    kind = "tokens"

    def vote(self, node: Node, at: int) -> Vote:
        return Vote.RESIDENT

    def on_split(self, upper: Node, lower: Node) -> IntArray:
        return upper.tokens[:0]

    def commit(self, node: Node, slots: IntArray) -> None:
        return

    def evict(self, node: Node) -> Residency | None:
        return None


class History:
    """Boundaries of sequences, by namespace; the least recently used are forgotten.

    max_tokens, max_boundaries: most of each that are kept; a token takes 4 bytes.

    >>> import numpy as np
    >>> from agentcache.policy.base import Origin
    >>> history = History()
    >>> first = np.array([1, 2, 3, 4], np.int32)
    >>> end = history.remember(b"", first, 4, Origin.END, at=0.0)
    >>> known, last = history.look_up(b"", np.array([1, 2, 3, 4, 9], np.int32), limit=4)
    >>> known, last is end
    (4, True)
    """

    def __init__(self, max_tokens: int = 2**22, max_boundaries: int = 2**15) -> None:
        self._tree = RadixTree([_Tokens()])
        self._max_tokens = max_tokens
        self._max_boundaries = max_boundaries
        self._at: OrderedDict[Node, Boundary] = OrderedDict()  # by the time of the last use
        self._num_tokens = 0
        self._next_row = 0
        self._free_rows: list[int] = []
        self._forgotten: list[Boundary] = []

    def __len__(self) -> int:
        return len(self._at)

    @property
    def num_tokens(self) -> int:
        """Distinct tokens that are kept."""
        return self._num_tokens

    def look_up(
        self,
        namespace: bytes,
        tokens: IntArray,
        limit: int,
        salts: Salts = (),
        start: Boundary | None = None,
    ) -> tuple[int, Boundary | None]:
        """How many of the tokens were seen before, and the deepest boundary among them that is not
        beyond `limit`.

        start: a boundary whose path is known to be the tokens' own; O(tokens after it).
        """
        node: Node | None = self._begin(namespace, start)
        assert node is not None
        known_len = node.end
        if _goes_on(node, tokens, salts):
            match = self._tree.match(node, tokens, len(tokens), salts)
            node, known_len = match.known_node, match.known_len
        most = min(limit, known_len)
        while node is not None and not node.is_root:
            if node.end <= most and (found := self._at.get(node)):
                return known_len, found
            node = node.parent
        return known_len, None

    def remember(
        self,
        namespace: bytes,
        tokens: IntArray,
        length: int,
        origin: Origin,
        at: float,
        *,
        salts: Salts = (),
        start: Boundary | None = None,
        turn: int = 0,
    ) -> Boundary:
        """The boundary after so many tokens, made now if it is new; an old one keeps its origin.

        start: a boundary whose path is known to be the tokens' own, however long; O(tokens between
        it and the new one).
        """
        begin = self._begin(namespace, start)
        while begin.end > length:
            assert begin.parent is not None
            begin = begin.parent
        inserted = self._tree.insert(begin, tokens, length, salts)
        self._num_tokens += sum(node.end - node.start for node in inserted.created)
        node = inserted.node
        boundary = self._at.get(node)
        if boundary is None:
            boundary = self._at[node] = Boundary(node, origin, at, turn, self._take_row())
            self._forget()
        return boundary

    def refresh(self, boundary: Boundary) -> None:
        """The boundary was used just now: it is forgotten last."""
        if boundary.node in self._at:
            self._at.move_to_end(boundary.node)

    def forgotten(self) -> list[Boundary]:
        """What has been forgotten since this was asked last; the rows are free after that."""
        gone, self._forgotten = self._forgotten, []
        self._free_rows += [boundary.row for boundary in gone]
        return gone

    def _begin(self, namespace: bytes, start: Boundary | None) -> Node:
        if start is None or start.node.generation:
            return self._tree.root(namespace)
        return start.node

    def _take_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        self._next_row += 1
        return self._next_row - 1

    def _forget(self) -> None:
        """Keep to the bounds. A boundary with others below is older than they only by name."""
        tries = len(self._at)
        while tries and (
            self._num_tokens > self._max_tokens or len(self._at) > self._max_boundaries
        ):
            tries -= 1
            node, boundary = next(iter(self._at.items()))
            if not self._tree.can_remove(node):
                self._at.move_to_end(node)
                continue
            del self._at[node]
            self._forgotten.append(boundary)
            self._remove(node)

    def _remove(self, leaf: Node) -> None:
        """Take a leaf away, with what above it is no boundary of anything."""
        node: Node | None = leaf
        while node is not None and self._tree.can_remove(node) and node not in self._at:
            above = node.parent
            self._num_tokens -= len(node.tokens)
            self._tree.remove_leaf(node, 0.0)
            node = above


def _goes_on(node: Node, tokens: IntArray, salts: Salts) -> bool:
    """Whether more of the tokens may be known; a turn that goes on from a tip needs no walk."""
    if node.end >= len(tokens):
        return False
    return bool(salts) or node.child(int(tokens[node.end])) is not None
