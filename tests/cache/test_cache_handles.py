"""A request that goes on from a mark gets what it would get without it, at the cost of what is new.

Two equal caches are driven side by side: requests of one start at their session's mark, those of
the other walk from the root. Every lease has to be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import (
    NAMESPACE,
    Agent,
    absorb,
    check,
    ids,
    make_cache,
    tables,
    tick,
    verify_prefix,
)
from testkit.strategies import array, tokens

from agentcache.cache import HybridCache, Lease, OutOfPages, SessionRef
from agentcache.cache.tables import path_pages
from agentcache.tree.node import Node
from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.types import IntArray

LAYOUTS: list[dict[str, Any]] = [
    {"state_pages": 1},
    {"state_pages": 0},
    {"state_pages": 0, "window": 5, "swa_page": 2},
    {"state_pages": 0, "window": 5, "swa_page": 3, "kv": False},
    {"state_pages": 2, "window": 9, "swa_page": 1},
    {"state_pages": 2, "kv": False},
]


def span(start: int, stop: int) -> IntArray:
    return np.arange(start, stop, dtype=np.int32)


def described(cache: HybridCache, lease: Lease) -> dict[str, Any]:
    """All that a lease says about where it goes on and what it reads."""
    match = lease.match
    return {
        "boundary": lease.boundary,
        "plan": lease.plan,
        "known_len": match.known_len,
        "lens": match.lens,
        "vetoed_by": match.vetoed_by,
        "place": (match.node.end, match.known_node.end, lease.locked.end),
        "pages": {k: (t.first, t.pages.tolist()) for k, t in tables(cache, lease).items()},
        "runs": {
            k: list(t.runs(t.first * t.page_size, t.capacity))
            for k, t in tables(cache, lease).items()
        },
    }


class Side:
    """One of the two caches, with its own marks and leases."""

    def __init__(self, layout: dict[str, Any], num_pages: int, by_mark: bool) -> None:
        self.cache = make_cache(num_pages=num_pages, num_rows=3, shadow=True, **layout)
        self.by_mark = by_mark
        self.marks: list[SessionRef] = []
        self.leases: list[Lease] = []

    def acquire(self, prompt: IntArray, mark: int | None, known_len: int, structural: int) -> bool:
        tick(self.cache)
        how: dict[str, Any] = {}
        if mark is not None and self.by_mark:
            how = {"after": self.marks[mark], "known_len": known_len}
        try:
            lease = self.cache.acquire(NAMESPACE, prompt, structural=(structural,), **how)
        except OutOfPages:
            return False
        verify_prefix(self.cache, lease, prompt, lease.boundary)
        self.leases.append(lease)
        return True

    def advance(self, which: int, sequence: IntArray, start: int, stop: int, file: bool) -> bool:
        lease = self.leases[which]
        try:
            self.cache.reserve(lease, stop)
        except OutOfPages:
            return False
        absorb(self.cache, lease, sequence, start, stop)
        if file:
            self.cache.commit(lease, sequence, stop, lease.row)
        return True

    def stand(self, which: int, base: int | None) -> None:
        lease = self.leases[which]
        filed = [node for node in lease.filed if node is not lease.frontier]
        after = None if base is None else self.marks[base]
        self.marks.append(self.cache.stand(lease.frontier, filed, after=after, lease=lease))
        if after is not None:
            self.cache.leave(after)

    def release(self, which: int) -> None:
        self.cache.release(self.leases.pop(which))


class Twins:
    """Both sides, and the tokens of what they do. Marks stay known after they were left."""

    def __init__(self, layout: dict[str, Any], num_pages: int) -> None:
        self.sides = [Side(layout, num_pages, by_mark) for by_mark in (True, False)]
        self.paths: list[IntArray] = []
        self.running: list[tuple[IntArray, int | None, int]] = []

    def each(self, act: str, *args: Any) -> Any:
        """Do the same on both sides; they have to answer the same."""
        one, other = [getattr(side, act)(*args) for side in self.sides]
        assert one == other
        return one

    def begin(self, mark: int, cut: int, new: list[int], structural: int) -> None:
        """A turn that goes on from a mark, standing or left, or a new session's first."""
        base = mark % len(self.paths) if self.paths and mark < 12 else None
        path = array([]) if base is None else self.paths[base]
        shared = path[: max(0, len(path) - cut)]
        prompt = np.concatenate([shared, array(new)])
        if self.each("acquire", prompt, base, len(shared), structural):
            descriptions = [described(side.cache, side.leases[-1]) for side in self.sides]
            assert descriptions[0] == descriptions[1]
            self.running.append((prompt, base, self.sides[0].leases[-1].boundary))

    def join(self, which: int) -> None:
        """A request for what another one is computing."""
        if self.running:
            prompt, base, _ = self.running[which % len(self.running)]
            if self.each("acquire", prompt, base, 0, 99):
                self.running.append((prompt, base, self.sides[0].leases[-1].boundary))

    def advance(self, which: int, num: int, file: bool) -> None:
        if not self.running:
            return
        which %= len(self.running)
        sequence, base, at = self.running[which]
        stop = min(at + num, len(sequence))
        if not self.each("advance", which, sequence, at, stop, file):
            self.abort(which)
            return
        self.running[which] = sequence, base, stop

    def finish(self, which: int) -> None:
        if not self.running:
            return
        which %= len(self.running)
        sequence, base, at = self.running[which]
        if not self.each("advance", which, sequence, at, len(sequence), True):
            self.abort(which)
            return
        self.each("stand", which, base)
        self.paths.append(sequence)
        self.abort(which)

    def abort(self, which: int) -> None:
        if self.running:
            which %= len(self.running)
            self.running.pop(which)
            self.each("release", which)

    def fork(self, which: int) -> None:
        """A mark where one is or was: a fork, or a session that goes back."""
        if self.paths:
            which %= len(self.paths)
            for side in self.sides:
                side.marks.append(side.cache.stand_again(side.marks[which]))
            self.paths.append(self.paths[which])

    def leave(self, which: int) -> None:
        if self.paths:
            for side in self.sides:
                side.cache.leave(side.marks[which % len(self.paths)])

    def evict(self, num: int) -> None:
        for _ in range(num):
            assert len({side.cache.evict_one() for side in self.sides}) == 1

    def check(self) -> None:
        for side in self.sides:
            check(side.cache)
        assert len({str(side.cache.used_pages()) for side in self.sides}) == 1


