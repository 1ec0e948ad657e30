"""What a cache should do, worked out by brute force, and a world of sessions to hold it against.

The oracle keeps one set entry per position and knows nothing of nodes, pages or matching. It is
told what leaves the tree, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from testkit.helpers import Shadow, absorb, check, make_cache, verify_prefix
from testkit.strategies import array

from agentcache.cache import HybridCache, Lease, OutOfPages
from agentcache.clock import ManualClock
from agentcache.errors import LeaseError
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agentcache.pools.table import PageTable
    from agentcache.sessions.refs import SessionRef
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Freed, Inserted, Match, Salts

Key = tuple[Any, ...]
"""A prefix: its namespace, then one entry per token, with a digest where a salt begins."""

NAMESPACES = (b"left", b"right")
DIGESTS = (b"one", b"two")
MAX_LEN = 30
STAGING_ROWS = 2
"""Rows besides those of requests, for states at planned lengths inside a chunk."""


def key_of(namespace: bytes, tokens: IntArray, salts: Salts) -> Key:
    """The whole sequence as a key; its prefix of p tokens is `key[:p + 1]`."""
    at = dict(salts)
    ids = tokens.tolist()
    return (namespace, *((at[i], token) if i in at else token for i, token in enumerate(ids)))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which kinds a cache has, and its sizes. window 0, state_pages 0: not that kind."""

    kv: bool = True
    window: int = 0
    state_pages: int = 0
    page_size: int = 1
    swa_page: int = 1
    num_pages: int = 24
    policy: str = "session-lru"
    min_gain: int = 1

    def cache(self) -> HybridCache:
        """An empty cache of three rows over pools that remember what every slot holds."""
        cache = make_cache(
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_rows=3,
            state_pages=self.state_pages,
            policy=self.policy,
            kv=self.kv,
            window=self.window,
            swa_page=self.swa_page,
            min_gain=self.min_gain,
            shadow=True,
        )
        cache.pools.absorbed.extend([None] * STAGING_ROWS)  # type: ignore[attr-defined]
        return cache


COMPOSITIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "full-swa": {"window": 5},
    "full-state": {"state_pages": 2},
    "full-swa-state": {"window": 5, "state_pages": 1},
    "state": {"kv": False, "state_pages": 2},
    "swa": {"kv": False, "window": 5},
}


class Oracle:
    """Prefixes that can be reused, kept position by position.

    known: tokens that were filed. ends: where a filed sequence ended or parted from another.
    states: positions with a checkpoint. windows: positions whose window is kept.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.known: set[Key] = set()
        self.ends: set[Key] = set()
        self.states: set[Key] = set()
        self.windows: set[Key] = set()

    def reach(self, at: int) -> int:
        """The first position that the token at `at` attends to."""
        return max(0, at - self.layout.window + 1)

    def kinds(self) -> dict[str, set[Key]]:
        """Per kind the prefixes it accepts."""
        out: dict[str, set[Key]] = {}
        if self.layout.kv:
            out[Kind.FULL] = self.known
        if self.layout.window:
            out[Kind.SWA] = self.windows
        if self.layout.state_pages:
            out[Kind.STATE] = self.states
        return out

    def accepts(self, key: Key) -> bool:
        """Whether a request can resume at the end of this prefix."""
        return all(key in accepted for accepted in self.kinds().values())

    def known_len(self, key: Key) -> int:
        """How many leading tokens are known."""
        return _longest(key, len(key) - 1, lambda prefix: prefix in self.known)

    def boundary(self, key: Key, limit: int) -> int:
        """The longest prefix of at most `limit` tokens that can be resumed at."""
        return _longest(key, limit, self.accepts)

    def lens(self, key: Key, limit: int) -> dict[str, int]:
        """`boundary` if there were only that one kind, for each."""
        return {
            kind: _longest(key, limit, accepted.__contains__)
            for kind, accepted in self.kinds().items()
        }

    def insert(self, key: Key) -> None:
        """The tokens of a sequence are filed."""
        parting = self.known_len(key)
        if parting:
            self.ends.add(key[: parting + 1])
        for at in range(parting + 1, len(key)):
            self.known.add(key[: at + 1])
            if isinstance(key[at], tuple) and at > 1:
                self.ends.add(key[:at])
        self.ends.add(key)

    def file(self, key: Key) -> None:
        """What makes the end of a filed sequence a boundary is kept from now on."""
        length = len(key) - 1
        if self.layout.state_pages:
            self.states.add(key)
        if self.layout.window and key not in self.windows:
            covered = (p for p in self._stretch(key) if self.reach(p) >= self.reach(length))
            self.windows.update(key[: p + 1] for p in covered)

    def drop(self, key: Key, kind: str) -> None:
        """One kind's data at an end left, and its tokens stay."""
        assert key in self.ends
        if kind == Kind.STATE:
            self.states.remove(key)
        else:
            assert kind == Kind.SWA
            self.windows.difference_update(key[: p + 1] for p in self._stretch(key))

    def remove(self, keys: Sequence[Key]) -> None:
        """An end left with what leads to it, and then those above it."""
        for number, key in enumerate(keys):
            assert number == 0 or not self.accepts(key), "something useful left with another"
            gone = {key[: p + 1] for p in self._stretch(key)}
            for kept in (self.known, self.states, self.windows):
                kept -= gone
            self.ends.remove(key)
            longer = {k for k in self.known if k[: len(key)] == key}
            assert not longer, "something left from under what goes on from it"

    def _stretch(self, key: Key) -> range:
        """The positions of the tokens that lead to an end from the one above it."""
        above = _longest(key, len(key) - 2, self.ends.__contains__)
        return range(above + 1, len(key))


