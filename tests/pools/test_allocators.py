"""Pages and rows: nobody gets what somebody holds, and what is given back can be had again."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from testkit.helpers import ids

from agentcache.pools import pages_reference
from agentcache.pools.base import RowAllocator

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.types import IntArray

    MakePages = Callable[[int], pages_reference.PageAllocator]

try:
    from agentcache.pools import _pages
except ImportError:  # installed where there was no compiler
    _pages = None  # type: ignore[assignment]

needs_compiler = pytest.mark.skipif(
    _pages is None, reason="the page allocator was not compiled when the package was installed"
)


def made(name: str) -> MakePages:
    return pages_reference.PageAllocator if name == "reference" else _pages.PageAllocator


@pytest.fixture(params=["reference", pytest.param("compiled", marks=needs_compiler)])
def make_pages(request: pytest.FixtureRequest) -> MakePages:
    return made(request.param)


NOBODY = np.iinfo(np.int32).max
"""The fill of a page that is nobody's to claim, however large pages are."""


class AllocatorMachine(RuleBasedStateMachine):
    """Against a dictionary of page -> holders."""

    implementation = "reference"

    @initialize(num_pages=st.one_of(st.integers(0, 24), st.integers(60, 200)))
    def start(self, num_pages: int) -> None:
        self.pages = made(self.implementation)(num_pages)
        self.holders = dict.fromkeys(range(num_pages), 0)

    def free(self) -> list[int]:
        return [page for page, count in self.holders.items() if count == 0]

    def held(self) -> list[int]:
        return [page for page, count in self.holders.items() if count]

    def take(self, got: IntArray | None, count: int, wanted: list[int]) -> None:
        if len(self.free()) < count:
            assert got is None
            return
        assert got is not None
        assert got.dtype == np.int32
        assert got.tolist() == wanted
        for page in wanted:
            self.holders[page] = 1
            assert self.pages.fill[page] == NOBODY

    @rule(count=st.one_of(st.integers(0, 8), st.integers(25, 90)), after=st.integers(-1, 200))
    def alloc(self, count: int, after: int) -> None:
        free = self.free()
        run: list[int] = []
        while after >= 0 and len(run) < count and after + 1 + len(run) in free:
            run.append(after + 1 + len(run))
        rest = [page for page in free if page not in run]
        self.take(self.pages.alloc(count, after), count, [*run, *rest[: count - len(run)]])

    @rule(count=st.one_of(st.integers(1, 8), st.integers(25, 90)))
    def alloc_scattered(self, count: int) -> None:
        self.take(self.pages.alloc_scattered(count), count, self.free()[: -count - 1 : -1])

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def incref(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held()), unique=True))
        self.pages.incref(ids(*pages))
        for page in pages:
            self.holders[page] += 1

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def decref(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held()), unique=True))
        gone = self.pages.decref(ids(*pages))
        for page in pages:
            self.holders[page] -= 1
        assert gone.tolist() == [page for page in pages if self.holders[page] == 0]

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "pages"):
            assert self.pages.refs.tolist() == list(self.holders.values())
            assert self.pages.num_free == len(self.free())
            assert self.pages.num_used == len(self.held())


AllocatorMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None
)
TestReference = AllocatorMachine.TestCase


class CompiledMachine(AllocatorMachine):
    implementation = "compiled"


CompiledMachine.TestCase.settings = AllocatorMachine.TestCase.settings
TestCompiled = needs_compiler(CompiledMachine.TestCase)


@pytest.mark.parametrize("count", [0, 1, 3, 200])
@needs_compiler
def test_runs_begin_where_pages_do_not_follow_one_another(count: int) -> None:
    pages = np.random.default_rng(count).integers(0, 3, count).cumsum().astype(np.int32)
    begins = [at for at in range(count) if at == 0 or pages[at] != pages[at - 1] + 1]
    assert pages_reference.run_starts(pages) == begins
    assert _pages.run_starts(pages) == begins


@pytest.mark.parametrize("num_others", [1, 20])
def test_page_that_two_give_back_at_once_is_free_once(
    make_pages: MakePages, num_others: int
) -> None:
    pages = make_pages(64)
    alone, shared = pages.alloc(num_others), pages.alloc(3)
    assert alone is not None
    assert shared is not None
    pages.incref(shared)
    if num_others + 6 > 24:  # more are counted as a set, in which each is once
        pages.decref(shared)
        shared = shared[:0]
    gone = pages.decref(np.concatenate([alone, shared, shared]))
    assert gone.tolist() == [*alone.tolist(), *shared.tolist()]
    pages.alloc(pages.num_free)
    assert pages.num_free == 0


