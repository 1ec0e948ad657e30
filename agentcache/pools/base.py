"""The contract of the memory behind the slots, rows of running state, and pools without tensors."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from agentcache.pools.pages import PageAllocator
    from agentcache.types import IntArray

__all__ = ["Counting", "Pools", "RowAllocator"]


class RowAllocator:
    """Rows of running state, lowest first, so that a batch tends to be one slice.

    `peak` is the most rows ever held at once.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.peak = 0
        self._free = list(range(num_rows))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        """A free row, or None."""
        if not self._free:
            return None
        row = heapq.heappop(self._free)
        self.peak = max(self.peak, self.num_rows - len(self._free))
        return row

    def free(self, row: int) -> None:
        """Give a row back."""
        assert 0 <= row < self.num_rows, f"no row {row}"
        assert row not in self._free, f"row {row} was given back twice"
        heapq.heappush(self._free, row)


class Pools(Protocol):
    """What the cache needs of the memory behind the slots. Slots and pages are integers.

    A row is the private state of a running request; `state_pages` pages hold one checkpoint (0
    where the model keeps no recurrent state). Where checkpoints are packed, which may round them,
    those are fewer than the `row_pages` pages that hold a state as it is; the number of an entry's
    pages tells which it is.
    """

    pages: PageAllocator
    rows: RowAllocator

    @property
    def state_pages(self) -> int: ...
    @property
    def row_pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...

    def copy_tail(self, kind: str, source: int, target: int, count: int) -> None:
        """Copy the first `count` positions of a page of that kind of KV into another."""
        ...

    def save_state(self, row: int, pages: IntArray) -> None:
        """Publish a row as a checkpoint: as it is in `row_pages` pages, packed in fewer."""
        ...

    def load_state(self, pages: IntArray, row: int) -> None:
        """Make a row a private copy of a checkpoint."""
        ...

    def clear_state(self, row: int) -> None:
        """Make a row the state before the first token."""
        ...

    def on_free(self, pages: IntArray) -> None:
        """Pages nobody holds any more; their content is meaningless from here on."""
        ...


@dataclass(slots=True)
class Counting:
    """Pools without tensors: the same allocation, no bytes moved. For simulation and tests.

    num_row_pages: pages of an unpacked state; None where checkpoints are not packed.
    """

    pages: PageAllocator
    rows: RowAllocator
    state_pages: int
    page_bytes: int = 1
    row_bytes: int = 1
    num_row_pages: int | None = None

    @property
    def row_pages(self) -> int:
        return self.state_pages if self.num_row_pages is None else self.num_row_pages

    def copy_tail(self, kind: str, source: int, target: int, count: int) -> None:
        return

    def save_state(self, row: int, pages: IntArray) -> None:
        return

    def load_state(self, pages: IntArray, row: int) -> None:
        return

    def clear_state(self, row: int) -> None:
        return

    def on_free(self, pages: IntArray) -> None:
        return
