"""A page table answers as a plain list of pages would, and keeps neighbours together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import ids

from agentcache.pools.base import PageTable

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
