"""HybridCache: acquire, reserve, commit, release. It carries out what the tree decides.

Free of torch: it works on a `Pools` protocol, so the runtime and a simulation run the same code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.cache.accounting import Account, account
from agentcache.cache.condemned import Condemned, Hidden
from agentcache.cache.filing import Filing
from agentcache.cache.forms import Forms
from agentcache.cache.lease import ANY_LEN, Lease
from agentcache.cache.listeners import Listeners
from agentcache.cache.memory import Memory, OutOfPages
from agentcache.cache.news import News
from agentcache.cache.tables import NO_TABLE, Tables
from agentcache.errors import LeaseError
from agentcache.events import Events
from agentcache.policy.admission import Admission, Structural
from agentcache.sessions.refs import References, SessionRef

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache.clock import Clock
    from agentcache.metrics import Metrics
    from agentcache.policy.base import Policy
    from agentcache.pools.base import Pools
    from agentcache.tiers.base import LowerTier
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Match, RadixTree, Salts
    from agentcache.types import IntArray

__all__ = ["HybridCache"]


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
        self.policy = policy
        self.admission = admission or Structural()
        self.leases: set[Lease] = set()
        self._clock = clock
        self._min_gain = min_gain
        forms, self._hidden = Forms.of(tree), Hidden()
        listeners = Listeners(tree, self.events, self._hidden)
        self.memory = Memory(tree, forms, pools, policy, clock, metrics, listeners, lower)
        self.refs = References(self.memory.push)
        self._condemned = Condemned(tree, self.memory, listeners, self._hidden)
        self._news = News(policy, clock, self.memory.push)
        self._tables = Tables(self.memory, forms)
        self._filing = Filing(self.memory, forms, listeners, self._news)
        self._snapshot = forms.snapshot

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
            table=NO_TABLE,
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
        try:
            self._load(match.node, row)  # first of all: a lock does not keep the checkpoint
            self._plan_more(lease, self._news.arrives(lease, tokens, start))
            self._news.used(lease)
            self._tables.take(lease, start, after)
        except BaseException:
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
        lost = node.is_root or self._hidden.holds(node)
        return self.tree.root(namespace) if lost else node

    def _load(self, node: Node, row: int) -> None:
        if self._snapshot is None:
            return
        if node.is_root:
            self.pools.clear_state(row)
            return
        self.pools.load_state(node.data[self._snapshot.kind].slots, row)
        self.metrics.add("reused", self._snapshot.kind)

    def _plan_more(self, lease: Lease, asked: Iterable[int]) -> None:
        """Plan further checkpoints where they save enough, if admission heeds anybody."""
        first = lease.boundary + self._min_gain
        more = [at for at in asked if first <= at < lease.prompt_len]
        if more and self.admission.heeds_callers:
            lease.plan = tuple(sorted({*lease.plan, *more}))

    def reserve(self, lease: Lease, length: int) -> None:
        """Make room for the lease's sequence up to `length` tokens. Raises OutOfPages.

        What lies before every window that is still needed is given back first; all tokens of
        earlier reservations must have been computed.
        """
        self._check(lease)
        self._tables.grow(lease, length)

    def commit(self, lease: Lease, tokens: IntArray, length: int, row: int) -> bool:
        """File `tokens[:length]` with the state in `row`, which has absorbed exactly those.

        The KV of those positions has been computed. False where there was no room for the
        checkpoint even with everything idle evicted; the lease goes on, unfiled.
        """
        self._check(lease)
        return self._filing.file(lease, tokens, length, row, self.pools.state_pages)

    def release(self, lease: Lease) -> None:
        """Give back all that the lease holds; what it committed stays. Twice is a LeaseError."""
        self._check(lease)
        lease.released = True
        self.leases.remove(lease)
        self._tables.give_up_tails(lease)
        self._give_back(lease)
        self._condemned.sweep()
        self._news.served(lease)

    def _give_back(self, lease: Lease) -> None:
        self.memory.unlock(lease.locked)
        self._tables.give_back(lease)
        self.pools.rows.free(lease.row)

    def suspend(self, lease: Lease, tokens: IntArray, length: int) -> bool:
        """Publish the frontier and release, so that an equal request can go on from it later.

        The state is filed as it is, not packed.
        """
        self._check(lease)
        row, state_pages = lease.row, self.pools.row_pages
        kept = self._filing.file(lease, tokens, length, row, state_pages)
        node = lease.locked
        if kept and length > lease.boundary and self._is_packed(node):
            kept = self._filing.file_snapshot(lease, node, row, state_pages)
        self.release(lease)
        return kept

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
        self._news.stands(frontier, now)
        ref.namespace = lease.namespace if lease is not None else None
        ref.session = lease.session if lease is not None else None
        if lease is not None:
            self._tables.remember(ref, lease)
        return ref

    def stand_again(self, ref: SessionRef) -> SessionRef:
        """One more mark where another one is, or at what is left of its path. O(1)."""
        again = self.refs.hold_again(ref, self._clock.now())
        again.namespace, again.session = ref.namespace, ref.session
        self._tables.remember_again(again, ref)
        return again

    def expect(self, seconds: float, *refs: SessionRef) -> None:
        """Their session is expected back in about that many seconds: they count twice as long."""
        now = self._clock.now()
        for ref in refs:
            self.refs.expect(ref, now, 2 * seconds, due=now + seconds)
            self._news.expects(ref, seconds, now)

    def leave(self, *refs: SessionRef) -> None:
        """The tips have moved on or their session is over. Twice is the same as once."""
        self.refs.leave_all(refs)

    def over(self, session: str) -> None:
        """A session is over; its tips are left."""
        self._news.over(session)

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
