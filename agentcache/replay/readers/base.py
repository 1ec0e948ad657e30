"""What all readers share: the values they make, and the place they report problems from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentcache.errors import TraceError, TraceFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "Call",
    "Format",
    "Message",
    "Notes",
    "Place",
    "Record",
    "Source",
    "Trajectory",
    "per_record",
    "shown",
]

Message = dict[str, Any]
"""One chat message in OpenAI form. Calls share message objects: treat them as read-only."""

SURROGATES = "unpaired UTF-16 surrogates were read as U+FFFD"

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Call:
    """One model call: the prompt, and the answer that was recorded for it.

    A message holds `role` (system, user, assistant, tool) and `content` (always text), and where
    recorded `reasoning_content`, `tool_calls` (arguments as JSON text), `tool_call_id` and `name`.
    `at` is the time of the call in unix seconds. `exact` is False when the prompt was put together
    again from other records and may differ from what the model saw. `answer_ids` are the tokens
    that were sampled for the answer, its end included, and `fingerprint` that of the model and
    tokenizer that they are of.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    answer: Message
    at: float | None = None
    exact: bool = True
    answer_ids: tuple[int, ...] | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The calls of one agent in the order they were made.

    `path` is the file, or the folder whose files form the run. `parent` is the id of the
    trajectory that started this one, whether or not that one was read too. `notes` say what was
    read differently from how it was recorded.
    """

    id: str
    path: str
    format: str
    calls: tuple[Call, ...]
    parent: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON value of a file: a whole document (`line` is None) or one line."""

    data: object
    line: int | None = None


class Notes:
    """Remarks on one trajectory, each kept once with the number of times it was made."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, text: str) -> None:
        """Make a remark."""
        self._counts[text] = self._counts.get(text, 0) + 1

    def texts(self) -> tuple[str, ...]:
        """The remarks in the order they were first made."""
        return tuple(
            text if count == 1 else f"{text} ({count} times)"
            for text, count in self._counts.items()
        )


@dataclass(slots=True)
class Source:
    """One file while it is read; collects the records that could not be used."""

    path: Path
    problems: list[TraceError] = field(default_factory=list)

    @property
    def shown(self) -> str:
        """The path as text that can be printed."""
        return shown(self.path)

    @property
    def stem(self) -> str:
        """The file's name without the suffixes of recorded runs."""
        whole = shown(Path(self.path.name))
        name = whole
        for suffix in (".jsonl", ".json", ".traj", ".calls", ".output"):
            name = name.removesuffix(suffix)
        return name or whole

    def place(self, record: Record, notes: Notes) -> Place:
        """The top of one record."""
        return Place(self.shown, record.line, "", notes)

    def reject(self, error: TraceError) -> None:
        """Keep the reason why one record cannot be used, and go on."""
        self.problems.append(error)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands in a file: what errors about it name, and the notes it may add to.

    The `text`, `mapping`, `items`, `token_ids`, `number` and `instant` methods check a value found
    at the place and raise `TraceFormatError` naming the field when it has another type.
    """

    path: str
    line: int | None
    field: str
    notes: Notes

    def key(self, name: str) -> Place:
        """The place of a member of the object here."""
        dotted = f"{self.field}.{name}" if self.field else name
        return Place(self.path, self.line, dotted, self.notes)

    def item(self, idx: int) -> Place:
        """The place of an element of the list here."""
        return Place(self.path, self.line, f"{self.field}[{idx}]", self.notes)

    def error(self, problem: str, remedy: str) -> TraceFormatError:
        """An error that names this place; `problem` goes on after the field's name."""
        subject = f"{self.field} {problem}" if self.field else f"the record {problem}"
        return TraceFormatError(self.path, subject, remedy, line=self.line)

    def wrong_type(self, value: object, wanted: str) -> TraceFormatError:
        """The error for a value of another type than `wanted`."""
        return self.error(f"is {_kind(value)}", f"it should be {wanted}")

    def text(self, value: object) -> str:
        """A string that can be encoded: unpaired surrogates become U+FFFD, with a note."""
        if not isinstance(value, str):
            raise self.wrong_type(value, "a string")
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError:
            self.notes.add(SURROGATES)
            return _encodable(value)
        return value

    def mapping(self, value: object) -> dict[str, Any]:
        """A JSON object."""
        if not isinstance(value, dict):
            raise self.wrong_type(value, "an object")
        return value

    def items(self, value: object) -> list[Any]:
        """A JSON list."""
        if not isinstance(value, list):
            raise self.wrong_type(value, "a list")
        return value

    def token_ids(self, value: object) -> tuple[int, ...]:
        """A list of token ids."""
        ids = self.items(value)
        for idx, token in enumerate(ids):
            if type(token) is not int:
                raise self.item(idx).wrong_type(token, "a whole number")
            if not 0 <= token <= _LARGEST_ID:
                raise self.item(idx).error(f"is {token}", f"ids go from 0 to {_LARGEST_ID}")
        return tuple(ids)

    def number(self, value: object) -> float:
        """A finite number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong_type(value, "a number")
        if not math.isfinite(value):
            raise self.error(f"is {value}", "it should be a finite number")
        return float(value)

    def instant(self, value: object) -> float:
        """Unix seconds of an ISO 8601 time; one without a zone is read as UTC."""
        written = self.text(value)
        try:
            moment = datetime.fromisoformat(written)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            return moment.timestamp()
        except (ValueError, OverflowError) as error:
            raise self.error(f"is {written[:40]!r}", "it should be an ISO 8601 time") from error


@dataclass(frozen=True, slots=True)
class Format:
    """One way to record runs.

    `sniff` tells from one record whether a file is of this format and never raises. `read` makes
    the trajectories of a file from its records; it raises `TraceFormatError`, or hands the errors
    of single records to `Source.reject` and goes on. With `one_call_per_file` the files of one
    folder are the calls of one run.
    """

    name: str
    sniff: Callable[[object], bool]
    read: Callable[[Source, Iterator[Record]], list[Trajectory]]
    one_call_per_file: bool = False


def per_record(
    read_one: Callable[[Source, Record], Iterable[Trajectory]],
) -> Callable[[Source, Iterator[Record]], list[Trajectory]]:
    """A `Format.read` for records that do not depend on each other."""

    def read(source: Source, records: Iterator[Record]) -> list[Trajectory]:
        trajectories: list[Trajectory] = []
        for record in records:
            try:
                trajectories.extend(read_one(source, record))
            except TraceError as error:
                source.reject(error)
        return trajectories

    return read


def shown(path: Path) -> str:
    """A path as text that can be printed, whatever bytes its name has."""
    return _encodable(str(path))


def _encodable(text: str) -> str:
    """The text with U+FFFD in place of each unpaired surrogate, which no encoding has."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _kind(value: object) -> str:
    if value is None:
        return "missing or null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"
