"""HybridCache: acquire, reserve, commit, release. It carries out what the tree decides.

Free of torch: it works on a `Pools` protocol, so the runtime and a simulation run the same code.

Who holds which pages of a running request, for a prompt of n tokens with boundary c:

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
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from agentcache.cache.accounting import Account, account
from agentcache.cache.condemned import Condemned
from agentcache.cache.lease import ANY_LEN, Lease
from agentcache.cache.memory import Memory, OutOfPages
from agentcache.components.base import SnapshotComponent, WindowComponent
from agentcache.components.full import FullComponent
from agentcache.errors import LeaseError
from agentcache.events import Event, Events
from agentcache.policy.admission import Admission, Structural
from agentcache.policy.base import Arrival, Filed, Origin, Policy, Served
from agentcache.policy.coverage import is_checkpoint, link
from agentcache.pools.table import PageTable
from agentcache.sessions.refs import References, SessionRef
from agentcache.tree.node import SLOT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agentcache.clock import Clock
    from agentcache.metrics import Metrics
    from agentcache.pools.base import Pools
    from agentcache.tiers.base import LowerTier
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Inserted, Match, RadixTree, Salts, Split
    from agentcache.types import IntArray

__all__ = ["HybridCache"]


@dataclass(frozen=True, slots=True)
class _Memo:
    """A tip's page table, and the cache's count of moved data when it was right."""

    table: PageTable
    moves: int


class HybridCache:
    """One radix tree, one arena of pages, one byte budget.

    Everything here runs on the engine thread. Each door may evict idle entries to make room and
    raises OutOfPages, having changed nothing that the caller holds, if that is not enough.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: Pools,
        policy: Policy,
        clock: Clock,
        metrics: Metrics,
        min_gain: int = 1,
        events: Events | None = None,
        lower: LowerTier | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.tree = tree
        self.pools = pools
        self.metrics = metrics
        self.events = events or Events()
        self.memory = Memory(tree, pools, policy, clock, metrics, self.events, lower)
        self.refs = References(self.memory.push)
        self._condemned = Condemned(tree, self.memory)
        self.leases: set[Lease] = set()
        self.policy = policy
        self.admission = admission or Structural()
        self._clock = clock
        self._min_gain = min_gain
        self._edge = _only(tree, FullComponent)
        self._snapshot = _only(tree, SnapshotComponent)
        self._windows = [rule for rule in tree.rules if isinstance(rule, WindowComponent)]

    def acquire(
        self,
        namespace: bytes,
        tokens: IntArray,
        *,
        limit: int | None = None,
        structural: Iterable[int] = (),
        passing: Iterable[int] = (),
        salts: Salts = (),
        after: SessionRef | None = None,
        known_len: int = 0,
        session: str | None = None,
        priority: int = 0,
        packed_limit: int = ANY_LEN,
    ) -> Lease:
        """Find the longest reusable boundary of `tokens`, lock it and copy its state privately.

        limit: longest boundary allowed; by default all but the last token, since at least one has
            to be computed.
        structural: lengths worth a checkpoint that others may share. passing: lengths worth one
            to this trajectory alone, until it has moved on.
        salts: further identity of the sequence from certain positions on.
        after, known_len: the mark of a tip whose path is known to equal `tokens[:known_len]`, and
            the salts as well; the walk starts there, or at its deepest living ancestor.
        session: a name for listeners to events. priority: of the session; policies may heed it.
        packed_limit: longest boundary allowed whose state may have been packed. For a request that
            goes on after a pre-emption that is what it had reused at first: its own states are not
            to be rounded.

        Raises OutOfPages, also where no row is free.
        """
        limit = len(tokens) - 1 if limit is None else limit
        after = _within(namespace, after)
        start = self._start(namespace, after, known_len)
        match = self._match(start, tokens, limit, salts, packed_limit)
        if match.loadable > match.boundary:
            self._load_back(match)
            start = self._start(namespace, after, known_len)  # room was made meanwhile
            match = self._match(start, tokens, limit, salts, packed_limit)
        row = self.pools.rows.alloc()
        if row is None:
            raise OutOfPages(0)
        self.tree.lock(match.node)
        structural = frozenset(structural) if self.admission.heeds_callers else frozenset()
        passing = frozenset(passing)
        declared = structural | passing
        lease = Lease(
            match=match,
            boundary=match.boundary,
            plan=self.admission.plan(match, declared, len(tokens), self._min_gain),
            row=row,
            table=_NO_TABLE,
            locked=match.node,
            structural=structural,
            salts=salts,
            session=session,
            committed_len=match.boundary,
            reserved_len=match.boundary,
            namespace=namespace,
            prompt_len=len(tokens),
            priority=priority,
            passing=passing,
        )
        claimed: list[tuple[int, int]] = []
        try:
            self._load(match.node, row)  # first of all: a lock does not keep the checkpoint
            if self.policy.wants_boundaries:
                self._announce(lease, tokens, start)
            self._take_windows(lease, match.node)
            self._use(lease)
            self._take_table(lease, start, after)
            for kind, table in self._tables(lease):
                self._enter(lease, kind, table, claimed)
        except BaseException:
            for page, offset in claimed:  # the rest of those pages is for the next to claim
                self.pools.pages.disclaim(page, offset)
            self._give_back(lease)
            raise
        self.leases.add(lease)
        return lease

    def peek(
        self,
        namespace: bytes,
        tokens: IntArray,
        *,
        limit: int,
        salts: Salts = (),
        after: SessionRef | None = None,
        known_len: int = 0,
        packed_limit: int = ANY_LEN,
    ) -> int:
        """How many of `tokens`, at most `limit`, could be reused without loading anything.

        Changes nothing.
        """
        start = self._start(namespace, _within(namespace, after), known_len)
        return self._match(start, tokens, limit, salts, packed_limit).boundary

    def _match(
        self, start: Node, tokens: IntArray, limit: int, salts: Salts, packed_limit: int
    ) -> Match:
        match = self.tree.match(start, tokens, limit, salts)
        while match.boundary > packed_limit and self._is_packed(match.node):
            match = self.tree.match(start, tokens, match.boundary - 1, salts)
        return match

    def _is_packed(self, node: Node) -> bool:
        """Whether the node has a checkpoint, in fewer pages than the state it was made of."""
        rule = self._snapshot
        if rule is None or rule.kind not in node.data:
            return False
        return node.data[rule.kind].num_slots < self.pools.row_pages

    def _load_back(self, match: Match) -> None:
        """Bring what reaches further than the boundary back from a lower tier, if it fits."""
        try:
            self.memory.load_back(match.node, match.loadable_node)
        except OutOfPages:
            self.metrics.add("unloaded", "requests")

    def _start(self, namespace: bytes, after: SessionRef | None, known_len: int) -> Node:
        if after is None:
            return self.tree.root(namespace)
        node = after.frontier.living()
        while node.end > known_len:
            assert node.parent is not None
            node = node.parent
        lost = node.is_root or self.memory.is_hidden(node)
        return self.tree.root(namespace) if lost else node

    def _take_windows(self, lease: Lease, node: Node) -> None:
        """Hold what the boundary's window needs, so that no eviction can take it away."""
        at = lease.boundary
        for rule in self._windows:
            first, pages = rule.reach(at) // rule.page_size, _NO_PAGES
            if at:
                residency = node.data[rule.kind]
                skipped = first - residency.start // rule.page_size
                pages = rule.pages_for(residency, at)[skipped:]
                self.pools.pages.incref(pages)
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
        table.extend(self._path_pages(lease.locked, kind, len(table), stop))
        lease.table = table

    def _tables(self, lease: Lease) -> Iterator[tuple[str, PageTable]]:
        """Kind and pages of each kind of KV that the request reads and writes."""
        if self._edge is not None:
            yield self._edge.kind, lease.table
        yield from lease.windows.items()

    def _path_pages(self, node: Node, kind: str, first: int, stop: int) -> IntArray:
        """Pages [first, stop) of the path to a node."""
        assert self._edge is not None
        size = self._edge.page_size
        parts: list[bytes] = []
        at = node
        while stop > first:
            above = at.parent
            assert above is not None
            begin = above.end // size
            if begin < stop:
                # A page shared with a deeper node was taken there: the deeper one is right.
                low = 0 if begin > first else SLOT_BYTES * (first - begin)
                parts.append(at.data[kind].packed[low : SLOT_BYTES * (stop - begin)])
                stop = begin
            at = above
        parts.reverse()
        return np.frombuffer(b"".join(parts), dtype=np.int32)

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
        if self.pools.pages.claim(tail, offset):
            claimed.append((tail, offset))
            if is_edge:
                self._own(lease, np.array([tail], dtype=np.int32))
            else:
                self.pools.pages.decref(np.array([tail], dtype=np.int32))  # held already
            return
        copy = self.memory.alloc(kind, 1)
        self.memory.fill(kind, copy, lambda: self.pools.copy_tail(kind, tail, int(copy[0]), offset))
        table.replace_last(int(copy[0]))
        if is_edge:
            self._own(lease, copy)
        else:
            self.memory.give_back(kind, np.array([tail], dtype=np.int32))

    def _load(self, node: Node, row: int) -> None:
        if self._snapshot is None:
            return
        if node.is_root:
            self.pools.clear_state(row)
            return
        self.pools.load_state(node.data[self._snapshot.kind].slots, row)
        self.metrics.add("reused", self._snapshot.kind)

    def _announce(self, lease: Lease, tokens: IntArray, start: Node) -> None:
        """Tell the policy of a request, which may ask for further checkpoints."""
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
        asked = self.policy.arrives(arrival)
        first = lease.boundary + self._min_gain
        more = [at for at in asked if first <= at < lease.prompt_len]
        if more and self.admission.heeds_callers:
            lease.plan = tuple(sorted({*lease.plan, *more}))

    def _use(self, lease: Lease) -> None:
        """Note that a request goes on from its boundary; and through all of its known path, where
        the policy asks for that."""
        match, now = lease.match, self._clock.now()
        match.node.superseded = False
        node = match.known_node if self.policy.touches_path else match.node
        while not node.is_root:
            node.hits += 1
            node.last_access = now
            if lease.priority > node.priority:
                node.priority = lease.priority
            self.policy.used(node, now)
            self.memory.push(node)
            if not self.policy.touches_path:
                break
            assert node.parent is not None
            node = node.parent

    def _touch(self, node: Node) -> None:
        node.last_access = self._clock.now()
        node.superseded = False
        self.memory.push(node)

    def reserve(self, lease: Lease, length: int) -> None:
        """Make room for the lease's sequence up to `length` tokens. Raises OutOfPages.

        What lies before every window that is still needed is given back first; all tokens of
        earlier reservations must have been computed.
        """
        self._check(lease)
        self._trim(lease)
        tables = dict(self._tables(lease))
        missing = {
            kind: -(-length // table.page_size) - len(table) for kind, table in tables.items()
        }
        self.memory.make_room(sum(num for num in missing.values() if num > 0))
        for kind, num in missing.items():
            if num > 0:
                pages = self.memory.alloc(kind, num, tables[kind].last)
                tables[kind].extend(pages)
                if tables[kind] is lease.table:
                    self._own(lease, pages)
        lease.reserved_len = max(lease.reserved_len, length)

    def _trim(self, lease: Lease) -> None:
        """Give back the pages of windows that neither the next token nor a planned commit needs."""
        if not self._windows:
            return
        planned = (at for at in lease.plan if at > lease.committed_len)
        keep = min(lease.reserved_len, next(planned, lease.reserved_len))
        for rule in self._windows:
            gone = lease.windows[rule.kind].trim(rule.reach(keep) // rule.page_size)
            self.memory.give_back(rule.kind, gone)

    def _own(self, lease: Lease, pages: IntArray) -> None:
        if len(pages):
            lease.own.append(pages)

    def commit(self, lease: Lease, tokens: IntArray, length: int, row: int) -> bool:
        """File `tokens[:length]` with the state in `row`, which has absorbed exactly those.

        The KV of those positions has been computed. False where there was no room for the
        checkpoint even with everything idle evicted; the lease goes on, unfiled.
        """
        return self._commit(lease, tokens, length, row, self.pools.state_pages)

    def _commit(
        self, lease: Lease, tokens: IntArray, length: int, row: int, state_pages: int
    ) -> bool:
        self._check(lease)
        if length <= lease.committed_len:
            node = lease.locked
            return length == node.end and self.tree.is_boundary(node)
        begun = lease.frontier
        if self.policy.wants_served:
            lease.tokens = tokens[:length]
        inserted = self.tree.insert(begun, tokens, length, lease.salts)
        for split in inserted.splits:
            self._note_split(split)
        self._note_known(lease, begun, inserted)
        for created in inserted.created:
            created.priority = lease.priority
            self._note_insert(created, lease.session)
            self._file_edge(created, lease)
        node = inserted.node
        self.tree.lock(node)
        left, lease.locked, lease.committed_len = lease.locked, node, length
        self.memory.unlock(left)
        if not self._file_snapshot(node, lease, row, state_pages):
            return False
        self._file_windows(node, lease)
        if is_checkpoint(node):
            link(node)
        node.structural = node.structural or length in lease.structural
        if self.policy.wants_boundaries:
            self._tell_filed(node, lease, tokens)
        lease.filed.append(node)
        node.priority = max(node.priority, lease.priority)
        self._touch(node)
        return True

    def _tell_filed(self, node: Node, lease: Lease, tokens: IntArray) -> None:
        """Tell the policy of a boundary and why it is there."""
        length = node.end
        if length in lease.structural:
            origin = Origin.DECLARED
        elif length not in lease.plan:
            origin = Origin.END
        else:
            origin = Origin.PASSING if length in lease.passing else Origin.BRANCH
        now = self._clock.now()
        self.policy.filed(
            Filed(node, lease.namespace, tokens, lease.salts, origin, lease.notes, now)
        )

    def _note_split(self, split: Split) -> None:
        """Count the new holder of shared pages, and tell listeners."""
        upper, lower = split.upper, split.lower
        upper.hits, upper.priority = lower.hits, lower.priority
        self.memory.push(lower)  # less hangs on it now
        self.memory.share(split)
        if self.memory.is_heard(lower):
            self.events.emit(Event("split", key=lower.id, parent=upper.id, boundary=upper.end))
            for kind in upper.data:
                self.memory.note("file", upper, kind)

    def _note_insert(self, node: Node, session: str | None) -> None:
        if not self.memory.is_heard(node):
            return
        parent = node.parent
        assert parent is not None
        namespace = self.tree.namespace(parent) if parent.is_root else None
        self.events.emit(
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

    def _note_known(self, lease: Lease, begun: Node, inserted: Inserted) -> None:
        """Note from where on the tree had KV of its own for what was just filed.

        Where that lies on a lower tier, the request's own takes its place.
        """
        node: Node | None = inserted.node
        while node is not None and node is not begun:
            if node not in inserted.created:
                lease.published_len = min(lease.published_len, max(node.start, lease.boundary))
                if self._edge is not None and node.data[self._edge.kind].tier > 1:
                    pages = lease.table.slice(node.start, node.end)
                    self.memory.replace(node, self._edge.kind, pages)
            node = node.parent

    def _file_edge(self, node: Node, lease: Lease) -> None:
        if self._edge is not None:
            pages = lease.table.slice(node.start, node.end)
            self.pools.pages.incref(pages)
            self.tree.commit(node, self._edge.kind, pages)
            self.metrics.add("filed", self._edge.kind, node.end - node.start)
            self.memory.note("file", node, self._edge.kind, lease.session)

    def _file_windows(self, node: Node, lease: Lease) -> None:
        for rule in self._windows:
            data = node.data.get(rule.kind)
            if data is not None and data.tier == 1:
                continue
            pages = lease.windows[rule.kind].slice(rule.reach(node.end), node.end)
            if data is not None:
                self.memory.replace(node, rule.kind, pages)
            else:
                self.pools.pages.incref(pages)
                self.tree.commit(node, rule.kind, pages)
                self.metrics.add("filed", rule.kind)
                self.memory.note("file", node, rule.kind, lease.session)

    def _file_snapshot(self, node: Node, lease: Lease, row: int, state_pages: int) -> bool:
        rule = self._snapshot
        if rule is None:
            return True
        data = node.data.get(rule.kind)
        if data is not None and data.tier == 1 and data.num_slots >= state_pages:
            return True
        try:
            pages = self.memory.alloc_scattered(rule.kind, state_pages)
        except OutOfPages:
            self.metrics.add("unfiled", rule.kind)
            return False
        self.memory.fill(rule.kind, pages, lambda: self.pools.save_state(row, pages))
        data = node.data.get(rule.kind)  # room may have been made of what was there
        if data is not None and data.tier == 1:
            self.memory.exchange(node, rule.kind, pages)
            return True
        if data is not None:
            self.memory.replace(node, rule.kind, pages)
            self.memory.give_back(rule.kind, pages)  # the node holds them now
            return True
        self.tree.commit(node, rule.kind, pages)
        self.memory.num_checkpoints += 1
        self.metrics.add("filed", rule.kind)
        self.memory.note("file", node, rule.kind, lease.session)
        return True

    def release(self, lease: Lease) -> None:
        """Give back all that the lease holds; what it committed stays. Twice is a LeaseError."""
        self._check(lease)
        lease.released = True
        self.leases.remove(lease)
        self._give_up_tails(lease)
        self._give_back(lease)
        self._condemned.sweep()
        if lease.tokens is not None:
            self._tell(lease, lease.tokens)

    def _tell(self, lease: Lease, tokens: IntArray) -> None:
        """Tell the policy of a request that is over."""
        declared = tuple(sorted(lease.structural))
        cached_len, now = min(lease.boundary, lease.prompt_len), self._clock.now()
        lease.tokens = None
        self.policy.served(
            Served(
                namespace=lease.namespace,
                tokens=tokens,
                prompt_len=lease.prompt_len,
                cached_len=cached_len,
                declared=declared,
                at=now,
                passing=tuple(sorted(lease.passing)),
                salts=lease.salts,
                session=lease.session,
            )
        )

    def _give_back(self, lease: Lease) -> None:
        self.memory.unlock(lease.locked)
        for pages in lease.own:
            self.memory.give_back(self._edge.kind if self._edge else "", pages)
        for kind, table in lease.windows.items():
            self.memory.give_back(kind, table.pages)
        self.pools.rows.free(lease.row)

    def suspend(self, lease: Lease, tokens: IntArray, length: int) -> bool:
        """Publish the frontier and release, so that an equal request can go on from it later.

        The state is filed as it is, not packed.
        """
        kept = self._commit(lease, tokens, length, lease.row, self.pools.row_pages)
        node = lease.locked
        if kept and length > lease.boundary and self._is_packed(node):
            kept = self._file_snapshot(node, lease, lease.row, self.pools.row_pages)
        self.release(lease)
        return kept

    def _give_up_tails(self, lease: Lease) -> None:
        """Let the next turn go on inside the page where this one's filed tokens end."""
        end = lease.committed_len
        for _, table in self._tables(lease):
            if end % table.page_size and end // table.page_size >= table.first:
                self.pools.pages.disclaim(table.page_of(end - 1), end % table.page_size)
        if self._edge is not None:  # what was reserved beyond is no part of the trajectory
            lease.table.truncate(-(-end // self._edge.page_size))

    def stand(
        self,
        frontier: Node,
        filed: Iterable[Node] = (),
        *,
        after: SessionRef | None = None,
        lease: Lease | None = None,
    ) -> SessionRef:
        """Mark a node as the place where a live tip stands.

        filed: further checkpoints of its turn. after: the mark it went on from, held or not. lease:
        of the call that ends there; what it knows makes the next turn's acquire cheap.
        """
        now = self._clock.now()
        ref = self.refs.hold(frontier, filed, after=after, now=now)
        self.policy.stands(frontier, now)
        ref.namespace = lease.namespace if lease is not None else None
        ref.session = lease.session if lease is not None else None
        if self._edge is not None and lease is not None:
            end = min(frontier.end, lease.published_len)
            table = lease.table.prefix(end // self._edge.page_size)
            ref.memo = _Memo(table, self.memory.moves)
        return ref

    def stand_again(self, ref: SessionRef) -> SessionRef:
        """One more mark where another one is, or at what is left of its path. O(1)."""
        again = self.refs.hold_again(ref, self._clock.now())
        again.namespace, again.session = ref.namespace, ref.session
        if self._edge is not None and isinstance(ref.memo, _Memo):
            table = ref.memo.table.prefix(again.frontier.node.end // self._edge.page_size)
            again.memo = _Memo(table, ref.memo.moves)
        return again

    def expect(self, seconds: float, *refs: SessionRef) -> None:
        """Their session is expected back in about that many seconds: they count twice as long."""
        now = self._clock.now()
        for ref in refs:
            self.refs.expect(ref, now, 2 * seconds, due=now + seconds)
            if ref.held and ref.frontier.alive:
                self.policy.expects(ref.frontier.node, seconds, now, ref.session)

    def leave(self, *refs: SessionRef) -> None:
        """The tips have moved on or their session is over. Twice is the same as once."""
        self.refs.leave_all(refs)

    def over(self, session: str) -> None:
        """A session is over; its tips are left."""
        self.policy.over(session)

    def _check(self, lease: Lease) -> None:
        if lease.released:
            raise LeaseError("the lease was released; acquire a new one")

    def condemn(self, node: Node) -> int:
        """Nothing on the path to a node, or computed from it, is found any more: it is wrong.

        What running leases read through leaves when they are released, with what they file there
        until then. Returns the number of entries that left at once.
        """
        return self._condemned.take(node)

    def evict_one(self) -> bool:
        """Take the entry that should leave first; False if nothing idle is left."""
        return self.memory.evict_one()

    def clear(self) -> int:
        """Forget everything idle, on every tier; bytes of the device that became free."""
        return self.memory.clear() * self.pools.page_bytes

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints of the recurrent state that are filed."""
        return self.memory.num_checkpoints

    def account(self) -> dict[str, Account]:
        """Evictable and protected pages of each kind; O(nodes + pages)."""
        return account(self.tree, self.leases, self.pools.pages.num_pages)

    def used_pages(self) -> dict[str, int]:
        """Pages held now, by kind; KV includes what running requests hold."""
        return self.memory.used_pages()

    def peak_pages(self) -> tuple[dict[str, int], int]:
        """The most pages ever held at once: of each kind, and of all together."""
        return self.memory.peak_pages()


def _within(namespace: bytes, mark: SessionRef | None) -> SessionRef | None:
    """The mark, unless its path is kept under another namespace."""
    return None if mark is None or mark.namespace not in (None, namespace) else mark


def _only(tree: RadixTree, base: type[_C]) -> _C | None:
    """The tree's component of that form; there may be one."""
    found = [rule for rule in tree.rules if isinstance(rule, base)]
    assert len(found) <= 1, f"{len(found)} components of the form {base.__name__}; one can be"
    return found[0] if found else None


_C = TypeVar("_C", FullComponent, SnapshotComponent)

_NO_PAGES: IntArray = np.empty(0, dtype=np.int32)
_NO_TABLE = PageTable(1, _NO_PAGES)
