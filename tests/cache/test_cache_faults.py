"""Whatever fails at whatever moment of a request, everything is given back and nobody else notices.

`on_free` is left out: it only forgets what pages held, after they are free; there is nothing to
give back any more, and nobody it could answer to.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from testkit.helpers import NAMESPACE, ids, make_cache, run
from testkit.oracle import COMPOSITIONS, Layout
from testkit.world import MAX_LEN, Ask, World

from agentcache.cache import OutOfPages
from agentcache.pools.base import Counting
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_SCHEDULES = 1000
PAGE_SIZES = [(1, 1), (4, 4), (4, 3), (1, 4), (4, 1)]

FILLING = ("copy_tail", "save_state", "load_state", "clear_state", "forward")
"""Calls that may also fail once they have done their work, or a part of it."""

CALLS = (*FILLING, "row", "alloc", "alloc_scattered", "acquire", "reserve", "commit", "stand")
"""Every call that can fail which a request makes, or which is made for it."""


class Injected(Exception):
    """What the tests make fail."""


class Faults:
    """Makes calls fail.

    made: the calls so far, in order. failed: how many of each were made to fail.
    """

    def __init__(self, world: World) -> None:
        self.made: list[str] = []
        self.failed: Counter[str] = Counter()
        self._awaited: Sequence[str] = ()
        self._left = 0
        self._afterwards = False
        cache = world.cache
        owners: dict[str, tuple[Any, str]] = {call: (cache.pools, call) for call in FILLING}
        owners |= {call: (world, call) for call in ("forward", "stand")}
        owners |= {call: (cache, call) for call in ("acquire", "reserve", "commit")}
        owners |= {call: (cache.pools.pages, call) for call in ("alloc", "alloc_scattered")}
        owners["row"] = (cache.pools.rows, "alloc")
        for call in CALLS:
            self._watch(call, *owners[call])

    def arm(self, calls: Sequence[str], number: int, *, afterwards: bool) -> None:
        """Let that one of the coming ones of these calls fail, counted from 1.

        afterwards: only once it has done its work, where that can be.
        """
        self._awaited, self._left, self._afterwards = calls, number, afterwards

    def disarm(self) -> None:
        """Let no call fail."""
        self._awaited = ()

    def _watch(self, call: str, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            self.made.append(call)
            self._left -= call in self._awaited
            if call not in self._awaited or self._left != 0:
                return original(*args, **kwargs)
            self.disarm()
            self.failed[call] += 1
            if self._afterwards and call in FILLING:
                original(*args, **kwargs)
            raise Injected(call)

        setattr(owner, name, method)


def narrow(name: str, rng: random.Random) -> Layout:
    """Pages for one request of any length, and little more."""
    page_size, swa_page = rng.choice(PAGE_SIZES)
    kinds = COMPOSITIONS[name]
    num_pages = 2 + 4 * kinds.get("state_pages", 0)
    num_pages += -(-MAX_LEN // page_size) if kinds.get("kv", True) else 0
    num_pages += -(-MAX_LEN // swa_page) + 2 if "window" in kinds else 0
    return Layout(
        page_size=page_size,
        swa_page=swa_page,
        num_pages=num_pages,
        policy=rng.choice(["lru", "session-lru"]),
        **kinds,
    )


def random_ids(rng: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2) for _ in range(rng.randint(low, high)))


def random_ask(rng: random.Random) -> Ask:
    return Ask(
        new=random_ids(rng, 1, 9),
        reply=random_ids(rng, 0, 5),
        cut=rng.choice([0, 0, 0, 1, 3, 9]),
        structural=tuple(rng.sample(range(1, 12), rng.randrange(3))),
        passing=tuple(rng.sample(range(1, 24), rng.randrange(3))),
        salt=(rng.randrange(4), rng.randrange(2)) if rng.random() < 0.2 else None,
        from_mark=rng.random() < 0.7,
        limit=rng.randrange(MAX_LEN) if rng.random() < 0.1 else None,
    )


def random_operation(world: World, rng: random.Random) -> None:
    """One operation, of those that can be made now."""
    number, some = rng.randrange(8), rng.random()
    if world.suspended and some < 0.2:
        world.resume(number)
    elif world.running and some < 0.6:
        request_goes_on(world, rng, number)
    elif some < 0.85:
        world.advance(1.0)
        world.begin(number, rng.randrange(8), random_ask(rng))
    else:
        session_changes(world, rng, number)


def request_goes_on(world: World, rng: random.Random, number: int) -> None:
    act = rng.choice(["step", "step", "step", "finish", "finish", "finish", "suspend", "abort"])
    if act == "step":
        world.step(number, rng.randint(1, 9))
    elif act == "finish":
        world.step(number, MAX_LEN)
        world.finish(number, stopped=rng.random() < 0.2, release_first=rng.random() < 0.5)
    else:
        getattr(world, act)(number)


def session_changes(world: World, rng: random.Random, number: int) -> None:
    act = rng.choice(["fork", "fork", "rewind", "rewind", "open", "close", "idle", "evict"])
    if act == "fork":
        world.fork(number, rng.randrange(8))
    elif act == "rewind":
        world.rewind(number, rng.randrange(8), rng.randrange(3))
    elif act == "idle":
        world.idle(number, 5.0)
    elif act == "evict":
        world.evict()
    else:
        getattr(world, act)(number)


def notice_failure(world: World, leases: set[Any]) -> None:
    """The request that failed holds nothing, and nobody else noticed.

    `check` recounts every page, row, lock and reference from the tree and from the leases that are
    left, and has each of these read what it should.
    """
    assert world.failed is not None
    assert world.failed.lease not in world.cache.leases
    assert world.cache.leases <= leases
    world.failed = None
    world.check()


def whole_request(world: World, ask: Ask) -> bool:
    """A request beside those that run; False where they leave it no room."""
    world.open(0)
    world.advance(1.0)
    running, finished = len(world.running), world.counts["finished"]
    world.begin(0, 0, ask)
    if len(world.running) == running:
        return False
    for _ in range(MAX_LEN):  # a chunk ends early where more is planned than it can file
        world.step(-1, MAX_LEN)
    world.finish(-1)
    if world.counts["finished"] > finished:
        return True
    world.abort(-1)
    return False


def request_alone(world: World, ask: Ask) -> None:
    """Everybody else gives way, and then what is known: from nothing it has to work."""
    while world.running:
        world.abort(0)
    if not whole_request(world, ask):
        world.clear()
        assert whole_request(world, ask)


@pytest.fixture(scope="module")
def schedules() -> tuple[Counter[str], Counter[str]]:
    """What happened in all schedules, and which calls were made to fail."""
    counts: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        rng = random.Random(seed)
        world = World(narrow(list(COMPOSITIONS)[seed % len(COMPOSITIONS)], rng), errors=(Injected,))
        faults = Faults(world)
        run_schedule(world, faults, rng)
        counts += world.counts
        failed += faults.failed
    return counts, failed


def run_schedule(world: World, faults: Faults, rng: random.Random) -> None:
    """Operations of which some fail; after each failure all the others go on, and new ones work."""
    world.open(0)
    for _ in range(30):
        leases = world.cache.leases.copy()
        if rng.random() < 0.5:
            calls = [rng.choice(CALLS)] if rng.random() < 0.7 else CALLS
            faults.arm(calls, rng.choice([1, 1, 1, 2, 3]), afterwards=rng.random() < 0.5)
        random_operation(world, rng)
        faults.disarm()
        if world.failed is not None:
            notice_failure(world, leases)
            if rng.random() < 0.2 and not whole_request(world, random_ask(rng)):
                request_alone(world, random_ask(rng))
    request_alone(world, random_ask(rng))
    world.check()
    world.end()


def test_random_schedules_with_faults_leave_nothing_behind(schedules: Any) -> None:
    """The schedules check themselves; here, that everything happened in them, and often."""
    counts, failed = schedules
    often: tuple[str, ...] = (
        "hit",
        "hit inside a page",
        "copied",
        "removed",
        "dropped",
        "forked",
        "rewound",
    )
    often += ("parallel", "suspended", "refused", "short", "aborted", "finished")
    assert {what: counts[what] for what in often if counts[what] < 200} == {}
    assert {call: failed[call] for call in CALLS if failed[call] < 20} == {}
    assert sum(failed.values()) > NUM_SCHEDULES


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_fault_at_each_single_call_leaves_nothing_behind(name: str) -> None:
    """One history, as often as it makes calls; each time another of them fails."""
    expected = expected_calls(name)
    histories = ((seed, history(name, seed).made) for seed in range(20))
    seed, made = next((s, made) for s, made in histories if set(made) == expected)
    for number, call in enumerate(made, 1):
        for afterwards in (False, True)[: 1 + (call in FILLING)]:
            faults = history(name, seed, number, afterwards=afterwards)
            assert faults.failed == {call: 1}


def expected_calls(name: str) -> set[str]:
    """The calls that a cache of that composition makes."""
    expected = set(CALLS)
    if not COMPOSITIONS[name].get("state_pages"):
        expected -= {"save_state", "load_state", "clear_state", "alloc_scattered"}
    if name == "state":
        expected -= {"alloc", "copy_tail"}
    return expected


def history(name: str, seed: int, number: int = 0, *, afterwards: bool = False) -> Faults:
    """The same operations every time, up to the call of that number, which fails; 0: none does."""
    rng = random.Random(seed)
    world = World(replace(narrow(name, rng), page_size=4, swa_page=3), errors=(Injected,))
    faults = Faults(world)
    world.open(0)
    if number:
        faults.arm(CALLS, number, afterwards=afterwards)
    for _ in range(50):
        leases = world.cache.leases.copy()
        random_operation(world, rng)
        if world.failed is not None:
            notice_failure(world, leases)
            request_alone(world, random_ask(rng))
            break
    world.check()
    world.end()
    return faults


def test_reservation_that_fits_for_one_kind_only_takes_nothing() -> None:
    cache = make_cache(num_pages=6, page_size=4, window=4, state_pages=0)
    lease = cache.acquire(NAMESPACE, ids(*range(16)))
    with pytest.raises(OutOfPages):
        cache.reserve(lease, 16)  # four pages of each kind
    assert len(lease.table) == 0
    assert lease.own == []
    assert cache.pools.pages.num_used == 0


def test_failed_request_leaves_the_rest_of_its_page_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = make_cache(page_size=4, window=2, state_pages=0)
    run(cache, ids(1))
    (node,) = cache.tree.nodes()
    pages = node.data[Kind.FULL].slots.tolist()
    ahead = cache.acquire(NAMESPACE, ids(1, *range(2, 13)))
    for length in (8, 12):  # by then the window's page was given back, but not the rest of it
        cache.reserve(ahead, length)
    cache.release(ahead)

    def fail(*args: Any) -> None:
        raise Injected("copy_tail")

    with monkeypatch.context() as patch:
        patch.setattr(Counting, "copy_tail", fail)
        with pytest.raises(Injected):
            cache.acquire(NAMESPACE, ids(1, 9))
    following = cache.acquire(NAMESPACE, ids(1, 9))
    assert following.boundary == 1
    assert following.table.pages.tolist() == pages
