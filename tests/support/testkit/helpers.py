"""Small builders that tests of several rooms use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.cache import HybridCache, Lease
from agentcache.clock import ManualClock
from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.metrics import Metrics
from agentcache.policy.eviction import policy_key
from agentcache.pools.base import Counting, PageAllocator, RowAllocator
from agentcache.tree.check import check_pages, check_tree
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from agentcache.sessions.refs import SessionRef
    from agentcache.tree.node import Node

NAMESPACE = b"tests"


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def make_cache(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    num_rows: int = 4,
    state_pages: int = 2,
    policy: str = "session-lru",
    kv: bool = True,
    shadow: bool = False,
    min_gain: int = 1,
) -> HybridCache:
    """A cache over counting pools; `shadow`: over pools that remember what every slot holds."""
    rules: list[FullComponent | StateComponent] = []
    if kv:
        rules.append(FullComponent(page_size))
    if state_pages:
        rules.append(StateComponent())
    kind = Shadow if shadow else Counting
    pools = kind(PageAllocator(num_pages, page_size), RowAllocator(num_rows), state_pages)
    tree, key = RadixTree(rules), policy_key(policy)
    return HybridCache(tree, pools, key, ManualClock(), Metrics(), min_gain=min_gain)


class Forest:
    """A tree alone: pages are numbers that grow, nothing is behind them."""

    def __init__(self, page_size: int = 4, *, state: bool = True, kv: bool = True) -> None:
        rules: list[FullComponent | StateComponent] = []
        if kv:
            rules.append(FullComponent(page_size))
        if state:
            rules.append(StateComponent())
        self.tree = RadixTree(rules)
        self.page_size = page_size
        self.num_pages = 0

    @property
    def root(self) -> Node:
        return self.tree.root(NAMESPACE)

    def pages(self, count: int) -> IntArray:
        """Page numbers never used before."""
        self.num_pages += count
        return np.arange(self.num_pages - count, self.num_pages, dtype=np.int32)

    def add(self, tokens: IntArray, *, state: bool = True, start: Node | None = None) -> Node:
        """File a sequence, with a checkpoint at its end or without."""
        inserted = self.tree.insert(start or self.root, tokens, len(tokens))
        for node in inserted.created:
            if self.tree.has(Kind.FULL):
                count = -(-node.end // self.page_size) - node.start // self.page_size
                self.tree.commit(node, Kind.FULL, self.pages(count))
        node = inserted.node
        if state and self.tree.has(Kind.STATE) and Kind.STATE not in node.data:
            self.tree.commit(node, Kind.STATE, self.pages(1))
        return node

    def snapshot(self, node: Node | None = None) -> tuple[Any, ...]:
        """Everything that is known of a node and of those below it."""
        node = self.root if node is None else node
        data = {kind: (entry.tier, entry.slots.tolist()) for kind, entry in node.data.items()}
        counters = (node.locks, node.refs, node.last_access, node.generation, node.stamp)
        flags = (node.superseded, node.structural, node.evicted_at)
        below = {token: self.snapshot(child) for token, child in sorted(node.children.items())}
        return (id(node), node.tokens.tolist(), node.end, data, counters, flags, below)


class Shadow(Counting):
    """Counting pools that remember what every slot holds, so that a wrong reuse shows.

    What the model would put there is replaced by its cause: a slot of KV holds the tokens up to its
    own, a row or a checkpoint the tokens absorbed. Pages nobody holds are empty (None).
    """

    def __init__(self, pages: PageAllocator, rows: RowAllocator, state_pages: int) -> None:
        super().__init__(pages, rows, state_pages)
        self.arena: list[Any] = [None] * pages.num_pages
        self.absorbed: list[Any] = [None] * rows.num_rows

    def copy_tail(self, source: int, target: int, count: int) -> None:
        assert self.arena[target] is None, "a copy into a page that is in use"
        rest = [None] * (self.pages.page_size - count)
        self.arena[target] = [*self.arena[source][:count], *rest]

    def save_state(self, row: int, pages: IntArray) -> None:
        for part, page in enumerate(pages.tolist()):
            assert self.arena[page] is None, "a checkpoint over a page that is in use"
            self.arena[page] = (part, self.absorbed[row])

    def load_state(self, pages: IntArray, row: int) -> None:
        parts = [self.arena[page] for page in pages.tolist()]
        assert parts == [(part, parts[0][1]) for part in range(self.state_pages)]
        self.absorbed[row] = parts[0][1]

    def clear_state(self, row: int) -> None:
        self.absorbed[row] = ()

    def on_free(self, pages: IntArray) -> None:
        for page in pages.tolist():
            assert self.pages.refs[page] == 0, "a page in use was declared free"
            self.arena[page] = None


def _slots(lease: Lease, start: int, stop: int) -> list[int]:
    return [slot + at for slot, num in lease.table.runs(start, stop) for at in range(num)]


def published_slots(cache: HybridCache) -> set[int]:
    """Token slots that some node of the tree relies on."""
    size = cache.pools.pages.page_size
    out: set[int] = set()
    for node in cache.tree.nodes():
        pages = node.data[Kind.FULL].slots.tolist() if Kind.FULL in node.data else []
        for idx, page in enumerate(pages, node.start // size):
            used = min(size, node.end - idx * size)
            out.update(range(page * size, page * size + used))
    return out


def verify_prefix(cache: HybridCache, lease: Lease, tokens: IntArray, length: int) -> None:
    """Assert that a lease over `Shadow` pools reads the KV and the state of `tokens[:length]`."""
    pools = cache.pools
    assert isinstance(pools, Shadow)
    known = tuple(tokens[:length].tolist())
    if cache.tree.has(Kind.STATE):
        assert pools.absorbed[lease.row] == known, f"state of {pools.absorbed[lease.row]}"
    if cache.tree.has(Kind.FULL):
        size = pools.pages.page_size
        for at, slot in enumerate(_slots(lease, 0, length)):
            held = pools.arena[slot // size][slot % size]
            assert held == known[: at + 1], f"position {at} reads {held}"


def absorb(cache: HybridCache, lease: Lease, tokens: IntArray, start: int, stop: int) -> None:
    """What a forward pass over `tokens[start:stop]` does to `Shadow` pools.

    Asserts that what it reads is right, and that it writes where nobody else reads.
    """
    pools = cache.pools
    assert isinstance(pools, Shadow)
    verify_prefix(cache, lease, tokens, start)
    ids_ = tuple(tokens.tolist())
    pools.absorbed[lease.row] = ids_[:stop]
    if not cache.tree.has(Kind.FULL):
        return
    size = pools.pages.page_size
    published = published_slots(cache)
    own = {page for part in lease.own for page in part.tolist()}
    slots = _slots(lease, start, stop)
    assert len(slots) == stop - start, "positions without a page"
    for at, slot in enumerate(slots, start):
        page = slot // size
        assert page in own, f"position {at} is written to a page of somebody else"
        assert slot not in published, f"position {at} overwrites what the tree holds"
        if pools.arena[page] is None:
            pools.arena[page] = [None] * size
        pools.arena[page][slot % size] = ids_[: at + 1]


def tick(cache: HybridCache) -> None:
    """Let time pass, so that recency differs."""
    clock = cache._clock
    assert isinstance(clock, ManualClock)
    clock.advance(1.0)


def run(
    cache: HybridCache,
    tokens: IntArray,
    *,
    structural: tuple[int, ...] = (),
    namespace: bytes = NAMESPACE,
    commit: bool = True,
) -> Lease:
    """A whole request: acquire, reserve, commit the plan and the end, release."""
    tick(cache)
    lease = cache.acquire(namespace, tokens, structural=structural)
    try:
        cache.reserve(lease, len(tokens))
        if commit:
            for length in lease.plan:
                cache.commit(lease, tokens, length, lease.row)
            cache.commit(lease, tokens, len(tokens), lease.row)
    finally:
        cache.release(lease)
    return lease


def check(cache: HybridCache) -> None:
    """Everything that always holds between tree, pages and leases."""
    pages = cache.pools.pages
    check_tree(cache.tree, pages.page_size)
    held = [part for lease in cache.leases for part in lease.own]
    check_pages(cache.tree, pages.refs, held, pages.num_free)
    if cache.tree.has(Kind.FULL):
        for node in cache.tree.nodes():
            offset = node.end % pages.page_size
            if offset:
                page = int(node.data[Kind.FULL].slots[-1])
                assert pages.fill[page] >= offset, f"what {node} holds could be written again"
    checkpoints = sum(Kind.STATE in node.data for node in cache.tree.nodes())
    assert checkpoints == cache.num_checkpoints
    assert cache.pools.rows.num_free + len(cache.leases) == cache.pools.rows.num_rows


class Agent:
    """A session that takes turns: it holds its tip, and leaves it when it has moved on.

    `turn` returns how many prompt tokens had to be computed.
    """

    def __init__(self, cache: HybridCache, namespace: bytes = NAMESPACE) -> None:
        self.cache = cache
        self.namespace = namespace
        self.tokens = ids()
        self.ref: SessionRef | None = None
        self.frontier: Node | None = None

    def turn(
        self,
        new: IntArray,
        reply: IntArray,
        structural: tuple[int, ...] = (),
        passing: tuple[int, ...] = (),
    ) -> int:
        """Append `new`, then `reply`, whose last token is sampled but never absorbed."""
        cache, prompt = self.cache, np.concatenate([self.tokens, new])
        tick(cache)
        whole = np.concatenate([prompt, reply])
        absorbed = max(len(prompt), len(whole) - 1)
        lease = cache.acquire(self.namespace, prompt, structural=structural, passing=passing)
        try:
            cache.reserve(lease, absorbed)
            for length in lease.plan:
                cache.commit(lease, whole, length, lease.row)
            cache.commit(lease, whole, absorbed, lease.row)
            before, self.ref = (
                self.ref,
                cache.refs.hold(lease.locked, [n for n in lease.filed if n is not lease.locked]),
            )
            if before is not None:
                cache.refs.leave(before)
            self.frontier = lease.locked
        finally:
            cache.release(lease)
        self.tokens = whole
        return len(prompt) - lease.boundary

    def fork(self) -> Agent:
        """A second session that stands where this one does."""
        child = Agent(self.cache, self.namespace)
        child.tokens = self.tokens
        if self.ref is not None:
            child.ref = self.cache.refs.hold(self.ref.frontier.living())
        return child

    def close(self) -> None:
        """The session is over."""
        if self.ref is not None:
            self.cache.refs.leave(self.ref)