def _longest(key: Key, limit: int, accepts: Callable[[Key], bool]) -> int:
    return max((p for p in range(1, limit + 1) if accepts(key[: p + 1])), default=0)


def _are_on_one_path(one: Key, other: Key) -> bool:
    common = min(len(one), len(other))
    return one[:common] == other[:common]


@dataclass(eq=False, slots=True)
class Tip:
    """One end of a session."""

    tokens: IntArray
    salts: Salts
    ref: SessionRef
    parent: Tip | None


@dataclass(eq=False, slots=True)
class Actor:
    """One session."""

    namespace: bytes
    tips: list[Tip] = field(default_factory=list)
    closed: bool = False


@dataclass(eq=False, slots=True)
class Flight:
    """One request: the tokens that its end will have absorbed, and how many it has.

    ask: keyword arguments of its `acquire`, but for the tokens.
    """

    actor: Actor
    base: Tip | None
    tokens: IntArray
    prompt_len: int
    shared_len: int
    key: Key
    ask: dict[str, Any]
    lease: Lease | None = None
    done: int = 0

    @property
    def absorbed_len(self) -> int:
        """Where it ends: the last token of a reply is sampled and never absorbed."""
        return max(self.prompt_len, len(self.tokens) - 1)

    @property
    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease


@dataclass(frozen=True, slots=True)
class Ask:
    """What a turn asks for, in numbers that mean something in any state of the world.

    cut: tokens of the tip's history that are left out. salt: (offset into the new tokens, digest).
    """

    new: tuple[int, ...]
    reply: tuple[int, ...] = ()
    cut: int = 0
    structural: tuple[int, ...] = ()
    passing: tuple[int, ...] = ()
    salt: tuple[int, int] | None = None
    from_mark: bool = True
    limit: int | None = None


