"""Sessions and requests on a small cache, every step of which is held against the oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agentcache.cache import HybridCache, Lease, OutOfPages
from agentcache.clock import ManualClock
from agentcache.errors import LeaseError
from testkit.helpers import Shadow, absorb, check, verify_prefix
from testkit.oracle import (
    NAMESPACES,
    STAGING_ROWS,
    Key,
    Layout,
    Oracle,
    are_on_one_path,
    chain_of,
    check_marks,
    check_tree_holds,
    key_at,
    key_of,
    snapshot,
)
from testkit.strategies import array

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agentcache.sessions.refs import SessionRef
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Freed, Inserted, Salts
    from agentcache.types import IntArray

DIGESTS = (b"one", b"two")
MAX_LEN = 30
"""Most tokens of a request, its reply included."""
MAX_SESSIONS = 5


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
        self._roots = [self.cache.tree.root(name) for name in NAMESPACES]
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
            keys = {above: key_at(self.cache, above) for above in tree.path(node)}
            freed = remove_leaf(node, now)
            gone = [keys[each] for each in freed.removed]
            self.oracle.remove(gone)
            self._say("removed", *gone)
            return freed

        def dropping(node: Node, kind: str, now: float) -> Any:
            dropped = drop(node, kind, now)
            if dropped is not None:
                self.oracle.drop(key_at(self.cache, node), kind)
                self._say("dropped", key_at(self.cache, node), kind)
            return dropped

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
        if len(self.actors) < MAX_SESSIONS:
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
        branch = min(known_len, length - 1)
        if branch - lease.boundary >= self.layout.min_gain:
            wanted.add(branch)
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
        tables = [*([lease.table] if self.layout.kv else []), *lease.windows.values()]
        asked = sum(max(0, -(-stop // table.page_size) - len(table)) for table in tables)
        held = [len(table) for table in tables], len(lease.own), lease.reserved_len
        try:
            self.cache.reserve(lease, stop)
        except OutOfPages:
            self._say("short")
            assert held == ([len(table) for table in tables], len(lease.own), lease.reserved_len)
            if asked <= self.layout.num_pages:  # else it could never fit, and nobody has to leave
                self._check_nothing_idle()
            return False
        except self._errors:
            self._fail(flight)
            return False
        return True

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
        with pytest.raises(LeaseError):
            HybridCache.release(self.cache, lease)
        with pytest.raises(LeaseError):
            HybridCache.reserve(self.cache, lease, lease.reserved_len)
        with pytest.raises(LeaseError):
            HybridCache.commit(self.cache, lease, flight.tokens, flight.done, lease.row)
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
        if chosen is None or not chosen.tips or len(self.actors) >= MAX_SESSIONS:
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
        kept = [key_at(self.cache, lease.locked) for lease in self.cache.leases]
        for end in self.oracle.ends:
            is_found = beside is not None and are_on_one_path(end, beside)
            assert is_found or any(end == key[: len(end)] for key in kept), f"{end} is idle"

    def look(self, ask: Ask) -> None:
        """A match on its own finds what the oracle says, and changes nothing."""
        namespace, tokens = NAMESPACES[0], array([*ask.new, *ask.reply])
        salts = () if ask.salt is None else ((ask.salt[0], DIGESTS[ask.salt[1]]),)
        key, root = key_of(namespace, tokens, salts), self.cache.tree.root(namespace)
        before = snapshot(self.cache)
        match = self.cache.tree.match(root, tokens, len(tokens), salts)
        assert snapshot(self.cache) == before
        assert match.boundary == self.oracle.boundary(key, len(tokens))
        assert match.lens == self.oracle.lens(key, len(tokens))
        assert match.known_len == self.oracle.known_len(key)

    def check(self) -> None:
        """Everything that has to hold between two operations."""
        check(self.cache)
        check_tree_holds(self.cache, self.oracle)
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