WHICH = st.integers(0, 15)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), WHICH, st.integers(0, 3), tokens(max_size=7), WHICH),
        st.tuples(st.just("begin"), WHICH, st.just(0), tokens(max_size=7), WHICH),
        st.tuples(st.just("join"), WHICH),
        st.tuples(st.just("advance"), WHICH, st.integers(1, 6), st.booleans()),
        st.tuples(st.just("finish"), WHICH),
        st.tuples(st.just("finish"), WHICH),
        st.tuples(st.just("abort"), WHICH),
        st.tuples(st.just("fork"), WHICH),
        st.tuples(st.just("leave"), WHICH),
        st.tuples(st.just("evict"), st.integers(1, 4)),
    ),
    max_size=30,
)


@given(st.sampled_from(LAYOUTS), st.sampled_from([1, 3, 4]), st.sampled_from([16, 40, 200]), STEPS)
def test_lease_is_the_same_with_and_without_the_mark_it_goes_on_from(
    layout: dict[str, Any], page_size: int, num_pages: int, steps: list[tuple[str, Any]]
) -> None:
    twins = Twins({**layout, "page_size": page_size}, num_pages)
    for what, *values in steps:
        getattr(twins, what)(*values)
        twins.check()
    for which in range(len(twins.paths)):
        twins.leave(which)
    while twins.running:
        twins.abort(0)
    for side in twins.sides:
        side.cache.clear()
        assert side.cache.pools.pages.num_used == 0


def finished(cache: HybridCache, lease: Lease, sequence: IntArray) -> SessionRef:
    """File a whole sequence and stand at its end."""
    assert cache.commit(lease, sequence, len(sequence), lease.row)
    ref = cache.stand(lease.frontier, lease=lease)
    cache.release(lease)
    return ref


def resumed(cache: HybridCache, ref: SessionRef, sequence: IntArray, known_len: int) -> Lease:
    """A lease from a mark, whose table is compared with that of a walk from the root."""
    lease = cache.acquire(NAMESPACE, sequence, after=ref, known_len=known_len)
    verify_prefix(cache, lease, sequence, lease.boundary)
    mine = described(cache, lease)
    cache.release(lease)
    lease = cache.acquire(NAMESPACE, sequence)
    assert described(cache, lease) == mine
    cache.release(lease)
    return lease


