"""Immutable sequences that grow: what is longer shares its memory with what it was made from."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import numpy as np

if TYPE_CHECKING:
    from agentcache.types import IntArray

__all__ = ["AppendLog", "TokenLog"]

T = TypeVar("T")


class _Items(Generic[T]):
    """Items of one line of descent, of which every log of the line has a beginning."""

    __slots__ = ("items", "lock")

    def __init__(self, items: Iterable[T]) -> None:
        self.items = list(items)
        self.lock = threading.Lock()


class AppendLog(Sequence[T]):
    """An immutable sequence whose extensions share its memory.

    The first extension of a log goes into the same memory, further ones copy: a conversation of n
    messages takes O(n) memory over all its turns. Any number of threads may use and extend a log.

    >>> log = AppendLog("ab")
    >>> longer = log.extend("c")
    >>> [*log], [*longer], log.num_shared(longer)
    (['a', 'b'], ['a', 'b', 'c'], 2)
    """

    __slots__ = ("_len", "_line")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._line = _Items(items)
        self._len = len(self._line.items)

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[T]:
        return islice(self._line.items, self._len)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[T, ...]: ...
    def __getitem__(self, place: int | slice) -> T | tuple[T, ...]:
        if isinstance(place, slice):
            start, stop, step = place.indices(self._len)
            return tuple(self._line.items[start:stop:step])
        if not -self._len <= place < self._len:
            raise IndexError(f"item {place} of {self._len}")
        return self._line.items[place % self._len]

    def __add__(self, more: Iterable[T]) -> AppendLog[T]:
        return self.extend(more)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (AppendLog, tuple)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"AppendLog({[*self]!r})"

    def first(self, count: int) -> AppendLog[T]:
        """The first `count` items, or all where there are fewer."""
        return self._of(self._line, min(count, self._len))

    def extend(self, more: Iterable[T]) -> AppendLog[T]:
        """The items followed by `more`; costs no more than these along one line of descent."""
        added = list(more)
        if not added:
            return self
        line = self._line
        with line.lock:
            if len(line.items) == self._len:
                line.items += added
                return self._of(line, self._len + len(added))
        return AppendLog([*self, *added])

    def num_shared(self, other: AppendLog[T]) -> int:
        """How many leading items are the same since both logs come from one; looks at none."""
        return min(self._len, other._len) if self._line is other._line else 0

    @staticmethod
    def _of(line: _Items[T], length: int) -> AppendLog[T]:
        log: AppendLog[T] = AppendLog.__new__(AppendLog)
        log._line, log._len = line, length
        return log


class _Tokens:
    """Tokens of one line of descent; `used` of `data` are taken."""

    __slots__ = ("data", "lock", "used")

    def __init__(self, ids: IntArray) -> None:
        self.data = np.array(ids, dtype=np.int32)
        self.used = len(ids)
        self.lock = threading.Lock()


class TokenLog:
    """`AppendLog` for int32 numbers such as token ids, which it gives as one array.

    >>> log = TokenLog(np.array([1, 2], np.int32))
    >>> longer = log.extend(np.array([3], np.int32))
    >>> log.ids.tolist(), longer.ids.tolist()
    ([1, 2], [1, 2, 3])
    """

    __slots__ = ("_buffer", "_len")

    def __init__(self, ids: IntArray) -> None:
        self._buffer = _Tokens(ids)
        self._len = len(ids)

    def __len__(self) -> int:
        return self._len

    @property
    def ids(self) -> IntArray:
        """The tokens, as a read-only view."""
        view = self._buffer.data[: self._len]
        view.flags.writeable = False
        return view

    def first(self, count: int) -> TokenLog:
        """The first `count` tokens, or all where there are fewer."""
        return self._of(self._buffer, min(count, self._len))

    def extend(self, more: IntArray) -> TokenLog:
        """The tokens followed by `more`; amortised O(len(more)) along one line of descent."""
        if not len(more):
            return self
        buffer = self._buffer
        with buffer.lock:
            if buffer.used == self._len:
                return self._appended(buffer, more)
        return self._appended(_Tokens(self.ids), more)

    def move_to(self, other: TokenLog) -> None:
        """Take the memory of a log that is known to begin with the same tokens for one's own."""
        self._buffer = other._buffer

    def _appended(self, buffer: _Tokens, more: IntArray) -> TokenLog:
        length = self._len + len(more)
        if length > len(buffer.data):
            grown = np.empty(max(length, 2 * len(buffer.data)), dtype=np.int32)
            grown[: self._len] = buffer.data[: self._len]
            buffer.data = grown  # views of earlier logs keep the old memory only while they live
        buffer.data[self._len : length] = more
        buffer.used = length
        return self._of(buffer, length)

    @staticmethod
    def _of(buffer: _Tokens, length: int) -> TokenLog:
        log = TokenLog.__new__(TokenLog)
        log._buffer, log._len = buffer, length
        return log
