"""What the readers of traces share: their input, their options, and how values are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from agentcache.errors import ConfigError, TraceError
from agentcache.replay.readers.base import Notes, Place, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from agentcache.simulate.readers.encode import ChatEncoder
    from agentcache.simulate.trace import SimRequest
    from agentcache.types import IntArray

__all__ = [
    "MAX_TOKENS",
    "ReadOptions",
    "Row",
    "Timeline",
    "TraceFormat",
    "number",
    "per_row",
    "place_of",
    "token_ids",
    "whole",
    "wholes",
]

_Value = TypeVar("_Value")

MAX_TOKENS = 2**31 - 1
"""The largest id, and the longest request: both are int32."""


_MAX_NUMBER = 10**30


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON value of a file. line: where it begins, None for a document that is one value.

    in_list: whether it is an element of the list that the file consists of.
    """

    data: object
    line: int | None = None
    in_list: bool = False


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How traces are read; see `read_traces`."""

    encoder: Callable[[], ChatEncoder] | None = None
    limit: int | None = None
    concurrency: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("concurrency", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it has to be at least {least}")

    def chat_encoder(self, path: str) -> ChatEncoder:
        """What encodes messages. Raises ConfigError where none was given."""
        if self.encoder is None:
            raise ConfigError(
                f"{path} holds text, which needs a tokenizer and a chat template; name a model, or "
                "pass tokens= to read_traces"
            )
        return self.encoder()


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One form of trace. `sniff` tells it by one row and never raises.

    `read` gives the requests in the order of their times, the first at 0; what it cannot use goes
    to `Source.reject`. It stops reading once it has `limit` requests.
    """

    name: str
    sniff: Callable[[object], bool]
    read: Callable[[Source, Iterator[Row], ReadOptions], list[SimRequest]]


class Timeline:
    """Times of rows as seconds since the first of them; they may not go back."""

    def __init__(self, unit_s: float = 1.0) -> None:
        self._unit_s = unit_s
        self._first: float | None = None
        self._last = 0.0

    def at(self, value: object, place: Place) -> float:
        """The time of a row that is good otherwise: the rows after it may not be earlier."""
        time = number(value, place)
        if self._first is None:
            self._first = time
        elif time < self._last:
            raise place.error(f"goes back from {self._last} to {time}", "sort the rows by time")
        self._last = time
        return (time - self._first) * self._unit_s


def place_of(source: Source, row: Row) -> Place:
    """The top of a row, for errors."""
    return Place(source.shown, row.line, "", Notes())


def per_row(
    source: Source, rows: Iterable[Row], read_one: Callable[[Row], _Value]
) -> Iterator[_Value]:
    """What `read_one` makes of each row; rows it raises a TraceError for are rejected."""
    for row in rows:
        try:
            value = read_one(row)
        except TraceError as error:
            source.reject(error)
        else:
            yield value


def number(value: object, place: Place) -> float:
    """A number with which can be reckoned: sums and differences of two are finite."""
    if isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise place.error(f"is {_short(value)}", "it should be a smaller number")
    finite = place.number(value)
    if abs(finite) > _MAX_NUMBER:
        raise place.error(f"is {finite}", "it should be a smaller number")
    return finite


def whole(value: object, place: Place, least: int = 0, most: int = MAX_TOKENS) -> int:
    """A whole number within bounds; true and 2.0 are none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise place.wrong_type(value, "a whole number")
    if not least <= value <= most:
        raise place.error(f"is {_short(value)}", f"it should be from {least} to {most}")
    return value


def token_ids(value: object, place: Place) -> IntArray:
    """A list of token ids, each of 0 to 2^31 − 1, as int32."""
    return wholes(value, place, MAX_TOKENS).astype(np.int32)


def wholes(value: object, place: Place, most: int) -> npt.NDArray[np.int64]:
    """A list of whole numbers from 0 to `most`, at most 2^63 − 1."""
    items = place.items(value)
    # There may be a million of them: types and bounds are looked at at once, not one by one.
    array = _int64(items) if set(map(type, items)) <= {int} else None
    if array is None or (len(array) and (array.min() < 0 or array.max() > most)):
        checked = [whole(item, place.item(idx), most=most) for idx, item in enumerate(items)]
        return np.array(checked, np.int64)
    return array


def _int64(items: list[int]) -> npt.NDArray[np.int64] | None:
    try:
        return np.array(items, np.int64)
    except OverflowError:
        return None


def _short(value: int) -> str:
    """A number as text; one too long to print by its size."""
    return str(value) if value.bit_length() < 200 else f"a number of {value.bit_length()} bits"
