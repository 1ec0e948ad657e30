"""Lower tiers that keep what they are given, and a crowd of sessions on a cache above one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agentcache.cache import HybridCache, Lease, OutOfPages
from agentcache.clock import ManualClock
from agentcache.metrics import Metrics
from agentcache.policy.eviction import make_policy
from agentcache.pools.base import RowAllocator
from agentcache.pools.pages import PageAllocator
from agentcache.tree.check import check_tree
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import IntArray, Kind
from testkit.helpers import (
    NAMESPACE,
    Shadow,
    absorb,
    ids,
    page_sizes,
    rules_of,
    tick,
    verify_prefix,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from agentcache.events import Events
    from agentcache.pools.tensors import TensorPools
    from agentcache.sessions.refs import SessionRef
    from agentcache.tree.node import Node, Residency
    from agentcache.tree.radix_tree import Salts

COMPOSITIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "full-state": {"state_pages": 2},
    "full-swa": {"window": 5},
    "full-swa-state": {"window": 5, "state_pages": 1},
    "state": {"kv": False, "state_pages": 2},
    "swa": {"kv": False, "window": 5},
}
"""Arguments of `make_tiered`, by name."""

FIRST_SLOT = 1_000_000
"""Slots of a lower tier are no pages: one taken for the other is out of every range."""


class ShadowTier:
    """A lower tier over `Shadow` pools, which keeps what the pages held."""

    tier = 2

    def __init__(self, pools: Shadow, num_pages: int) -> None:
        self.kept: dict[int, Any] = {}
        self.num_pages = num_pages
        self._pools = pools
        self._next = FIRST_SLOT

    @property
    def num_free(self) -> int:
        return self.num_pages - len(self.kept)

    def store(self, pages: IntArray) -> IntArray:
        assert len(pages) <= self.num_free, "more than there is room for"
        slots = np.arange(self._next, self._next + len(pages), dtype=np.int32)
        self._next += len(pages)  # no slot is used twice
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            held = self._pools.arena[page]
            assert held is not None, f"page {page} has nothing to be stored"
            self.kept[slot] = list(held) if isinstance(held, list) else held
        return slots

    def load(self, slots: IntArray, pages: IntArray) -> None:
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            assert self._pools.arena[page] is None, "loaded over a page that is in use"
            held = self.kept[slot]
            self._pools.arena[page] = list(held) if isinstance(held, list) else held

    def free(self, slots: IntArray) -> None:
        for slot in slots.tolist():
            del self.kept[slot]


class TensorTier:
    """A lower tier over tensors: the bytes of a page and all that lies beside it."""

    tier = 2

    def __init__(self, pools: TensorPools, num_pages: int) -> None:
        memories = [pools._arena, *pools._beside.values()]
        self._pairs = [
            (memory, memory.new_empty(num_pages, memory.shape[1])) for memory in memories
        ]
        self.num_pages = num_pages
        self._free = list(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def store(self, pages: IntArray) -> IntArray:
        slots = np.array([self._free.pop() for _ in range(len(pages))], dtype=np.int32)
        for memory, copy in self._pairs:
            copy[torch.from_numpy(slots)] = memory[torch.tensor(pages)]
        return slots

    def load(self, slots: IntArray, pages: IntArray) -> None:
        for memory, copy in self._pairs:
            memory[torch.tensor(pages)] = copy[torch.tensor(slots)]

    def free(self, slots: IntArray) -> None:
        for _, copy in self._pairs:
            copy[torch.tensor(slots)] = 0xFF
        self._free.extend(slots.tolist())


def make_tiered(
    *,
    num_pages: int = 64,
    lower_pages: int = 64,
    page_size: int = 4,
    num_rows: int = 4,
    state_pages: int = 0,
    policy: str = "session-lru",
    kv: bool = True,
    window: int = 0,
    swa_page: int = 0,
    min_gain: int = 1,
    events: Events | None = None,
) -> HybridCache:
    """A cache over `Shadow` pools above a `ShadowTier`; without one where `lower_pages` is 0."""
    pools = Shadow(PageAllocator(num_pages), RowAllocator(num_rows), state_pages)
    rules = rules_of(page_size, kv=kv, window=window, state=state_pages > 0, swa_page=swa_page)
    return HybridCache(
        RadixTree(rules),
        pools,
        make_policy(policy),
        ManualClock(),
        Metrics(),
        min_gain=min_gain,
        events=events,
        lower=ShadowTier(pools, lower_pages) if lower_pages else None,
    )


def lower_of(cache: HybridCache) -> ShadowTier:
    """The cache's lower tier."""
    lower = cache.memory.lower
    assert isinstance(lower, ShadowTier)
    return lower


