"""A page table answers as a plain list of pages would, and tables that share memory do not mix."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import ids

from agentcache.pools.table import PageTable

PAGES = st.lists(st.integers(0, 9), unique=True, max_size=8)


def slots_of(pages: list[int], size: int) -> list[int]:
    return [page * size + at for page in pages for at in range(size)]


def agrees(table: PageTable, pages: list[int], size: int, start: int, stop: int) -> None:
    wanted = slots_of(pages, size)[start:stop]
    runs = list(table.runs(start, stop))
    assert [slot + at for slot, num in runs for at in range(num)] == wanted
    assert all(num > 0 for _, num in runs)
    assert all(a + num != b for (a, num), (b, _) in pairwise(runs)), "neighbours are one run"


@given(PAGES, PAGES, st.sampled_from([1, 3, 4]), st.data())
def test_runs_and_slices_agree_with_a_plain_list(
    first: list[int], more: list[int], size: int, data: st.DataObject
) -> None:
    table = PageTable(size, ids(*first))
    table.extend(ids(*more))
    pages = [*first, *more]
    if pages and data.draw(st.booleans()):
        pages[-1] = data.draw(st.integers(0, 12))
        table.replace_last(pages[-1])
    assert len(table) == len(pages)
    assert table.capacity == len(pages) * size
    assert table.last == (pages[-1] if pages else -1)
    start = data.draw(st.integers(0, table.capacity))
    stop = data.draw(st.integers(start, table.capacity))
    agrees(table, pages, size, start, stop)
    cover = {at // size for at in range(start, stop)}
    if cover:
        got = table.slice(start, stop)
        assert got.dtype == np.int32
        assert got.tolist() == [pages[idx] for idx in sorted(cover)]


def test_neighbouring_pages_are_one_run_whenever_they_were_appended() -> None:
    table = PageTable(4, ids(2, 3))
    table.extend(ids(4))
    table.extend(ids(9, 10))
    assert list(table.runs(0, 20)) == [(8, 12), (36, 8)]
    assert list(table.runs(5, 14)) == [(13, 7), (36, 2)]


def test_page_put_in_the_last_ones_place_joins_or_leaves_a_run() -> None:
    table = PageTable(2, ids(2, 3))
    table.replace_last(7)
    assert list(table.runs(0, 4)) == [(4, 2), (14, 2)]
    table.replace_last(3)
    assert list(table.runs(0, 4)) == [(4, 4)]


@pytest.mark.parametrize("stop", [0, 3])
def test_nothing_lies_in_an_empty_range(stop: int) -> None:
    table = PageTable(2, ids(2, 3))
    assert list(table.runs(stop, stop)) == []


def shares(one: PageTable, other: PageTable) -> bool:
    return bool(np.shares_memory(one.pages, other.pages))


def test_prefix_is_a_table_of_its_own_over_the_same_memory() -> None:
    whole = PageTable(2, ids(5, 6, 9, 10))
    for num in range(5):
        part = whole.prefix(num)
        assert (len(part), part.capacity) == (num, 2 * num)
        assert part.pages.tolist() == [5, 6, 9, 10][:num]
        assert num == 0 or shares(part, whole)
    assert whole.prefix(9).pages.tolist() == [5, 6, 9, 10], "there is no more than all"
    assert list(whole.prefix(3).runs(1, 9)) == [(11, 3), (18, 2)]
    assert len(whole) == 4


def test_extension_at_the_end_of_what_is_there_copies_nothing() -> None:
    whole = PageTable(2, ids(*range(20)))
    whole.extend(ids(30))  # makes room for more
    again = whole.prefix(21)
    again.extend(ids(31, 32))
    assert shares(again, whole)
    assert (whole.pages.tolist()[-1], again.pages.tolist()[-3:]) == (30, [30, 31, 32])
    assert len(whole) == 21


def test_extension_by_what_is_there_already_copies_nothing() -> None:
    whole = PageTable(2, ids(5, 6, 9, 10, 2))
    part = whole.prefix(2)
    part.extend(ids(9, 10))
    assert shares(part, whole)
    assert part.pages.tolist() == [5, 6, 9, 10]
    assert list(part.runs(0, 8)) == [(10, 4), (18, 4)]


@pytest.mark.parametrize("more", [[7], [9, 7], [9, 10, 7], [9, 10, 2, 3, 4]])
def test_any_other_extension_copies_and_changes_nobody_else(more: list[int]) -> None:
    whole = PageTable(2, ids(5, 6, 9, 10))
    part = whole.prefix(2)
    other = whole.prefix(3)
    part.extend(ids(*more))
    assert not shares(part, whole)
    assert part.pages.tolist() == [5, 6, *more]
    assert whole.pages.tolist() == [5, 6, 9, 10]
    assert other.pages.tolist() == [5, 6, 9]
    assert list(whole.runs(0, 8)) == [(10, 4), (18, 4)]


def test_two_that_go_on_from_one_prefix_part() -> None:
    trunk = PageTable(2, ids(5, 6))
    one, other = trunk.prefix(2), trunk.prefix(2)
    one.extend(ids(7))
    other.extend(ids(8))
    assert (one.pages.tolist(), other.pages.tolist()) == ([5, 6, 7], [5, 6, 8])
    assert trunk.pages.tolist() == [5, 6]


def test_last_page_of_a_shared_table_is_replaced_in_one_table_only() -> None:
    whole = PageTable(2, ids(5, 6, 7))
    part = whole.prefix(3)
    part.replace_last(9)
    assert (whole.pages.tolist(), part.pages.tolist()) == ([5, 6, 7], [5, 6, 9])


def test_truncated_table_goes_on_in_the_same_memory() -> None:
    table = PageTable(2, ids(*range(10)))
    table.extend(ids(20, 21, 22))
    short = table.prefix(4)
    table.truncate(11)
    assert table.pages.tolist() == [*range(10), 20]
    table.extend(ids(30, 31))
    assert shares(table, short)
    assert list(table.runs(18, 26)) == [(18, 2), (40, 2), (60, 4)]
    assert short.pages.tolist() == [0, 1, 2, 3]
    table.truncate(40)
    assert len(table) == 13


def test_runs_of_what_was_truncated_are_forgotten_with_it() -> None:
    table = PageTable(2, ids(5, 9, 2, 7))
    table.truncate(1)
    table.extend(ids(6, 7))
    assert list(table.runs(0, 6)) == [(10, 6)]
    table.truncate(2)
    table.extend(ids(1, 2))
    assert list(table.runs(0, 8)) == [(10, 4), (2, 4)]


def test_truncated_prefix_leaves_the_longer_table_as_it_is() -> None:
    whole = PageTable(2, ids(5, 6, 9, 10))
    part = whole.prefix(3)
    part.truncate(1)
    part.extend(ids(7))
    assert (part.pages.tolist(), whole.pages.tolist()) == ([5, 7], [5, 6, 9, 10])
    part.truncate(0)
    assert (len(part), part.last) == (0, -1)


def test_trimmed_table_counts_positions_as_before() -> None:
    table = PageTable(2, ids(5, 6, 9, 10))
    assert table.trim(1).tolist() == [5]
    assert (table.first, len(table), table.capacity) == (1, 4, 8)
    assert table.pages.tolist() == [6, 9, 10]
    assert list(table.runs(2, 8)) == [(12, 2), (18, 4)]
    assert table.slice(4, 7).tolist() == [9, 10]
    assert table.trim(1).tolist() == table.trim(0).tolist() == []
    table.extend(ids(11))
    assert list(table.runs(5, 10)) == [(19, 5)]


def test_nothing_is_read_from_before_what_was_given_back() -> None:
    table = PageTable(2, ids(5, 6, 9, 10))
    table.trim(2)
    with pytest.raises(AssertionError, match="position 3 was given back"):
        list(table.runs(3, 6))
    with pytest.raises(AssertionError, match="position 3 was given back"):
        table.slice(3, 6)
    assert list(table.runs(3, 3)) == [], "an empty range reads nothing"


def test_trim_beyond_the_end_empties_the_table_and_leaves_no_gap() -> None:
    table = PageTable(2, ids(5, 6))
    assert table.trim(9).tolist() == [5, 6]
    assert (table.first, len(table), table.last) == (2, 2, -1)
    table.extend(ids(3))
    assert list(table.runs(4, 6)) == [(6, 2)]


def test_trim_takes_nothing_from_who_shares_the_memory() -> None:
    whole = PageTable(2, ids(5, 6, 9))
    part = whole.prefix(3)
    gone = part.trim(2)
    part.extend(ids(1))
    assert gone.tolist() == [5, 6]
    assert (whole.pages.tolist(), whole.first) == ([5, 6, 9], 0)
    assert (part.pages.tolist(), part.first) == ([9, 1], 2)


def test_prefix_of_a_trimmed_table_begins_where_that_does() -> None:
    table = PageTable(2, ids(5, 6, 9, 10))
    table.trim(2)
    part = table.prefix(3)
    assert (part.first, len(part), part.pages.tolist()) == (2, 3, [9])
    empty = table.prefix(1)
    assert (empty.first, len(empty), empty.last) == (2, 2, -1)


def test_table_may_begin_at_a_later_page() -> None:
    table = PageTable(4, ids(8, 9, 3), first=5)
    assert (table.first, len(table), table.capacity) == (5, 8, 32)
    assert list(table.runs(21, 30)) == [(33, 7), (12, 2)]
    assert table.slice(27, 29).tolist() == [9, 3]


class Family:
    """Tables forked from each other, each beside the plain list that it should equal."""

    def __init__(self, size: int, pages: list[int], first: int) -> None:
        self.size = size
        self.tables = [PageTable(size, ids(*pages), first)]
        self.lists = [dict(enumerate(pages, first))]

    def fork(self, which: int, num: int) -> None:
        self.tables.append(self.tables[which].prefix(num))
        self.lists.append({at: page for at, page in self.lists[which].items() if at < num})

    def extend(self, which: int, pages: list[int]) -> None:
        end = len(self.tables[which])
        self.tables[which].extend(ids(*pages))
        self.lists[which].update(enumerate(pages, end))

    def adopt(self, which: int, other: int, num: int) -> None:
        """Extend a table by what another one has at its end."""
        end = len(self.tables[which])
        pages = [self.lists[other].get(end + at) for at in range(num)]
        self.extend(which, [page for page in pages if page is not None])

    def replace(self, which: int, page: int) -> None:
        if self.lists[which]:
            self.tables[which].replace_last(page)
            self.lists[which][max(self.lists[which])] = page

    def truncate(self, which: int, num: int) -> None:
        """Where others have what is forgotten, only if they have more, as a fork's source has."""
        table = self.tables[which]
        others = [each for each in self.tables if each is not table and shares(each, table)]
        is_end = all(len(each) <= len(table) for each in others)
        if not is_end or all(len(each) <= num for each in others):
            table.truncate(num)
            self.lists[which] = {at: p for at, p in self.lists[which].items() if at < num}

    def trim(self, which: int, first: int) -> None:
        gone = self.tables[which].trim(first)
        kept = {at: page for at, page in self.lists[which].items() if at >= first}
        assert gone.tolist() == [p for at, p in self.lists[which].items() if at not in kept]
        self.lists[which] = kept

    def check(self, start: int, num: int) -> None:
        for table, pages in zip(self.tables, self.lists, strict=True):
            assert table.pages.tolist() == list(pages.values())
            assert list(pages) == list(range(table.first, len(table)))
            assert table.capacity == len(table) * self.size
            assert table.last == (list(pages.values())[-1] if pages else -1)
            low = table.first * self.size + start
            wanted = [
                pages[at // self.size] * self.size + at % self.size
                for at in range(low, min(low + num, table.capacity))
            ]
            runs = list(table.runs(low, low + num))
            assert [slot + at for slot, count in runs for at in range(count)] == wanted
            assert all(a + count != b for (a, count), (b, _) in pairwise(runs))
            if wanted:
                cover = range(low // self.size, -(-(low + len(wanted)) // self.size))
                assert table.slice(low, low + num).tolist() == [pages[at] for at in cover]


WHICH = st.integers(0, 4)
NUM = st.integers(0, 9)
MORE = st.lists(st.integers(0, 5), max_size=4)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("fork"), WHICH, NUM),
        st.tuples(st.just("extend"), WHICH, MORE),
        st.tuples(st.just("extend"), st.just(0), MORE),
        st.tuples(st.just("adopt"), WHICH, st.tuples(WHICH, st.integers(1, 4))),
        st.tuples(st.just("replace"), WHICH, st.integers(0, 5)),
        st.tuples(st.just("truncate"), WHICH, NUM),
        st.tuples(st.just("trim"), WHICH, NUM),
    ),
    max_size=20,
)


@given(
    st.sampled_from([1, 3]), MORE, st.integers(0, 3), CHANGES, st.integers(0, 6), st.integers(0, 30)
)
def test_tables_forked_from_each_other_agree_with_plain_lists(
    size: int, pages: list[int], first: int, changes: list[tuple[str, int, Any]], at: int, num: int
) -> None:
    family = Family(size, pages, first)
    for what, number, value in changes:
        which = number % len(family.tables)
        if what == "adopt":
            family.adopt(which, value[0] % len(family.tables), value[1])
        else:
            getattr(family, what)(which, value)
        family.check(at, num)


def test_tables_of_a_long_trajectory_share_one_memory() -> None:
    """What a turn costs does not grow: the table of each turn goes on where the last one ended."""
    tables = [PageTable(4, ids(0))]
    moved = 0
    for turn in range(1, 2000):
        table = tables[-1].prefix(turn)
        table.extend(ids(turn))
        moved += not shares(table, tables[-1])
        tables.append(table)
    assert moved < 12, "memory is doubled now and then"
    assert list(tables[-1].runs(0, 8000)) == [(0, 8000)]
    assert list(tables[700].runs(0, 8000)) == [(0, 4 * 701)]
