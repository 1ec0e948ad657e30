"""HybridCache: acquire, reserve, commit, release. It carries out what the tree decides.

Free of torch: it works on a `Pools` protocol, so the runtime and a simulation run the same code.

Who holds which pages of a running request, for a prompt of n tokens with boundary c:

    positions     held by                                  given back
    [0, c)        nodes of the tree, kept by the lock      when the lease is released
    page of c     the lease too, if c is inside a page:    with the lease
                  claimed in place, or a private copy
    [c, ...)      the lease                                with the lease
    [c, k)        after commit(k) the new nodes as well    when the nodes are evicted
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from agentcache.errors import LeaseError
from agentcache.policy.admission import plan_checkpoints
from agentcache.policy.eviction import EvictionOrder, Key
from agentcache.pools.base import PageTable, Pools
from agentcache.sessions.refs import References, SessionRef
from agentcache.tree.node import Cursor, Node
from agentcache.tree.radix_tree import Freed, Match, RadixTree
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from agentcache.clock import Clock
    from agentcache.metrics import Metrics

__all__ = ["Cursor", "HybridCache", "Lease", "Match", "OutOfPages", "SessionRef"]


class OutOfPages(Exception):
    """Not enough pages even with everything idle evicted. For the scheduler, never for users."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} pages short")
        self.missing = missing


@dataclass(slots=True, eq=False)
class Lease:
    """What one running request holds, from acquire to its single release.

    match, boundary: what was known, and the tokens reused. plan: lengths at which a checkpoint is
    to be committed. row: the private state. table: pages of the whole sequence. locked: the node
    reached or last committed. own: pages the lease holds. filed: nodes where it committed a
    checkpoint.
    """

    match: Match
    boundary: int
    plan: tuple[int, ...]
    row: int
    table: PageTable
    locked: Node
    structural: frozenset[int]
    own: list[IntArray] = field(default_factory=list)
    filed: list[Node] = field(default_factory=list)
    released: bool = False

    @property
    def committed_len(self) -> int:
        """How many tokens the tree holds of this request."""
        return self.locked.end


