"""The page table of a sequence: append-only, so that the turns of a trajectory share its memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np

from agentcache.pools.pages import run_starts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.types import IntArray

__all__ = ["PageTable"]


class _PageLog:
    """Pages of one line of descent, and where runs of neighbouring pages begin."""

    __slots__ = ("pages", "runs", "used")

    def __init__(self, pages: IntArray) -> None:
        self.pages = np.array(pages, dtype=np.int32)
        self.used = len(pages)
        self.runs = run_starts(self.pages)

    def append(self, pages: IntArray) -> None:
        need = self.used + len(pages)
        if need > len(self.pages):
            grown = np.empty(max(need, 2 * len(self.pages), 16), dtype=np.int32)
            grown[: self.used] = self.pages[: self.used]
            self.pages = grown
        self.pages[self.used : need] = pages
        begins = run_starts(pages)
        if self.used and self.pages.item(self.used - 1) + 1 == pages.item(0):
            del begins[0]
        self.runs.extend([self.used + at for at in begins])
        self.used = need


class PageTable:
    """The pages of a sequence's positions [first * page_size, capacity), in order.

    `prefix` gives the table of a shorter sequence in O(log n); extending it again with what is
    there already, or at the end of what is there, copies nothing. Any other extension copies, so
    that no table ever changes another.

    >>> table = PageTable(2, np.array([5, 6, 9], np.int32))
    >>> list(table.runs(1, 6))
    [(11, 3), (18, 2)]
    """

    __slots__ = ("_base", "_len", "_log", "_skip", "page_size")

    def __init__(self, page_size: int, pages: IntArray, first: int = 0) -> None:
        self.page_size = page_size
        self._log = _PageLog(pages)
        self._base = first  # index of the log's first page
        self._skip = 0  # pages of the log that were given back
        self._len = len(pages)  # pages of the log up to the end of this table

    def __len__(self) -> int:
        """Pages up to the end, those before `first` included."""
        return self._base + self._len

    @property
    def first(self) -> int:
        """Index of the first page that is there; earlier ones were given back."""
        return self._base + self._skip

    @property
    def capacity(self) -> int:
        """The position after the last one there is room for."""
        return len(self) * self.page_size

    @property
    def last(self) -> int:
        """The last page; -1 if there is none."""
        return int(self._log.pages[self._len - 1]) if self._len > self._skip else -1

    @property
    def pages(self) -> IntArray:
        """The pages that are there, as a view that is not to be changed."""
        return self._log.pages[self._skip : self._len]

    def prefix(self, num_pages: int) -> PageTable:
        """The table of the first `num_pages` pages; shares memory with this one."""
        out = PageTable.__new__(PageTable)
        out.page_size, out._log = self.page_size, self._log
        out._base, out._skip = self._base, self._skip
        out._len = max(self._skip, min(self._len, num_pages - self._base))
        return out

    def extend(self, pages: IntArray) -> None:
        """Append pages; amortised O(len(pages)) along one line of descent."""
        if not len(pages):
            return
        log, stop = self._log, self._len + len(pages)
        if log.used != self._len:
            if stop <= log.used and log.pages[self._len : stop].tobytes() == pages.tobytes():
                self._len = stop
                return
            self._log = log = _PageLog(log.pages[: self._len])
        log.append(pages)
        self._len = stop

    def replace_last(self, page: int) -> None:
        """Put another page in the last one's place."""
        self._len -= 1
        self.extend(np.array([page], dtype=np.int32))

    def truncate(self, num_pages: int) -> None:
        """Forget the pages from index `num_pages` on, which no other table may have."""
        log, length = self._log, max(self._skip, num_pages - self._base)
        if length >= self._len:
            return
        if log.used == self._len:
            log.used = length
            del log.runs[bisect_left(log.runs, length) :]
        self._len = length

    def trim(self, first: int) -> IntArray:
        """Forget the pages before index `first`; returns them. O(1) but for the copy."""
        before, self._skip = self._skip, max(self._skip, min(first - self._base, self._len))
        return self._log.pages[before : self._skip].copy()

    def page_of(self, position: int) -> int:
        """The page that holds a position."""
        at = position // self.page_size - self._base
        assert self._skip <= at < self._len, f"position {position} is not there"
        return int(self._log.pages[at])

    def slice(self, start: int, stop: int) -> IntArray:
        """The pages that cover positions [start, stop)."""
        low = start // self.page_size - self._base
        high = -(-stop // self.page_size) - self._base
        assert low >= self._skip, f"position {start} was given back"
        return self._log.pages[low : min(high, self._len)].copy()

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """(first slot, count) of the neighbouring token slots that hold positions [start, stop)."""
        size, base = self.page_size, self._base * self.page_size
        stop = min(stop, self.capacity)
        if start >= stop:
            return
        assert start >= self.first * size, f"position {start} was given back"
        starts = self._log.runs
        stop_run = bisect_left(starts, self._len)
        idx = bisect_right(starts, (start - base) // size, hi=stop_run) - 1
        while idx < stop_run:
            at = starts[idx]
            end = starts[idx + 1] if idx + 1 < stop_run else self._len
            low, high = max(start, base + at * size), min(stop, base + end * size)
            if low >= high:
                return
            yield int(self._log.pages[at]) * size + low - (base + at * size), high - low
            idx += 1