@needs_compiler
def test_pages_that_are_no_pages_are_refused() -> None:
    pages = _pages.PageAllocator(4)
    with pytest.raises(TypeError, match="int32"):
        pages.incref(np.zeros(2, dtype=np.int64))
    for page in (-1, 4):
        with pytest.raises(AssertionError):
            pages.decref(ids(page))
        with pytest.raises(AssertionError):
            pages.claim(page, 0)
    taken = pages.alloc(2)
    with pytest.raises(AssertionError, match="twice"):
        pages.decref(ids(taken[0], taken[0]))


@pytest.mark.parametrize(
    ("setting", "wanted"), [("1", False), pytest.param("0", True, marks=needs_compiler)]
)
def test_environment_chooses_the_reference(setting: str, wanted: bool) -> None:
    code = "from agentcache.pools.pages import IS_COMPILED; print(IS_COMPILED)"
    env = os.environ | {"AGENTCACHE_PURE_PYTHON": setting}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(wanted)


def test_pages_follow_one_another_as_long_as_they_are_free(make_pages: MakePages) -> None:
    pages = make_pages(8)
    first = pages.alloc(2)
    assert first is not None
    assert first.tolist() == [0, 1]
    blocker = pages.alloc(1, after=3)
    assert blocker is not None
    assert blocker.tolist() == [4]
    more = pages.alloc(4, after=1)
    assert more is not None
    assert more.tolist() == [2, 3, 5, 6]
    assert pages.alloc(2) is None
    assert pages.num_free == 1


def test_checkpoints_and_kv_grow_from_opposite_ends(make_pages: MakePages) -> None:
    pages = make_pages(10_000)
    state = pages.alloc_scattered(3)
    kv = pages.alloc(3)
    assert state is not None
    assert kv is not None
    assert state.tolist() == [9999, 9998, 9997]
    assert kv.tolist() == [0, 1, 2]


def test_scattered_pages_are_found_wherever_they_are_free(make_pages: MakePages) -> None:
    pages = make_pages(20_000)
    everything = pages.alloc(20_000)
    assert everything is not None
    pages.decref(ids(3, 9000, 17_000))
    assert pages.alloc_scattered(4) is None
    found = pages.alloc_scattered(3)
    assert found is not None
    assert found.tolist() == [17_000, 9000, 3]


def test_page_given_back_twice_is_noticed(make_pages: MakePages) -> None:
    pages = make_pages(4)
    taken = pages.alloc(2)
    assert taken is not None
    pages.decref(taken)
    with pytest.raises(AssertionError, match="twice"):
        pages.decref(taken)
    with pytest.raises(AssertionError, match="free page"):
        pages.incref(taken)
    assert pages.num_free == 4


def test_rest_of_a_page_is_claimed_by_one_only_and_at_its_very_border(
    make_pages: MakePages,
) -> None:
    pages = make_pages(2)
    taken = pages.alloc(1)
    assert taken is not None
    page = int(taken[0])
    assert not pages.claim(page, 2), "a page in use was given away"
    pages.disclaim(page, 2)
    assert not pages.claim(page, 1), "a written position was given away"
    assert not pages.claim(page, 3)
    assert pages.refs[page] == 1
    assert pages.claim(page, 2)
    assert pages.refs[page] == 2
    assert not pages.claim(page, 2), "two write to the same place"


def test_claim_given_back_unused_can_be_made_again_and_a_used_one_further_on(
    make_pages: MakePages,
) -> None:
    pages = make_pages(2)
    pages.alloc(1)
    pages.disclaim(0, 1)
    assert pages.claim(0, 1)
    pages.disclaim(0, 1)
    assert pages.claim(0, 1)
    pages.disclaim(0, 3)
    assert not pages.claim(0, 1)
    assert pages.claim(0, 3)


def test_page_that_was_freed_half_full_is_handed_out_as_in_use(make_pages: MakePages) -> None:
    pages = make_pages(1)
    taken = pages.alloc(1)
    assert taken is not None
    pages.disclaim(0, 2)
    pages.decref(taken)
    assert pages.alloc(1) is not None
    assert not pages.claim(0, 2)


def test_rows_come_lowest_first_and_each_once() -> None:
    rows = RowAllocator(3)
    assert [rows.alloc() for _ in range(4)] == [0, 1, 2, None]
    rows.free(1)
    rows.free(0)
    assert rows.num_free == 2
    assert rows.alloc() == 0
    assert rows.peak == 3


def test_peak_of_rows_is_the_most_held_at_once() -> None:
    rows = RowAllocator(3)
    assert rows.peak == 0
    for _ in range(5):
        row = rows.alloc()
        assert row is not None
        rows.free(row)
    assert rows.peak == 1


@pytest.mark.parametrize("row", [0, -1, 3])
def test_row_nobody_holds_cannot_be_given_back(row: int) -> None:
    rows = RowAllocator(3)
    with pytest.raises(AssertionError):
        rows.free(row)