class HybridCache:
    """One radix tree, one arena of pages, one byte budget.

    Everything here runs on the engine thread. Each door may evict idle entries to make room and
    raises OutOfPages, having changed nothing that the caller holds, if that is not enough.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: Pools,
        key: Key,
        clock: Clock,
        metrics: Metrics,
        min_gain: int = 1,
    ) -> None:
        self.tree = tree
        self.pools = pools
        self.metrics = metrics
        self._clock = clock
        self._min_gain = min_gain
        self._order = EvictionOrder(key)
        self.refs = References(self._order.push)
        self.leases: set[Lease] = set()
        self.num_checkpoints = 0
        self._peak_pages = dict.fromkeys(Kind, 0)
        self._peak_total = 0

    def acquire(
        self,
        namespace: bytes,
        tokens: IntArray,
        *,
        limit: int | None = None,
        structural: Iterable[int] = (),
        passing: Iterable[int] = (),
        cursor: Cursor | None = None,
        known_len: int = 0,
    ) -> Lease:
        """Find the longest reusable boundary of `tokens`, lock it and copy its state privately.

        limit: longest boundary allowed; by default all but the last token, since at least one has
            to be computed.
        structural: lengths worth a checkpoint that others may share. passing: lengths worth one
            to this trajectory alone, until it has moved on.
        cursor, known_len: a place whose path is known to equal `tokens[:known_len]`; the walk
            starts there, or at its deepest living ancestor.

        Raises OutOfPages, also where no row is free.
        """
        limit = len(tokens) - 1 if limit is None else limit
        match = self.tree.match(self._start(namespace, cursor, known_len), tokens, limit)
        structural = frozenset(structural)
        wanted = structural.union(passing)
        node = match.node
        row = self.pools.rows.alloc()
        if row is None:
            raise OutOfPages(0)
        self.tree.lock(node)
        try:
            self._load(node, row)  # before anything is evicted: a lock does not keep the checkpoint
            self._touch(node)
            table, own = self._table(node)
        except BaseException:
            self._unlock(node)
            self.pools.rows.free(row)
            raise
        plan: tuple[int, ...] = ()
        if self._has_state:
            plan = plan_checkpoints(match, wanted, len(tokens), self._min_gain)
        lease = Lease(match, match.boundary, plan, row, table, node, structural)
        self._own(lease, own)
        self.leases.add(lease)
        return lease

    def _start(self, namespace: bytes, cursor: Cursor | None, known_len: int) -> Node:
        if cursor is None:
            return self.tree.root(namespace)
        node = cursor.living()
        while node.end > known_len:
            assert node.parent is not None
            node = node.parent
        return self.tree.root(namespace) if node.is_root else node

    @property
    def _has_kv(self) -> bool:
        return self.tree.has(Kind.FULL)

    @property
    def _has_state(self) -> bool:
        return self.tree.has(Kind.STATE)

    def _table(self, node: Node) -> tuple[PageTable, IntArray]:
        """The page table up to `node.end`, ready to be written from there on.

        If the boundary lies inside a page, the rest of that page is claimed where nobody has
        written it, else the page is copied. Returns the table and the page the request now owns,
        if any.
        """
        size = self.pools.pages.page_size
        table = PageTable(size, self._path_pages(node))
        offset = node.end % size
        if len(table) == 0 or offset == 0:
            return table, _NO_PAGES
        tail = table.last
        if self.pools.pages.claim(tail, offset):
            return table, np.array([tail], dtype=np.int32)
        copy = self._alloc(1)
        self._or_free(copy, lambda: self.pools.copy_tail(tail, int(copy[0]), offset))
        table.replace_last(int(copy[0]))
        return table, copy

    def _path_pages(self, node: Node) -> IntArray:
        size = self.pools.pages.page_size
        parts: list[IntArray] = []
        stop = -(-node.end // size)
        at: Node | None = node
        while at is not None and not at.is_root:
            residency = at.data.get(Kind.FULL)
            first = at.start // size
            if residency is not None and first < stop:
                # A page shared with a deeper node was taken there: the deeper one is right.
                parts.append(residency.slots[: stop - first])
                stop = first
            at = at.parent
        parts.reverse()
        return np.concatenate(parts) if parts else _NO_PAGES

    def _load(self, node: Node, row: int) -> None:
        if not self._has_state:
            return
        if node.is_root:
            self.pools.clear_state(row)
            return
        self.pools.load_state(node.data[Kind.STATE].slots, row)
        self.metrics.add("reused", "state")

    def _touch(self, node: Node) -> None:
        if node.is_root:
            return
        node.last_access = self._clock.now()
        node.superseded = False
        self._order.push(node)

    def reserve(self, lease: Lease, length: int) -> None:
        """Make room for the lease's sequence up to `length` tokens. Raises OutOfPages."""
        self._check(lease)
        if not self._has_kv:
            return
        missing = -(-length // self.pools.pages.page_size) - len(lease.table)
        if missing > 0:
            pages = self._alloc(missing, lease.table.last)
            lease.table.extend(pages)
            self._own(lease, pages)

    def _own(self, lease: Lease, pages: IntArray) -> None:
        if len(pages):
            lease.own.append(pages)
            self._note_peak()

    def _alloc(self, count: int, after: int = -1) -> IntArray:
        self._make_room(count)
        pages = self.pools.pages.alloc(count, after)
        assert pages is not None
        return pages

    def _make_room(self, count: int) -> None:
        """Evict idle entries until `count` pages are free; none for what can never fit."""
        if count > self.pools.pages.num_pages:
            raise OutOfPages(count - self.pools.pages.num_pages)
        while self.pools.pages.num_free < count:
            if not self.evict_one():
                raise OutOfPages(count - self.pools.pages.num_free)

    def commit(self, lease: Lease, tokens: IntArray, length: int, row: int) -> bool:
        """File `tokens[:length]` with the state in `row`, which has absorbed exactly those.

        The KV of those positions has been computed. False where there was no room for the
        checkpoint even with everything idle evicted; the lease goes on, unfiled.
        """
        self._check(lease)
        if length <= lease.committed_len:
            return length == lease.committed_len and self.tree.is_boundary(lease.locked)
        inserted = self.tree.insert(lease.locked, tokens, length)
        for _, pages in inserted.shared:
            self.pools.pages.incref(pages)
        for created in inserted.created:
            self._file_kv(created, lease.table)
        node = inserted.node
        self.tree.lock(node)
        self._unlock(lease.locked)
        lease.locked = node
        if not self._file_state(node, row):
            return False
        node.structural = node.structural or length in lease.structural
        lease.filed.append(node)
        self._touch(node)
        return True

    def _file_kv(self, node: Node, table: PageTable) -> None:
        if self._has_kv:
            pages = table.slice(node.start, node.end)
            self.pools.pages.incref(pages)
            self.tree.commit(node, Kind.FULL, pages)
            self.metrics.add("filed", "full", node.end - node.start)

    def _file_state(self, node: Node, row: int) -> bool:
        if not self._has_state or Kind.STATE in node.data:
            return True
        try:
            self._make_room(self.pools.state_pages)
        except OutOfPages:
            self.metrics.add("unfiled", "state")
            return False
        pages = self.pools.pages.alloc_scattered(self.pools.state_pages)
        assert pages is not None
        self._or_free(pages, lambda: self.pools.save_state(row, pages))
        self.tree.commit(node, Kind.STATE, pages)
        self.num_checkpoints += 1
        self.metrics.add("filed", "state")
        self._note_peak()
        return True

    def release(self, lease: Lease) -> None:
        """Give back all that the lease holds; what it committed stays. Twice is a LeaseError."""
        self._check(lease)
        lease.released = True
        self.leases.remove(lease)
        self._give_up_tail(lease)
        self._unlock(lease.locked)
        for pages in lease.own:
            self._decref(pages)
        self.pools.rows.free(lease.row)

    def suspend(self, lease: Lease, tokens: IntArray, length: int) -> bool:
        """Publish the frontier and release, so that an equal request can go on from it later."""
        kept = self.commit(lease, tokens, length, lease.row)
        self.release(lease)
        return kept

    def _give_up_tail(self, lease: Lease) -> None:
        """Let the next turn go on inside the page where this one's filed tokens end."""
        size = self.pools.pages.page_size
        end = lease.committed_len
        if self._has_kv and end % size:
            page = int(lease.table.slice(end - 1, end)[0])
            self.pools.pages.disclaim(page, end % size)

    def _unlock(self, node: Node) -> None:
        self.tree.unlock(node)
        if self.tree.can_remove(node) and not self.tree.is_boundary(node):
            self._apply(self.tree.remove_leaf(node, self._clock.now()))
        else:
            self._order.push(node)

    def _check(self, lease: Lease) -> None:
        if lease.released:
            raise LeaseError("the lease was released; acquire a new one")

    def evict_one(self) -> bool:
        """Take the entry that should leave first; False if nothing idle is left."""
        while (node := self._order.pop()) is not None:
            if self.tree.can_remove(node):
                freed = self.tree.remove_leaf(node, self._clock.now())
                for kind, _ in freed.slots:
                    self.metrics.add("evictions", kind.value)
                self._apply(freed)
                return True
            slots = self.tree.drop(node, Kind.STATE, self._clock.now()) if self._has_state else None
            if slots is not None:
                self._free(Kind.STATE, slots)
                self.metrics.add("evictions", "state")
                return True
        return False

    def clear(self) -> int:
        """Evict everything idle; the bytes freed."""
        before = self.pools.pages.num_free
        while self.evict_one():
            pass
        return (self.pools.pages.num_free - before) * self.pools.page_bytes

    def _apply(self, freed: Freed) -> None:
        for kind, slots in freed.slots:
            self._free(kind, slots)
        if freed.survivor is not None:
            self._order.push(freed.survivor)

    def _free(self, kind: Kind, slots: IntArray) -> None:
        if kind is Kind.STATE:
            self.num_checkpoints -= 1
        self._decref(slots)

    def _or_free(self, pages: IntArray, copy: Callable[[], None]) -> None:
        """Fill fresh pages; they are given back if that fails."""
        try:
            copy()
        except BaseException:
            self._decref(pages)
            raise

    def _decref(self, pages: IntArray) -> None:
        gone = self.pools.pages.decref(pages)
        if len(gone):
            self.pools.on_free(gone)

    def used_pages(self) -> dict[Kind, int]:
        """Pages held now, by kind; KV includes what running requests hold."""
        state = self.num_checkpoints * self.pools.state_pages
        return {Kind.FULL: self.pools.pages.num_used - state, Kind.STATE: state}

    def peak_pages(self) -> tuple[dict[Kind, int], int]:
        """The most pages ever held at once: of each kind, and of all together."""
        return dict(self._peak_pages), self._peak_total

    def _note_peak(self) -> None:
        for kind, num in self.used_pages().items():
            self._peak_pages[kind] = max(self._peak_pages[kind], num)
        self._peak_total = max(self._peak_total, self.pools.pages.num_used)


_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)