def serve(
    cache: HybridCache,
    tokens: IntArray,
    *,
    structural: tuple[int, ...] = (),
    passing: tuple[int, ...] = (),
    limit: int | None = None,
    after: SessionRef | None = None,
    known_len: int = 0,
) -> Lease:
    """A whole request that computes what it has to, reads only what is right, and is filed."""
    tick(cache)
    lease = cache.acquire(
        NAMESPACE,
        tokens,
        structural=structural,
        passing=passing,
        limit=limit,
        after=after,
        known_len=known_len,
    )
    verify_prefix(cache, lease, tokens, lease.boundary)
    at = lease.boundary
    for length in (*lease.plan, len(tokens)):
        cache.reserve(lease, length)
        absorb(cache, lease, tokens, at, length)
        assert cache.commit(lease, tokens, length, lease.row)
        at = length
    cache.release(lease)
    check_tiers(cache)
    return lease


def demote_all(cache: HybridCache) -> None:
    """Everything idle leaves the device."""
    while cache.evict_one():
        check_tiers(cache)


def node_at(cache: HybridCache, tokens: IntArray) -> Node:
    """The node at which a filed sequence ends."""
    match = cache.tree.match(cache.tree.root(NAMESPACE), tokens, len(tokens))
    assert match.known_len == match.known_node.end == len(tokens)
    return match.known_node


def tiers_of(node: Node) -> dict[str, int]:
    """Where a node's data lies, by kind."""
    return {kind: data.tier for kind, data in node.data.items()}


def check_tiers(cache: HybridCache) -> None:
    """Everything that always holds between tree, leases, pages and the lower tier."""
    check_tree(cache.tree)
    pages, lower = cache.pools.pages, cache.memory.lower
    refs = np.zeros_like(pages.refs)
    below: Counter[int] = Counter()
    used: dict[str, set[int]] = {rule.kind: set() for rule in cache.tree.rules}
    for node in cache.tree.nodes():
        for kind, data in node.data.items():
            if data.tier == 1:
                refs[data.slots] += 1
                used[kind].update(data.slots.tolist())
            else:
                below.update(data.slots.tolist())
        _check_order(node)
    for lease in cache.leases:
        for part in lease.own:
            refs[part] += 1
            used[Kind.FULL].update(part.tolist())
        for kind, table in lease.windows.items():
            refs[table.pages] += 1
            used[kind].update(table.pages.tolist())
    assert (refs == pages.refs).all(), np.flatnonzero(refs != pages.refs)
    assert pages.num_free == int((refs == 0).sum())
    if isinstance(lower, ShadowTier):
        assert set(below) == set(lower.kept), "slots of the lower tier are lost or shared out"
        assert lower.num_free == lower.num_pages - len(below)
    assert {kind: len(held) for kind, held in used.items()} == cache.used_pages()
    for kind, counted in cache.account().items():
        assert counted.evictable + counted.protected == len(used[kind]), kind
    assert cache.num_checkpoints == sum(Kind.STATE in n.data for n in cache.tree.nodes())
    assert cache.pools.rows.num_free + len(cache.leases) == cache.pools.rows.num_rows
    check_content(cache)


def _check_order(node: Node) -> None:
    """KV of a path is on the device from the root on, as far as it is there at all."""
    parent = node.parent
    assert parent is not None
    if Kind.FULL in node.data and node.data[Kind.FULL].tier == 1 and not parent.is_root:
        assert parent.data[Kind.FULL].tier == 1, f"{node} is on the device, what leads to it is not"