class World:
    """Sessions and requests on one cache, every step of which is held against the oracle.

    Operations take numbers and do nothing where there is nothing to do, so that any sequence of
    them is a program. `errors` are what is expected to be raised from within the cache: the request
    concerned is given up then, as an engine would.
    """

    def __init__(self, layout: Layout, errors: tuple[type[Exception], ...] = ()) -> None:
        self.layout = layout
        self.cache = layout.cache()
        self.oracle = Oracle(layout)
        self.actors: list[Actor] = []
        self.flights: list[Flight] = []
        self.events: list[tuple[Any, ...]] = []
        self.counts: Counter[str] = Counter()
        self.failed: Flight | None = None
        self._errors = errors
        self._roots = {self.cache.tree.root(name): name for name in NAMESPACES}
        self._filing: Key = ()
        self._watch()

    def _watch(self) -> None:
        """Tell the oracle when something is filed and what leaves; count what is copied."""
        tree, pools = self.cache.tree, self.cache.pools
        remove_leaf, drop, copy_tail = tree.remove_leaf, tree.drop, pools.copy_tail
        insert = tree.insert

        def inserting(*args: Any, **kwargs: Any) -> Inserted:
            inserted = insert(*args, **kwargs)
            self.oracle.insert(self._filing)
            return inserted

        def removing(node: Node, now: float) -> Freed:
            keys = {above: self.key_at(above) for above in tree.path(node)}
            freed = remove_leaf(node, now)
            gone = [keys[each] for each in freed.removed]
            self.oracle.remove(gone)
            self._say("removed", *gone)
            return freed

        def dropping(node: Node, kind: str, now: float) -> IntArray | None:
            slots = drop(node, kind, now)
            if slots is not None:
                self.oracle.drop(self.key_at(node), kind)
                self._say("dropped", self.key_at(node), kind)
            return slots

        def copying(kind: str, source: int, target: int, count: int) -> None:
            self.counts["copied"] += 1
            copy_tail(kind, source, target, count)

        tree.insert = inserting  # type: ignore[method-assign]
        tree.remove_leaf = removing  # type: ignore[method-assign]
        tree.drop = dropping  # type: ignore[method-assign]
        pools.copy_tail = copying  # type: ignore[method-assign]

    def _say(self, what: str, *details: Any) -> None:
        self.counts[what] += 1
        self.events.append((what, *details))

    def key_at(self, node: Node) -> Key:
        """The prefix that ends at a node."""
        parts: list[Any] = []
        while not node.is_root:
            ids = node.tokens.tolist()
            first = ids[0] if node.salt is None else (node.salt, ids[0])
            parts[:0] = [first, *ids[1:]]
            assert node.parent is not None
            node = node.parent
        return (self._roots[node], *parts)

    @property
    def running(self) -> list[Flight]:
        """The requests that hold a lease."""
        return [flight for flight in self.flights if flight.lease is not None]

    @property
    def suspended(self) -> list[Flight]:
        """The requests that gave theirs back and wait for another."""
        return [flight for flight in self.flights if flight.lease is None]

    def open(self, namespace: int) -> None:
        """A new session."""
        if len(self.actors) < 5:
            self.actors.append(Actor(NAMESPACES[namespace % len(NAMESPACES)]))

    def begin(self, actor: int, tip: int, ask: Ask) -> None:
        """A session's turn begins at one of its tips, or at nothing."""
        chosen = self._open_actor(actor)
        if chosen is None:
            return
        base = chosen.tips[tip % len(chosen.tips)] if chosen.tips else None
        self._acquire(self._flight(chosen, base, ask))

    def _flight(self, actor: Actor, base: Tip | None, ask: Ask) -> Flight:
        old = array([]) if base is None else base.tokens
        room = MAX_LEN - len(ask.new) - len(ask.reply)
        shared = max(0, min(len(old) - ask.cut, room))
        prompt_len = shared + len(ask.new)
        tokens = np.concatenate([old[:shared], array([*ask.new, *ask.reply])])
        salts = () if base is None else tuple(s for s in base.salts if s[0] < shared)
        if ask.salt is not None and ask.salt[0] < len(ask.new):
            salts = (*salts, (shared + ask.salt[0], DIGESTS[ask.salt[1]]))
        arguments: dict[str, Any] = {"salts": salts}
        arguments |= {"structural": ask.structural, "passing": ask.passing}
        if ask.limit is not None:
            arguments["limit"] = ask.limit % (prompt_len + 1)
        if base is not None and ask.from_mark:
            arguments |= {"after": base.ref, "known_len": shared}
        key = key_of(actor.namespace, tokens, salts)
        return Flight(actor, base, tokens, prompt_len, shared, key, arguments)

    def _acquire(self, flight: Flight) -> None:
        """Also of a request that was suspended, with the tokens it had by then."""
        tokens = flight.tokens[: max(flight.prompt_len, flight.done + 1)]
        limit = flight.ask.get("limit", len(tokens) - 1)
        key = flight.key[: len(tokens) + 1]
        expected = self.oracle.boundary(key, limit)
        expected_lens = self.oracle.lens(key, limit)
        known_len = self.oracle.known_len(key)
        tails = self._tails()
        try:
            lease = self.cache.acquire(flight.actor.namespace, tokens, **flight.ask)
        except OutOfPages:
            self._say("refused")
            self._check_tails(tails)
            if self.cache.pools.rows.num_free:
                self._check_nothing_idle(beside=key[: expected + 1])
            return
        except self._errors:
            self._check_tails(tails)
            self.failed = flight
            return
        assert lease.boundary == lease.match.boundary == expected
        assert lease.match.known_len == known_len
        assert lease.match.lens == expected_lens
        self._check_plan(flight, lease, len(tokens), known_len)
        self._say("acquired", expected, lease.plan)
        self.counts["hit"] += expected > 0
        self.counts["hit inside a page"] += expected % self.layout.page_size > 0
        flight.lease, flight.done = lease, expected
        if flight not in self.flights:
            self.flights.append(flight)

    def _tails(self) -> dict[int, int]:
        """Pages in which a sequence may go on, and from where on."""
        pages = self.cache.pools.pages
        size = max(self.layout.page_size, self.layout.swa_page)
        free = np.flatnonzero((pages.refs > 0) & (pages.fill < size))
        return {page: int(pages.fill[page]) for page in free.tolist()}

    def _check_tails(self, before: dict[int, int]) -> None:
        """A request that was refused has used up no page's rest."""
        held = self.cache.pools.pages.refs > 0
        assert self._tails() == {page: at for page, at in before.items() if held[page]}

    def _check_plan(self, flight: Flight, lease: Lease, length: int, known_len: int) -> None:
        wanted = {*flight.ask["structural"], *flight.ask["passing"]}
        if known_len - lease.boundary >= self.layout.min_gain:
            wanted.add(known_len)
        assert lease.plan == tuple(sorted(p for p in wanted if lease.boundary < p < length))

    def step(self, flight: int, num: int) -> None:
        """A request absorbs up to so many tokens, and files what was planned there."""
        chosen = self._running(flight)
        if chosen is None:
            return
        stop = min(chosen.done + num, chosen.absorbed_len)
        planned = [p for p in chosen.held.plan if chosen.done < p <= stop]
        if len(planned) > STAGING_ROWS:
            planned = planned[:STAGING_ROWS]
            stop = planned[-1]
        if self._reserve(chosen, stop):
            self._compute(chosen, stop, planned)

    def _reserve(self, flight: Flight, stop: int) -> bool:
        lease = flight.held
        held = [len(pages) for pages in lease.own], len(lease.table), lease.reserved_len
        asked = [-(-stop // table.page_size) - len(table) for table in self._tables(lease)]
        try:
            self.cache.reserve(lease, stop)
        except OutOfPages as short:
            self._say("short")
            assert held == ([len(pages) for pages in lease.own], len(lease.table), lease.reserved_len)
            assert short.missing > 0
            if sum(max(0, num) for num in asked) <= self.layout.num_pages:  # else it never fits
                self._check_nothing_idle()
            return False
        except self._errors:
            self._fail(flight)
            return False
        return True

    def _tables(self, lease: Lease) -> list[PageTable]:
        return [*([lease.table] if self.layout.kv else []), *lease.windows.values()]

    def _compute(self, flight: Flight, stop: int, planned: Sequence[int]) -> None:
        pools = self.cache.pools
        assert isinstance(pools, Shadow)
        try:
            self.forward(flight, stop)
        except self._errors:
            self._fail(flight)
            return
        flight.done = stop
        for row, length in enumerate(planned, pools.rows.num_rows):
            pools.absorbed[row] = tuple(flight.tokens[:length].tolist())
            if not self._commit(flight, length, row):
                return

    def forward(self, flight: Flight, stop: int) -> None:
        """The model's pass over a request's next tokens."""
        absorb(self.cache, flight.held, flight.tokens, flight.done, stop)

    def _commit(self, flight: Flight, length: int, row: int) -> bool:
        """File a prefix. False where that failed with an error."""
        lease, key = flight.held, flight.key[: length + 1]
        is_new = length > lease.committed_len
        self._filing = key
        try:
            kept = self.cache.commit(lease, flight.tokens, length, row)
        except self._errors:
            self._fail(flight)
            return False
        assert lease.committed_len >= length
        self._say("committed", length, kept)
        if kept and is_new:
            self.oracle.file(key)
        if is_new and not kept:
            assert self.cache.pools.pages.num_free < self.layout.state_pages
            self._check_nothing_idle()
        assert not kept or self.oracle.accepts(key)
        return True

    def finish(self, flight: int, *, stopped: bool = False, release_first: bool = False) -> None:
        """A request ends: its end is filed, its tip takes the place of the one it went on from.

        stopped: by a stop string, which leaves a history that differs from what was sampled.
        """
        chosen = self._running(flight)
        if chosen is None or chosen.done < chosen.absorbed_len:
            return
        lease = chosen.held
        if not stopped and not self._commit(chosen, chosen.done, lease.row):
            return
        frontier = lease.frontier
        while stopped and frontier.end > chosen.prompt_len:
            assert frontier.parent is not None
            frontier = frontier.parent
        filed = [node for node in lease.filed if node is not frontier]
        after = None if chosen.base is None else chosen.base.ref
        try:
            ref = self.stand(frontier, filed, after=after, lease=lease)
        except self._errors:
            self._fail(chosen)
            return
        if release_first:
            self._release(chosen)
        self._move_on(chosen, ref, stopped)
        if not release_first:
            self._release(chosen)
        self.counts["finished"] += 1

    def _move_on(self, flight: Flight, ref: SessionRef, stopped: bool) -> None:
        actor, base = flight.actor, flight.base
        if actor.closed:
            self.cache.leave(ref)
            return
        tokens = flight.tokens[: flight.prompt_len] if stopped else flight.tokens
        goes_on = base is not None and flight.shared_len == len(base.tokens)
        actor.tips.append(Tip(tokens, flight.ask["salts"], ref, base if goes_on else None))
        if base in actor.tips:
            assert base is not None
            actor.tips.remove(base)
            self.cache.leave(base.ref)
        elif base is not None:
            self.counts["parallel"] += 1

    def stand(
        self, frontier: Node, filed: Iterable[Node], *, after: SessionRef | None, lease: Lease
    ) -> SessionRef:
        """`stand`, with the shared boundaries that the new mark has to hold."""
        above = [n for n in self.cache.tree.path(frontier) if n is not frontier and n.structural]
        begun = [] if after is None else self.cache.tree.path(after.frontier.node)
        before = set() if after is None else chain_of(after)
        ref = self.cache.stand(frontier, filed, after=after, lease=lease)
        holds = {node for node in chain_of(ref) if node.generation == 0}
        must = {n for n in above if n in before or n not in begun}
        assert must <= holds <= set(above)
        return ref

    def abort(self, flight: int) -> None:
        """A request is given up wherever it is."""
        chosen = self._running(flight)
        if chosen is not None:
            self._release(chosen)
            self.counts["aborted"] += 1

    def _release(self, flight: Flight) -> None:
        lease = flight.held
        self.cache.release(lease)
        for again in (
            lambda: HybridCache.release(self.cache, lease),
            lambda: HybridCache.reserve(self.cache, lease, lease.reserved_len),
            lambda: HybridCache.commit(self.cache, lease, flight.tokens, flight.done, lease.row),
        ):
            try:
                again()
            except LeaseError:
                continue
            raise AssertionError("a lease was used after its release")
        self.flights.remove(flight)

    def _fail(self, flight: Flight) -> None:
        self._release(flight)
        self.failed = flight

    def suspend(self, flight: int) -> None:
        """A request publishes what it has and gives its lease back."""
        chosen = self._running(flight)
        if chosen is None:
            return
        lease, key = chosen.held, chosen.key[: chosen.done + 1]
        is_new = chosen.done > lease.committed_len
        self._filing = key
        try:
            kept = self.cache.suspend(lease, chosen.tokens, chosen.done)
        except self._errors:
            self._fail(chosen)
            return
        if kept and is_new:
            self.oracle.file(key)
        chosen.lease = None
        self._say("suspended", chosen.done, kept)

    def resume(self, flight: int) -> None:
        """A suspended request is acquired anew."""
        waiting = self.suspended
        if waiting:
            self._acquire(waiting[flight % len(waiting)])

    def fork(self, actor: int, tip: int) -> None:
        """A second session stands where one does."""
        chosen = self._open_actor(actor)
        if chosen is None or not chosen.tips or len(self.actors) >= 5:
            return
        source = chosen.tips[tip % len(chosen.tips)]
        ref = self.cache.stand_again(source.ref)
        self.actors.append(
            Actor(chosen.namespace, [Tip(source.tokens, source.salts, ref, source.parent)])
        )
        self.counts["forked"] += 1

    def rewind(self, actor: int, tip: int, turns: int) -> None:
        """A session stands again where an earlier turn ended, or at nothing."""
        chosen = self._open_actor(actor)
        if chosen is None or not chosen.tips:
            return
        leaving = chosen.tips[tip % len(chosen.tips)]
        target: Tip | None = leaving
        for _ in range(turns):
            target = None if target is None else target.parent
        if target is not None:
            ref = self.cache.stand_again(target.ref)
            chosen.tips.append(Tip(target.tokens, target.salts, ref, target.parent))
        chosen.tips.remove(leaving)
        self.cache.leave(leaving.ref)
        self.counts["rewound"] += 1

    def close(self, actor: int) -> None:
        """A session is over, whether or not one of its requests runs."""
        chosen = self._open_actor(actor)
        if chosen is None:
            return
        chosen.closed = True
        for tip in chosen.tips:
            self.cache.leave(tip.ref)
            self.cache.leave(tip.ref)
        chosen.tips.clear()
        self.actors.remove(chosen)

    def idle(self, actor: int, seconds: float) -> None:
        """A session says when it will be back."""
        chosen = self._open_actor(actor)
        if chosen is not None:
            self.cache.expect(seconds, *(tip.ref for tip in chosen.tips))

    def advance(self, seconds: float) -> None:
        """Time passes."""
        clock = self.cache._clock
        assert isinstance(clock, ManualClock)
        clock.advance(seconds)

    def evict(self) -> None:
        """One entry leaves, if any is idle."""
        before = self.counts["removed"] + self.counts["dropped"]
        if self.cache.evict_one():
            assert self.counts["removed"] + self.counts["dropped"] > before
        else:
            self._check_nothing_idle()

    def clear(self) -> None:
        """Everything idle leaves."""
        free = self.cache.pools.pages.num_free
        assert self.cache.clear() == self.cache.pools.pages.num_free - free
        self._check_nothing_idle()

    def _check_nothing_idle(self, beside: Key | None = None) -> None:
        """What is left is on the path of a running request, and without checkpoints.

        beside: the prefix that a request which was just refused had found, which it held by then.
        """
        assert not self.oracle.states
        assert not self.oracle.windows
        kept = [self.key_at(lease.locked) for lease in self.cache.leases]
        for end in self.oracle.ends:
            is_found = beside is not None and _are_on_one_path(end, beside)
            assert is_found or any(end == key[: len(end)] for key in kept), f"{end} is idle"

    def look(self, ask: Ask) -> None:
        """A match on its own finds what the oracle says, and changes nothing."""
        namespace, tokens = NAMESPACES[0], array([*ask.new, *ask.reply])
        salts = () if ask.salt is None else ((ask.salt[0], DIGESTS[ask.salt[1]]),)
        key, root = key_of(namespace, tokens, salts), self.cache.tree.root(namespace)
        before = self.snapshot()
        match: Match = self.cache.tree.match(root, tokens, len(tokens), salts)
        assert self.snapshot() == before
        assert match.boundary == self.oracle.boundary(key, len(tokens))
        assert match.lens == self.oracle.lens(key, len(tokens))
        assert match.known_len == self.oracle.known_len(key)

    def snapshot(self) -> list[Any]:
        """Every field of every node, and the pages' counters."""
        out: list[Any] = [self.cache.pools.pages.refs.tolist(), self.cache.pools.pages.fill.tolist()]
        for node in (*self._roots, *self.cache.tree.nodes()):
            fields = {name: getattr(node, name) for name in node.__slots__}
            fields["tokens"] = node.tokens.tolist()
            fields["children"] = {key: id(child) for key, child in node.children.items()}
            fields["data"] = {
                kind: (data.start, data.tier, data.slots.tolist())
                for kind, data in node.data.items()
            }
            out.append(fields)
        return out

    def check(self) -> None:
        """Everything that has to hold between two operations."""
        check(self.cache)
        self._check_tree()
        check_marks(self.cache, [tip.ref for actor in self.actors for tip in actor.tips])
        locks = Counter(lease.locked for lease in self.cache.leases)
        for node in (*self._roots, *self.cache.tree.nodes()):
            assert node.locks == locks[node]
        running = self.running
        assert {flight.lease for flight in running} == self.cache.leases
        for flight in running:
            verify_prefix(self.cache, flight.held, flight.tokens, flight.done)
            committed_len = flight.held.committed_len
            assert not committed_len or flight.key[: committed_len + 1] in self.oracle.known

    def _check_tree(self) -> None:
        """The tree holds what was filed and did not leave, and says so."""
        found = Oracle(self.layout)
        for node in self.cache.tree.nodes():
            key = self.key_at(node)
            found.ends.add(key)
            found.known.update(key[: p + 1] for p in range(node.start + 1, node.end + 1))
            if Kind.STATE in node.data:
                found.states.add(key)
            if Kind.SWA in node.data:
                start = node.data[Kind.SWA].start
                inside = range(node.start + 1, node.end + 1)
                found.windows.update(key[: p + 1] for p in inside if found.reach(p) >= start)
        for name in ("ends", "known", "states", "windows"):
            assert getattr(found, name) == getattr(self.oracle, name), name

    def end(self) -> None:
        """Everybody goes, and nothing is left."""
        for flight in self.running:
            self._release(flight)
        self.flights.clear()
        while self.actors:
            self.close(0)
        self.clear()
        self.check()
        assert self.cache.pools.pages.num_used == 0
        assert self.cache.pools.rows.num_free == self.cache.pools.rows.num_rows
        assert all(root.refs == 0 and not root.children for root in self._roots)

    def _open_actor(self, number: int) -> Actor | None:
        return self.actors[number % len(self.actors)] if self.actors else None

    def _running(self, number: int) -> Flight | None:
        running = self.running
        return running[number % len(running)] if running else None


def chain_of(ref: SessionRef) -> set[Node]:
    """The shared boundaries that a mark holds."""
    out, anchor = set(), ref._anchor
    while anchor is not None:
        out.add(anchor.at.node)
        anchor = anchor.above
    return out


def check_marks(cache: HybridCache, marks: Iterable[SessionRef]) -> None:
    """References of nodes and chains, counted from nothing, are what they say."""
    refs: Counter[Node] = Counter()
    holders: Counter[Any] = Counter()
    for mark in marks:
        assert mark.held
        refs[mark.frontier.node] += mark.frontier.alive
        anchor = mark._anchor
        while anchor is not None:
            holders[anchor] += 1
            if holders[anchor] > 1:
                break  # what lies above it was counted
            anchor = anchor.above
    for anchor, count in holders.items():
        assert anchor.holders == count
        refs[anchor.at.node] += anchor.at.alive
    for node in (*map(cache.tree.root, NAMESPACES), *cache.tree.nodes()):
        assert node.refs == refs[node], f"{node}: {refs[node]} counted"
        assert not (node.refs and node.superseded), f"{node} is referenced and superseded"
