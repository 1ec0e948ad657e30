"""Small builders that tests of several rooms use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.cache import HybridCache, Lease
from agentcache.clock import ManualClock
from agentcache.components.base import WindowComponent
from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.components.swa import SwaComponent
from agentcache.metrics import Metrics
from agentcache.policy.eviction import make_policy
from agentcache.pools.base import Counting, RowAllocator
from agentcache.pools.pages import PageAllocator
from agentcache.tree.check import check_pages, check_tree
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from agentcache.components.base import Component
    from agentcache.pools.table import PageTable
    from agentcache.sessions.refs import SessionRef
    from agentcache.tree.node import Node

NAMESPACE = b"tests"


def ids(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def rules_of(
    page_size: int, *, kv: bool = True, window: int = 0, state: bool = True, swa_page: int = 0
) -> list[Component]:
    """Components: attention, sliding windows of that many tokens, recurrent state."""
    rules: list[Component] = []
    if kv:
        rules.append(FullComponent(page_size))
    if window:
        rules.append(SwaComponent(window, swa_page or page_size))
    if state:
        rules.append(StateComponent())
    return rules


def make_cache(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    num_rows: int = 4,
    state_pages: int = 2,
    policy: str = "session-lru",
    kv: bool = True,
    window: int = 0,
    swa_page: int = 0,
    shadow: bool = False,
    min_gain: int = 1,
) -> HybridCache:
    """A cache over counting pools; `shadow`: over pools that remember what every slot holds."""
    rules = rules_of(page_size, kv=kv, window=window, state=state_pages > 0, swa_page=swa_page)
    kind = Shadow if shadow else Counting
    pools = kind(PageAllocator(num_pages), RowAllocator(num_rows), state_pages)
    tree = RadixTree(rules)
    return HybridCache(
        tree, pools, make_policy(policy), ManualClock(), Metrics(), min_gain=min_gain
    )


def page_sizes(cache: HybridCache) -> dict[str, int]:
    """Tokens per page of each kind that keeps KV."""
    return {rule.kind: rule.page_size for rule in cache.tree.rules if hasattr(rule, "page_size")}


class Forest:
    """A tree alone: pages are numbers that grow, nothing is behind them."""

    def __init__(self, page_size: int = 4, *, state: bool = True, kv: bool = True) -> None:
        self.tree = RadixTree(rules_of(page_size, kv=kv, state=state))
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
        data = {
            kind: (entry.tier, entry.start, entry.slots.tolist())
            for kind, entry in node.data.items()
        }
        counters = (node.locks, node.refs, node.last_access, node.generation, node.stamp)
        flags = (node.superseded, node.structural, node.evicted_at)
        children = sorted(node.children.items(), key=str)
        below = {token: self.snapshot(child) for token, child in children}
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

    def copy_tail(self, kind: str, source: int, target: int, count: int) -> None:
        assert self.arena[target] is None, "a copy into a page that is in use"
        rest = [None] * (len(self.arena[source]) - count)
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


def tables(cache: HybridCache, lease: Lease) -> dict[str, PageTable]:
    """The page tables of a lease by kind."""
    out = dict(lease.windows)
    if cache.tree.has(Kind.FULL):
        out[Kind.FULL] = lease.table
    return out


def _slots(table: PageTable, start: int, stop: int) -> list[int]:
    return [slot + at for slot, num in table.runs(start, stop) for at in range(num)]


def _reach(cache: HybridCache, kind: str, at: int) -> int:
    """The first position that a request at `at` may read of a kind."""
    rule = next(rule for rule in cache.tree.rules if rule.kind == kind)
    return rule.reach(at) if isinstance(rule, WindowComponent) else 0


def published_slots(cache: HybridCache) -> set[tuple[int, int]]:
    """(page, offset) of every token slot that some node of the tree relies on."""
    sizes = page_sizes(cache)
    out: set[tuple[int, int]] = set()
    for node in cache.tree.nodes():
        for kind, size in sizes.items():
            if kind not in node.data:
                continue
            data = node.data[kind]
            for idx, page in enumerate(data.slots.tolist(), data.start // size):
                out.update((page, at) for at in range(min(size, node.end - idx * size)))
    return out


def verify_prefix(cache: HybridCache, lease: Lease, tokens: IntArray, length: int) -> None:
    """Assert that a lease over `Shadow` pools reads the KV and the state of `tokens[:length]`."""
    pools = cache.pools
    assert isinstance(pools, Shadow)
    known = tuple(tokens[:length].tolist())
    if cache.tree.has(Kind.STATE):
        assert pools.absorbed[lease.row] == known, f"state of {pools.absorbed[lease.row]}"
    for kind, table in tables(cache, lease).items():
        first = _reach(cache, kind, length)
        for at, slot in enumerate(_slots(table, first, length), first):
            held = pools.arena[slot // table.page_size][slot % table.page_size]
            assert held == known[: at + 1], f"position {at} of {kind} reads {held}"


def absorb(cache: HybridCache, lease: Lease, tokens: IntArray, start: int, stop: int) -> None:
    """What a forward pass over `tokens[start:stop]` does to `Shadow` pools.

    Asserts that what it reads is right, and that it writes where nobody else reads.
    """
    pools = cache.pools
    assert isinstance(pools, Shadow)
    verify_prefix(cache, lease, tokens, start)
    ids_ = tuple(tokens.tolist())
    pools.absorbed[lease.row] = ids_[:stop]
    published = published_slots(cache)
    own = {page for part in lease.own for page in part.tolist()}
    for kind, table in tables(cache, lease).items():
        size = table.page_size
        slots = _slots(table, start, stop)
        assert len(slots) == stop - start, f"positions without a page of {kind}"
        for at, slot in enumerate(slots, start):
            page, offset = divmod(slot, size)
            mine = page in own if kind == Kind.FULL else pools.pages.refs[page] > 0
            assert mine, f"position {at} is written to a page of somebody else"
            assert (page, offset) not in published, f"position {at} overwrites what the tree holds"
            if pools.arena[page] is None:
                pools.arena[page] = [None] * size
            pools.arena[page][offset] = ids_[: at + 1]


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
    pages, sizes = cache.pools.pages, page_sizes(cache)
    check_tree(cache.tree)
    held = [part for lease in cache.leases for part in lease.own]
    held += [table.pages for lease in cache.leases for table in lease.windows.values()]
    check_pages(cache.tree, pages.refs, held, pages.num_free)
    for node in cache.tree.nodes():
        for kind, size in sizes.items():
            offset = node.end % size
            if offset and kind in node.data:
                page = int(node.data[kind].slots[-1])
                assert pages.fill[page] >= offset, f"what {node} holds could be written again"
    checkpoints = sum(Kind.STATE in node.data for node in cache.tree.nodes())
    assert checkpoints == cache.num_checkpoints
    assert cache.pools.rows.num_free + len(cache.leases) == cache.pools.rows.num_rows
    check_accounting(cache)


def check_accounting(cache: HybridCache) -> None:
    """Pages per kind, counted from nothing, are what the cache says."""
    pages: dict[str, set[int]] = {rule.kind: set() for rule in cache.tree.rules}
    for node in cache.tree.nodes():
        for kind, data in node.data.items():
            pages[kind].update(data.slots.tolist())
    for lease in cache.leases:
        if Kind.FULL in pages:
            pages[Kind.FULL].update(page for part in lease.own for page in part.tolist())
        for kind, table in lease.windows.items():
            pages[kind].update(table.pages.tolist())
    assert {kind: len(held) for kind, held in pages.items()} == cache.used_pages()
    assert sum(map(len, pages.values())) == cache.pools.pages.num_used


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
        lease = cache.acquire(
            self.namespace,
            prompt,
            structural=structural,
            passing=passing,
            after=self.ref,
            known_len=len(self.tokens),
        )
        try:
            cache.reserve(lease, absorbed)
            for length in lease.plan:
                cache.commit(lease, whole, length, lease.row)
            cache.commit(lease, whole, absorbed, lease.row)
            before, self.ref = (
                self.ref,
                cache.stand(
                    lease.frontier,
                    [n for n in lease.filed if n is not lease.frontier],
                    after=self.ref,
                    lease=lease,
                ),
            )
            if before is not None:
                cache.leave(before)
            self.frontier = lease.frontier
        finally:
            cache.release(lease)
        self.tokens = whole
        return len(prompt) - lease.boundary

    def fork(self) -> Agent:
        """A second session that stands where this one does."""
        child = Agent(self.cache, self.namespace)
        child.tokens = self.tokens
        if self.ref is not None:
            child.ref = self.cache.stand_again(self.ref)
        return child

    def close(self) -> None:
        """The session is over."""
        if self.ref is not None:
            self.cache.leave(self.ref)