def use_up(cache: HybridCache) -> None:
    """Somebody writes to every page that is free."""
    free = cache.pools.pages.num_free
    other = span(5000, 5000 + 4 * free)
    lease = cache.acquire(NAMESPACE, other)
    cache.reserve(lease, len(other))
    absorb(cache, lease, other, 0, len(other))
    cache.release(lease)


def test_equal_prompts_at_once_each_go_on_from_what_the_tree_holds() -> None:
    """The second one's own pages are given back: its mark must not lead there."""
    cache = make_cache(num_pages=40, shadow=True)
    prompt = span(0, 18)
    leases = [cache.acquire(NAMESPACE, prompt) for _ in range(2)]
    for lease in leases:
        cache.reserve(lease, 18)
        absorb(cache, lease, prompt, 0, 18)
    refs = [finished(cache, lease, prompt) for lease in leases]
    use_up(cache)
    for ref in refs:
        again = resumed(cache, ref, np.concatenate([prompt, span(90, 95)]), 18)
        assert again.boundary == 18


def test_prompt_of_which_another_filed_a_part_meanwhile_goes_on_from_what_the_tree_holds() -> None:
    cache = make_cache(num_pages=40, shadow=True)
    prompt = span(0, 22)
    long = cache.acquire(NAMESPACE, prompt)
    cache.reserve(long, 22)
    absorb(cache, long, prompt, 0, 6)
    assert cache.commit(long, prompt, 6, long.row)
    absorb(cache, long, prompt, 6, 22)
    short = cache.acquire(NAMESPACE, prompt[:14])
    assert short.boundary == 6
    cache.reserve(short, 14)
    absorb(cache, short, prompt[:14], 6, 14)
    marks = [(14, finished(cache, short, prompt[:14])), (22, finished(cache, long, prompt))]
    use_up(cache)
    for length, ref in marks:
        again = resumed(cache, ref, np.concatenate([prompt[:length], span(90, 95)]), length)
        assert again.boundary == length


def test_path_that_others_grew_again_is_read_where_it_lies_now() -> None:
    cache = make_cache(num_pages=60, shadow=True)
    prompt = span(0, 18)
    lease = cache.acquire(NAMESPACE, prompt)
    cache.reserve(lease, 18)
    absorb(cache, lease, prompt, 0, 18)
    ref = finished(cache, lease, prompt)
    cache.clear()
    blocker = cache.acquire(NAMESPACE, span(700, 740))
    cache.reserve(blocker, 10)
    for length in (9, 18):
        lease = cache.acquire(NAMESPACE, prompt[:length])
        cache.reserve(lease, length)
        absorb(cache, lease, prompt[:length], lease.boundary, length)
        finished(cache, lease, prompt[:length])
    cache.release(blocker)
    use_up(cache)
    assert resumed(cache, ref, np.concatenate([prompt, span(90, 95)]), 18).boundary == 18


def test_page_that_a_tip_had_copied_is_not_read_once_the_tip_is_gone() -> None:
    cache = make_cache(num_pages=60, state_pages=0, policy="lru", shadow=True)
    run_whole(cache, span(0, 6))
    branches = [np.concatenate([span(0, 6), span(100 * n, 100 * n + 5)]) for n in (1, 2)]
    leases = [cache.acquire(NAMESPACE, branch) for branch in branches]
    assert leases[0].table.last != leases[1].table.last, "the second has a copy"
    refs = []
    for lease, branch in zip(reversed(leases), reversed(branches), strict=True):
        tick(cache)
        cache.reserve(lease, 11)
        absorb(cache, lease, branch, 6, 11)
        refs.append(finished(cache, lease, branch))
    assert cache.evict_one()
    assert [ref.frontier.alive for ref in refs] == [False, True]
    use_up(cache)
    for ref, branch, wanted in zip(refs, reversed(branches), (6, 11), strict=True):
        longer = np.concatenate([branch, span(90, 95)])
        assert resumed(cache, ref, longer, 11).boundary == wanted


def run_whole(cache: HybridCache, sequence: IntArray) -> None:
    """File a sequence of a session that nobody holds on to."""
    lease = cache.acquire(NAMESPACE, sequence)
    cache.reserve(lease, len(sequence))
    absorb(cache, lease, sequence, lease.boundary, len(sequence))
    cache.leave(finished(cache, lease, sequence))


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 9])
def test_turn_that_leaves_its_tip_takes_the_tip_s_table_up_to_there(cut: int) -> None:
    cache = make_cache(num_pages=60, state_pages=0, shadow=True)
    lease = cache.acquire(NAMESPACE, span(0, 18))
    cache.reserve(lease, 18)
    absorb(cache, lease, span(0, 18), 0, 18)
    ref = finished(cache, lease, span(0, 18))
    sequence = np.concatenate([span(0, 18 - cut), span(90, 95)])
    assert resumed(cache, ref, sequence, 18 - cut).boundary == 18 - cut


