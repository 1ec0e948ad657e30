"""The pages that running requests read and write.

Who holds which of them, for a prompt of n tokens with boundary c:

    positions       held by                                 given back
    KV [0, c)       nodes of the tree, kept by the lock     when the lease is released
    page of c       the lease too, if c is inside a page:   with the lease
                    claimed in place, or a private copy
    KV [c, ...)     the lease                               with the lease
    KV [c, k)       after commit(k) the new nodes as well   when the nodes are evicted
    window of c     the boundary's node, and the lease      when the lease has moved past it
    window of k     after commit(k) the node of k as well   when that node is evicted
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentcache.pools.table import PageTable
from agentcache.tree.node import SLOT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.cache.forms import Forms
    from agentcache.cache.lease import Lease
    from agentcache.cache.memory import Memory
    from agentcache.sessions.refs import SessionRef
    from agentcache.tree.node import Node
    from agentcache.types import IntArray

__all__ = ["NO_TABLE", "Tables", "path_pages"]

_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)

NO_TABLE = PageTable(1, _NO_PAGES)
"""Of a lease that has no table yet, or none at all: no KV lies along the edges."""


@dataclass(frozen=True, slots=True)
class _Memo:
    """A tip's page table, and the memory's count of moved data when it was right."""

    table: PageTable
    moves: int


class Tables:
    """Page tables and windows of leases: taken, grown, handed on and given back.

    What a lease's `table`, `windows` and `own` say is changed here alone.
    """

    def __init__(self, memory: Memory, forms: Forms) -> None:
        self._memory = memory
        self._pools = memory.pools
        self._edge = forms.edge
        self._windows = forms.windows

    def take(self, lease: Lease, start: Node, after: SessionRef | None) -> None:
        """The pages up to the boundary, ready to be written from there on. Raises OutOfPages.

        Whatever is raised, the lease is to be given back then.
        """
        self._take_windows(lease, lease.match.node)  # first, so that no eviction takes it away
        self._take_table(lease, start, after)
        claimed: list[tuple[int, int]] = []
        try:
            for kind, table in self._of(lease):
                self._enter(lease, kind, table, claimed)
        except BaseException:
            for page, offset in claimed:  # the rest of those pages is for the next to claim
                self._pools.pages.disclaim(page, offset)
            raise

    def grow(self, lease: Lease, length: int) -> None:
        """Room up to `length` tokens, once what no window needs is given back. Raises OutOfPages.

        All tokens that there was room for must have been computed.
        """
        self._trim(lease)
        tables = dict(self._of(lease))
        missing = {
            kind: -(-length // table.page_size) - len(table) for kind, table in tables.items()
        }
        self._memory.make_room(sum(num for num in missing.values() if num > 0))
        for kind, num in missing.items():
            if num > 0:
                pages = self._memory.alloc(kind, num, tables[kind].last)
                tables[kind].extend(pages)
                if tables[kind] is lease.table:
                    lease.own.append(pages)
        lease.reserved_len = max(lease.reserved_len, length)

    def give_up_tails(self, lease: Lease) -> None:
        """Let the next turn go on inside the page where this one's filed tokens end."""
        end = lease.committed_len
        for _, table in self._of(lease):
            if end % table.page_size and end // table.page_size >= table.first:
                self._pools.pages.disclaim(table.page_of(end - 1), end % table.page_size)
        if self._edge is not None:  # what was reserved beyond is no part of the trajectory
            lease.table.truncate(-(-end // self._edge.page_size))

    def give_back(self, lease: Lease) -> None:
        """Give back all pages that the lease holds."""
        for pages in lease.own:
            self._memory.give_back(self._edge.kind if self._edge else "", pages)
        for kind, table in lease.windows.items():
            self._memory.give_back(kind, table.pages)

    def remember(self, ref: SessionRef, lease: Lease) -> None:
        """Keep with a new mark what makes it cheap to take the pages of its path again."""
        if self._edge is not None:
            end = min(ref.frontier.node.end, lease.published_len)
            table = lease.table.prefix(end // self._edge.page_size)
            ref.memo = _Memo(table, self._memory.moves)

    def remember_again(self, ref: SessionRef, other: SessionRef) -> None:
        """The same for a mark on the path of another one, by what is kept with that."""
        if self._edge is not None and isinstance(other.memo, _Memo):
            table = other.memo.table.prefix(ref.frontier.node.end // self._edge.page_size)
            ref.memo = _Memo(table, other.memo.moves)

    def _of(self, lease: Lease) -> Iterator[tuple[str, PageTable]]:
        """Kind and pages of each kind of KV that the request reads and writes."""
        if self._edge is not None:
            yield self._edge.kind, lease.table
        yield from lease.windows.items()

    def _take_windows(self, lease: Lease, node: Node) -> None:
        """Hold what the boundary's windows need."""
        at = lease.boundary
        for rule in self._windows:
            first, pages = rule.reach(at) // rule.page_size, _NO_PAGES
            if at:
                residency = node.data[rule.kind]
                skipped = first - residency.start // rule.page_size
                pages = rule.pages_for(residency, at)[skipped:]
                self._pools.pages.incref(pages)
            lease.windows[rule.kind] = PageTable(rule.page_size, pages, first)

    def _take_table(self, lease: Lease, start: Node, after: SessionRef | None) -> None:
        """The page table up to the boundary; O(pages beyond what the tip's memo has of it)."""
        if self._edge is None:
            return
        size, kind = self._edge.page_size, self._edge.kind
        memo = after.memo if after is not None else None
        table = PageTable(size, _NO_PAGES)
        stop = -(-lease.boundary // size)
        if isinstance(memo, _Memo) and start.moved <= memo.moves:
            # The page in which `start` ends may be a deeper node's copy of it.
            table = memo.table.prefix(min(start.end, lease.boundary) // size)
        table.extend(path_pages(lease.locked, kind, size, len(table), stop))
        lease.table = table

    def _enter(
        self, lease: Lease, kind: str, table: PageTable, claimed: list[tuple[int, int]]
    ) -> None:
        """Make the page in which the boundary lies ready to be written from there on.

        The rest of that page is claimed where nobody has written it, else the page is copied.
        """
        offset = lease.boundary % table.page_size
        if offset == 0 or not len(table.pages):
            return
        tail = table.last
        is_edge = table is lease.table
        if self._pools.pages.claim(tail, offset):
            claimed.append((tail, offset))
            if is_edge:
                lease.own.append(np.array([tail], dtype=np.int32))
            else:
                self._pools.pages.decref(np.array([tail], dtype=np.int32))  # held already
            return
        copy = self._memory.alloc(kind, 1)
        self._memory.fill(
            kind, copy, lambda: self._pools.copy_tail(kind, tail, int(copy[0]), offset)
        )
        table.replace_last(int(copy[0]))
        if is_edge:
            lease.own.append(copy)
        else:
            self._memory.give_back(kind, np.array([tail], dtype=np.int32))

    def _trim(self, lease: Lease) -> None:
        """Give back the pages of windows that neither the next token nor a planned commit needs."""
        if not self._windows:
            return
        planned = (at for at in lease.plan if at > lease.committed_len)
        keep = min(lease.reserved_len, next(planned, lease.reserved_len))
        for rule in self._windows:
            gone = lease.windows[rule.kind].trim(rule.reach(keep) // rule.page_size)
            self._memory.give_back(rule.kind, gone)


def path_pages(node: Node, kind: str, page_size: int, first: int, stop: int) -> IntArray:
    """Pages [first, stop) of the path to a node, of the kind that lies along the edges."""
    parts: list[bytes] = []
    at = node
    while stop > first:
        above = at.parent
        assert above is not None
        begin = above.end // page_size
        if begin < stop:
            # A page shared with a deeper node was taken there: the deeper one is right.
            low = 0 if begin > first else SLOT_BYTES * (first - begin)
            parts.append(at.data[kind].packed[low : SLOT_BYTES * (stop - begin)])
            stop = begin
        at = above
    parts.reverse()
    return np.frombuffer(b"".join(parts), dtype=np.int32)
