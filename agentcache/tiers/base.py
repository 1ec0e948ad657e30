"""The contract of a lower tier: it keeps copies of pages under slots of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from agentcache.types import IntArray

__all__ = ["CountingTier", "LowerTier"]


class LowerTier(Protocol):
    """Memory below the device. Slots are integers; one slot holds one page, whatever its kind.

    What a page has besides (its sidecars) goes with it.
    """

    tier: int
    """2 for host memory, 3 for storage."""

    @property
    def num_pages(self) -> int:
        """Pages there is room for when it is empty."""
        ...

    @property
    def num_free(self) -> int:
        """Pages there is room for now."""
        ...

    def store(self, pages: IntArray) -> IntArray:
        """Copy device pages here; at most `num_free`. Returns their slots."""
        ...

    def load(self, slots: IntArray, pages: IntArray) -> None:
        """Copy slots into device pages; the slots stay."""
        ...

    def free(self, slots: IntArray) -> None:
        """Give slots up."""
        ...


class CountingTier:
    """A lower tier without bytes: the same allocation, for simulation and tests."""

    tier = 2

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def store(self, pages: IntArray) -> IntArray:
        assert len(pages) <= len(self._free), "more than there is room for"
        return np.array([self._free.pop() for _ in range(len(pages))], dtype=np.int32)

    def load(self, slots: IntArray, pages: IntArray) -> None:
        assert len(slots) == len(pages)

    def free(self, slots: IntArray) -> None:
        taken = set(slots.tolist())
        assert taken.isdisjoint(self._free), "a slot was given back twice"
        self._free.extend(taken)