@pytest.mark.parametrize("layout", [{"state_pages": 2}, {"state_pages": 0}])
def test_cost_of_a_turn_does_not_grow_with_the_trajectory(
    layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in nodes that are asked whether they are the root, and in pages that are copied."""
    cache = make_cache(num_pages=20_000, **layout)
    visits, is_root = 0, Node.is_root.fget  # type: ignore[attr-defined]

    def counting(node: Node) -> bool:
        nonlocal visits
        visits += 1
        return bool(is_root(node))

    read = 0

    def reading(*args: Any) -> IntArray:
        nonlocal read
        pages = path_pages(*args)
        read += len(pages)
        return pages

    monkeypatch.setattr(Node, "is_root", property(counting))
    monkeypatch.setattr("agentcache.cache.tables.path_pages", reading)
    agent, costs = Agent(cache), []
    for turn in range(1000):
        visits = read = 0
        agent.turn(span(10 * turn, 10 * turn + 5), ids(1, 2), (3,) if turn == 0 else ())
        costs.append((visits, read))
    early, late = (sum(count for count, _ in costs[at : at + 300]) for at in (200, 700))
    assert late <= 1.5 * early, "what is put off now and then included"
    assert max(num for _, num in costs) <= 4


def test_tables_of_one_trajectory_share_their_memory() -> None:
    cache = make_cache(num_pages=2000)
    sequence = span(0, 4000)
    ref, table, moved = None, None, 0
    for length in range(40, 4000, 20):
        lease = cache.acquire(NAMESPACE, sequence[:length], after=ref, known_len=length - 20)
        cache.reserve(lease, length)
        moved += table is not None and not np.shares_memory(lease.table.pages, table.pages)
        assert cache.commit(lease, sequence, length, lease.row)
        before, ref = ref, cache.stand(lease.frontier, after=ref, lease=lease)
        if before is not None:
            cache.leave(before)
        table = lease.table
        cache.release(lease)
    assert moved < 12, "memory is doubled now and then"


def test_fork_goes_on_in_the_table_of_its_source() -> None:
    cache = make_cache(num_pages=400)
    parent = Agent(cache)
    parent.turn(span(0, 200), ids(1, 2))
    child = parent.fork()
    assert parent.ref is not None
    assert child.ref is not None
    memos = [parent.ref.memo.table, child.ref.memo.table]
    assert np.shares_memory(memos[0].pages, memos[1].pages)
    assert parent.turn(span(300, 310), ids(3, 4)) == child.turn(span(400, 410), ids(5, 6)) == 11
    check(cache)
    for agent in (parent, child):
        sequence = np.append(agent.tokens, 9).astype(np.int32)
        lease = cache.acquire(NAMESPACE, sequence, after=agent.ref, known_len=len(agent.tokens))
        mine = described(cache, lease)
        cache.release(lease)
        lease = cache.acquire(NAMESPACE, sequence)
        assert described(cache, lease) == mine
        assert lease.match.lens[Kind.STATE] == len(agent.tokens) - 1
        cache.release(lease)


def test_mark_in_another_namespace_holds_nothing_of_the_one_before_it() -> None:
    cache = make_cache(state_pages=1)
    tokens = np.arange(24, dtype=np.int32)
    marks = []
    for namespace, after in ((b"one", False), (b"two", True)):
        lease = cache.acquire(
            namespace, tokens, structural=(8,), after=marks[-1] if after else None, known_len=23
        )
        assert lease.boundary == 0
        cache.reserve(lease, 24)
        for length in (8, 23):
            assert cache.commit(lease, tokens, length, lease.row)
        marks.append(
            cache.stand(
                lease.locked, lease.filed[:1], after=marks[-1] if after else None, lease=lease
            )
        )
        cache.release(lease)
    heads = {name: next(iter(cache.tree.root(name).children.values())) for name in (b"one", b"two")}
    assert [heads[name].refs for name in heads] == [1, 1]
    cache.leave(marks[0])
    assert [heads[name].refs for name in heads] == [0, 1]
    cache.leave(marks[1])
    assert [heads[name].refs for name in heads] == [0, 0]
