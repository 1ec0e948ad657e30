"""Slot allocation, in integers: one arena of equal pages serves every kind of data.

A page holds `page_size` consecutive positions of a sequence's KV, or a part of a checkpoint. So one
budget bounds both without a fixed share, and a checkpoint fits wherever enough pages are free: its
pages need not be neighbours, since it is copied before use anyway.

This is the reference of the compiled `_pages`, with which it agrees call by call; `pages` chooses.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from agentcache.types import IntArray

__all__ = ["PageAllocator", "run_starts"]

_NOBODY = np.iinfo(np.int32).max
"""The fill of a page whose rest is nobody's to claim."""

_FEW = 24
"""So many pages are counted faster one by one than as arrays."""


class PageAllocator:
    """Reference counts over pages `0..num_pages-1`, whatever the pages hold.

    `fill[page]` is the first offset inside a page that nobody has written or claimed; positions
    below it never change. A sequence may go on inside a shared page only from `fill` on, by
    `claim`; everyone else copies.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.refs = np.zeros(num_pages, dtype=np.int32)
        self.fill = np.zeros(num_pages, dtype=np.int32)
        self._refs = self.refs.data  # single items, ten times faster than by numpy
        self._fill = self.fill.data
        self._free = _FreePages(num_pages)

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages somebody holds."""
        return self.num_pages - len(self._free)

    def alloc(self, count: int, after: int = -1) -> IntArray | None:
        """`count` pages with one reference each, following page `after` where those are free.

        None, and nothing taken, if fewer are free.
        """
        if count > len(self._free):
            return None
        return self._own(self._free.take_runs(count, after))

    def alloc_scattered(self, count: int) -> IntArray | None:
        """Like `alloc`, from the other end and in no order: for data that is copied before use."""
        if count > len(self._free):
            return None
        return self._own(self._free.take_top(count))

    def _own(self, pages: IntArray) -> IntArray:
        if len(pages) <= _FEW:
            for page in pages.tolist():
                self._refs[page] = 1
                self._fill[page] = _NOBODY
            return pages
        at = pages.astype(np.intp)  # numpy gathers and scatters twice as fast by these
        self.refs[at] = 1
        self.fill[at] = _NOBODY
        return pages

    def incref(self, pages: IntArray) -> None:
        """One more holder of each page; all must be held."""
        if len(pages) <= _FEW:
            for page in pages.tolist():
                assert self._refs[page], "a reference to a free page"
                self._refs[page] += 1
            return
        at = pages.astype(np.intp)
        held = self.refs[at]
        assert held.all(), "a reference to a free page"
        self.refs[at] = held + 1

    def decref(self, pages: IntArray) -> IntArray:
        """One holder fewer of each page; returns those that became free."""
        if len(pages) <= _FEW:
            return self._decref_few(pages.tolist())
        at = pages.astype(np.intp)
        held = self.refs[at]
        assert held.all(), "a page was given back twice"
        self.refs[at] = held - 1  # `pages` holds no page twice
        gone: IntArray = pages[held == 1]
        self._free.put(gone)
        return gone

    def _decref_few(self, pages: list[int]) -> IntArray:
        gone = []
        for page in pages:
            held = self._refs[page]
            assert held, "a page was given back twice"
            self._refs[page] = held - 1
            if held == 1:
                gone.append(page)
        self._free.put_few(gone)
        return np.array(gone, dtype=np.int32)

    def claim(self, page: int, offset: int) -> bool:
        """Take the rest of a page from `offset` on, if nobody wrote there; one more holder then."""
        if self.fill[page] != offset:
            return False
        self.fill[page] = _NOBODY
        self.refs[page] += 1
        return True

    def disclaim(self, page: int, offset: int) -> None:
        """Give back the rest of a claimed or own page from `offset` on, for a later `claim`."""
        self.fill[page] = offset


class _FreePages:
    """The free page numbers: runs from the bottom for KV, single pages from the top for states.

    One byte per page says whether it is free: bytes are searched many times faster than by numpy,
    which sees the same memory for whole sets of pages. The heap holds the first page of every free
    run (and stale entries, which are skipped).
    """

    def __init__(self, count: int) -> None:
        self._free = bytearray(b"\1" * count)
        self._is_free = np.frombuffer(self._free, dtype=bool)
        self._heap = [0] if count else []
        self._len = count
        self._top = count  # no page at or above it is free

    def __len__(self) -> int:
        return self._len

    def take_runs(self, count: int, after: int) -> IntArray:
        """The pages that follow `after`, then the lowest runs."""
        out = np.empty(count, dtype=np.int32)
        got = self._run(after + 1, out, 0) if after >= 0 else 0
        while got < count:
            got = self._run(heapq.heappop(self._heap), out, got)
        return out

    def _run(self, start: int, out: IntArray, got: int) -> int:
        """Take free pages from `start` on until one is held or `out` is full."""
        limit = min(start + len(out) - got, len(self._free))
        held = self._free.find(0, start, limit)
        stop = limit if held < 0 else held
        num = stop - start
        if num <= 0:
            return got
        out[got : got + num] = np.arange(start, stop, dtype=np.int32)
        self._free[start:stop] = bytes(num)
        self._len -= num
        if stop < len(self._free) and self._free[stop]:
            self._push(stop)
        return got + num

    def _push(self, page: int) -> None:
        """Note the first page of a run; what has become stale is thrown out now and then."""
        heapq.heappush(self._heap, page)
        if len(self._heap) > 2 * len(self._free) + 64:
            before = np.concatenate(([False], self._is_free[:-1]))
            self._heap = np.flatnonzero(self._is_free & ~before).tolist()

    def take_top(self, count: int) -> IntArray:
        """The highest pages, wherever they lie, from the top down."""
        out = np.empty(count, dtype=np.int32)
        got, stop = 0, self._top
        while got < count:
            last = self._free.rfind(1, 0, stop)
            start = max(self._free.rfind(0, 0, last) + 1, last + 1 - (count - got))
            num = last + 1 - start
            out[got : got + num] = np.arange(last, start - 1, -1, dtype=np.int32)
            self._free[start : last + 1] = bytes(num)
            got, stop = got + num, start
        self._top = stop
        self._len -= count
        return out

    def put_few(self, pages: list[int]) -> None:
        for page in pages:
            self._free[page] = 1
        self._len += len(pages)
        for page in pages:
            self._top = max(self._top, page + 1)
            if page == 0 or not self._free[page - 1]:
                self._push(page)

    def put(self, pages: IntArray) -> None:
        if not len(pages):
            return
        self._is_free[pages] = True
        self._len += len(pages)
        self._top = max(self._top, int(pages.max()) + 1)
        follows = self._is_free[pages - 1] & (pages > 0)  # page 0 follows none; -1 is some page
        for page in pages[~follows].tolist():
            self._push(page)


def run_starts(pages: IntArray) -> list[int]:
    """Indices at which a run of neighbouring, ascending pages begins.

    >>> run_starts(np.array([3, 4, 9, 7, 8], np.int32))
    [0, 2, 3]
    """
    if not len(pages):
        return []
    return [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist()]