def check_content(cache: HybridCache) -> None:
    """What each node holds, on whatever tier, is what its tokens leave there."""
    sizes = page_sizes(cache)
    for node in cache.tree.nodes():
        known = tuple(t for part in cache.tree.path(node) for t in part.tokens.tolist())
        for kind, data in node.data.items():
            held = [_content(cache, data, slot) for slot in data.slots.tolist()]
            if kind == Kind.STATE:
                assert held == [(part, known) for part in range(cache.pools.state_pages)]
                continue
            size = sizes[kind]
            first = data.start // size
            for at in range(first * size if kind == Kind.FULL else data.start, node.end):
                found = held[at // size - first][at % size]
                assert found == known[: at + 1], f"position {at} of {kind} at {node}: {found}"


def _content(cache: HybridCache, data: Residency, slot: int) -> Any:
    if data.tier > 1:
        return lower_of(cache).kept[slot]
    assert isinstance(cache.pools, Shadow)
    return cache.pools.arena[slot]


@dataclass(eq=False, slots=True)
class Tip:
    """Where a session stands."""

    tokens: IntArray
    salts: Salts
    ref: SessionRef


@dataclass(eq=False, slots=True)
class Flight:
    """One request: the tokens that its end will have absorbed, and how many it has."""

    base: Tip | None
    tokens: IntArray
    salts: Salts
    lease: Lease
    done: int


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks for, in numbers that mean something in any state of the crowd.

    tip: whose tokens it goes on from; `cut` of them are left out. salt: offset into the new tokens.
    limit: the longest boundary allowed.
    """

    new: tuple[int, ...]
    reply_len: int = 0
    tip: int = 0
    cut: int = 0
    structural: tuple[int, ...] = ()
    passing: tuple[int, ...] = ()
    salt: int | None = None
    from_mark: bool = True
    limit: int | None = None


MAX_LEN = 30
SALT = b"salt"


@dataclass(eq=False)
class Crowd:
    """Sessions that take turns on one cache, many at a time; a request that does not fit is given
    up. Everything is checked after every operation, unless `checks` is False."""

    cache: HybridCache
    checks: bool = True
    tips: list[Tip] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def begin(self, ask: Ask) -> Lease | None:
        """A request is acquired; None where it does not fit."""
        base = self.tips[ask.tip % len(self.tips)] if self.tips else None
        old = ids() if base is None else base.tokens[: max(0, len(base.tokens) - ask.cut)]
        old = old[: max(0, MAX_LEN - len(ask.new))]
        salts = () if base is None else tuple(salt for salt in base.salts if salt[0] < len(old))
        if ask.salt is not None and ask.salt < len(ask.new):
            salts = (*salts, (len(old) + ask.salt, SALT))
        tokens = np.concatenate([old, ids(*ask.new)])
        prompt = tokens[: max(len(old) + 1, len(tokens) - ask.reply_len)]
        marked = base is not None and ask.from_mark
        tick(self.cache)
        try:
            lease = self.cache.acquire(
                NAMESPACE,
                prompt,
                limit=None if ask.limit is None else ask.limit % len(prompt),
                structural=ask.structural,
                passing=ask.passing,
                salts=salts,
                after=base.ref if base is not None and marked else None,
                known_len=len(old) if marked else 0,
            )
        except OutOfPages:
            self.counts["refused"] += 1
            self.check()
            return None
        verify_prefix(self.cache, lease, tokens, lease.boundary)
        self.counts["hit"] += lease.boundary > 0
        self.flights.append(Flight(base, tokens, salts, lease, lease.boundary))
        self.check()
        return lease

    def step(self, number: int, num: int) -> None:
        """A request absorbs up to so many tokens, and files what was planned there."""
        flight = self._flight(number)
        if flight is None:
            return
        lease, stop = flight.lease, min(flight.done + num, len(flight.tokens))
        planned = [at for at in lease.plan if flight.done < at < stop]
        for length in (*planned, stop):
            try:
                self.cache.reserve(lease, length)
            except OutOfPages:
                self.counts["short"] += 1
                self._release(flight)
                return
            absorb(self.cache, lease, flight.tokens, flight.done, length)
            flight.done = length
            if length in lease.plan:
                self.cache.commit(lease, flight.tokens, length, lease.row)
        self.check()

    def finish(self, number: int) -> None:
        """A request absorbs the rest and ends; its session stands there from now on."""
        flight = self._flight(number)
        if flight is None:
            return
        self.step(number, MAX_LEN)
        if flight not in self.flights:
            return
        lease, base = flight.lease, flight.base
        self.cache.commit(lease, flight.tokens, flight.done, lease.row)
        filed = [node for node in lease.filed if node is not lease.frontier]
        after = None if base is None else base.ref
        ref = self.cache.stand(lease.frontier, filed, after=after, lease=lease)
        self.tips.append(Tip(flight.tokens, flight.salts, ref))
        if base in self.tips:
            assert base is not None
            self.tips.remove(base)
            self.cache.leave(base.ref)
        self.counts["finished"] += 1
        self._release(flight)

    def suspend(self, number: int) -> None:
        """A request publishes what it has and is over."""
        flight = self._flight(number)
        if flight is not None:
            self.flights.remove(flight)
            self.cache.suspend(flight.lease, flight.tokens, flight.done)
            self.check()

    def abort(self, number: int) -> None:
        """A request is given up."""
        flight = self._flight(number)
        if flight is not None:
            self._release(flight)

    def fork(self, tip: int) -> None:
        """A second session stands where one does."""
        if self.tips and len(self.tips) < 6:
            source = self.tips[tip % len(self.tips)]
            ref = self.cache.stand_again(source.ref)
            self.tips.append(Tip(source.tokens, source.salts, ref))
            self.check()

    def close(self, tip: int) -> None:
        """A session is over."""
        if self.tips:
            self.cache.leave(self.tips.pop(tip % len(self.tips)).ref)
            self.check()

    def evict(self) -> bool:
        """One entry leaves the device; whether one did."""
        evicted = self.cache.evict_one()
        self.check()
        return evicted

    def clear(self) -> None:
        """Everything idle is forgotten, on every tier."""
        self.cache.clear()
        self.check()
        if self.cache.memory.lower is not None:
            assert not lower_of(self.cache).kept
        kept = {id(node) for f in self.flights for node in self.cache.tree.path(f.lease.locked)}
        assert all(id(node) in kept for node in self.cache.tree.nodes())

    def end(self) -> None:
        """Everybody goes, and nothing is left on any tier."""
        while self.flights:
            self.abort(0)
        while self.tips:
            self.close(0)
        self.clear()
        assert not list(self.cache.tree.nodes())
        assert self.cache.pools.pages.num_used == 0
        if self.cache.memory.lower is not None:
            assert not lower_of(self.cache).kept

    def check(self) -> None:
        """Everything that has to hold between two operations."""
        if not self.checks:
            return
        check_tiers(self.cache)
        for flight in self.flights:
            verify_prefix(self.cache, flight.lease, flight.tokens, flight.done)

    def _release(self, flight: Flight) -> None:
        self.flights.remove(flight)
        self.cache.release(flight.lease)
        self.check()

    def _flight(self, number: int) -> Flight | None:
        return self.flights[number % len(self.flights)] if self.flights else None


def mixed(*parts: Sequence[int]) -> IntArray:
    """One sequence of several pieces."""
    return ids(*(token for part in parts for token in part))


def random_ask(rng: random.Random) -> Ask:
    """A request over two token ids, so that most share a prefix with many others."""
    return Ask(
        new=tuple(rng.randint(0, 1) for _ in range(rng.randint(1, 9))),
        reply_len=rng.choice([0, 0, 1, 2]),
        tip=rng.randint(0, 7),
        cut=rng.choice([0, 0, 0, 1, 3, 9]),
        structural=tuple(rng.randint(1, 20) for _ in range(rng.randint(0, 2))),
        passing=tuple(rng.randint(1, 30) for _ in range(rng.randint(0, 2))),
        salt=rng.choice([None, None, 0, 2]),
        from_mark=rng.random() < 0.7,
        limit=rng.choice([None, None, None, rng.randint(0, 20)]),
    )


def wander(crowd: Crowd, rng: random.Random, num_steps: int) -> None:
    """Random operations, a third of which begin a request."""
    often = ["begin"] * 4 + ["step"] * 3 + ["finish"] * 3 + ["evict"]
    for _ in range(num_steps):
        what = rng.choice([*often, rng.choice(["abort", "fork", "close", "suspend", "evict"])])
        if what == "begin":
            crowd.begin(random_ask(rng))
        elif what == "step":
            crowd.step(rng.randint(0, 7), rng.randint(1, 9))
        elif what == "evict":
            crowd.evict()
        else:
            getattr(crowd, what)(rng.randint(0, 7))
