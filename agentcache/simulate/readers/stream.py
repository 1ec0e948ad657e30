"""From a file, plain or gzip, to JSON values: one a line, the elements of a list, or one document.

Which of these it is shows in the content. Lines and lists are read as they come, so that a trace
may be larger than the memory that its text would take.
"""

from __future__ import annotations

import codecs
import gzip
import json
import stat
import zlib
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO, cast

from agentcache.errors import TraceDecodeError, TraceError, TraceFormatError, TraceNotFound
from agentcache.replay.readers.base import Source, shown
from agentcache.simulate.readers.base import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["MAX_ROW_BYTES", "is_gzip", "rows", "unpack"]

MAX_ROW_BYTES = 256 << 20
"""Longest line, list element or document."""

_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
_SPACE = " \t\r\n"
_NEAR_END = 16
"""Characters from the end of a text within which a value that goes on shows an error."""


def rows(source: Source, max_bytes: int = MAX_ROW_BYTES) -> Iterator[Row]:
    """The JSON values of a file.

    A line that cannot be used is handed to `source.reject` and those after it are read. Raises
    TraceNotFound, and TraceDecodeError or TraceFormatError where nothing can be read further.
    """
    with _opened(source.path) as file, _translated(source.shown):
        lines = _head(file, max_bytes)
        head = b"".join(lines)
        text = head.removeprefix(_BOM).lstrip()
        if not text:
            raise TraceFormatError(source.shown, "is empty", "give a file with requests")
        if text.startswith(b"["):
            yield from _Elements(source, file, head, max_bytes).rows()
        elif text.startswith(b"{") and not _is_json(head):
            yield from _document_or_lines(source, file, head, max_bytes)
        else:
            yield from _lines(source, chain(lines, _read_lines(file, max_bytes)), max_bytes)


def unpack(path: Path, target: Path) -> None:
    """Write the content of a gzip file to `target`. Raises as `rows` does."""
    with _opened(path) as file, _translated(shown(path)), target.open("wb") as out:
        while chunk := file.read(_CHUNK):
            out.write(chunk)


def is_gzip(path: Path) -> bool:
    """Whether a file is compressed. Raises TraceNotFound."""
    with _readable(path), path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with _readable(path):
        if not _is_regular(path):
            # Opening a pipe would wait for its writer for ever.
            raise TraceNotFound(shown(path), "is no regular file", "copy its content into a file")
        opener = gzip.open if is_gzip(path) else open
        with opener(path, "rb") as file:
            yield cast("BinaryIO", file)


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except ValueError as error:  # a path that no system call takes
        raise TraceNotFound(shown(path), f"cannot be read: {error}", "check the path") from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise TraceNotFound(shown(path), "does not exist", "check the path") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceNotFound(
            shown(path), f"cannot be read: {reason}", "check the path and its permissions"
        ) from error


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Damage of a compressed file as a TraceDecodeError."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceDecodeError(
            path,
            f"is no whole gzip file: {error}",
            "it may be cut off: compress or fetch it again",
        ) from error
    except MemoryError as error:
        raise TraceFormatError(
            path, "does not fit into memory", "split it, or read fewer requests with a limit"
        ) from error


def _head(file: BinaryIO, max_bytes: int) -> list[bytes]:
    """The blank lines a file begins with and the first that is not blank."""
    head = []
    for line in _read_lines(file, max_bytes):
        head.append(line)
        if line.removeprefix(_BOM).strip():
            break
    return head


def _is_json(raw: bytes) -> bool:
    try:
        json.loads(raw.removeprefix(_BOM))
    except (ValueError, RecursionError):
        return False
    return True


def _document_or_lines(
    source: Source, file: BinaryIO, head: bytes, max_bytes: int
) -> Iterator[Row]:
    """One value over several lines; or lines, of which the first is no JSON."""
    whole = head + file.read(max(0, max_bytes - len(head)) + 1)
    document = _document(source.shown, whole) if len(whole) <= max_bytes else None
    if document is not None:
        yield document
    else:
        file.seek(0)
        yield from _lines(source, _read_lines(file, max_bytes), max_bytes)


def _document(path: str, whole: bytes) -> Row | None:
    """The value that a file is, None if some of its lines are values of their own."""
    try:
        return Row(_parse(path, whole, None))
    except TraceError:
        # A document's inner lines are indented, or end in a comma.
        if any(line.startswith(b"{") and _is_json(line) for line in whole.splitlines()):
            return None
        raise


def _read_lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Lines of at most `max_bytes` + 1; what is longer is passed over."""
    while line := file.readline(max_bytes + 1):
        yield line
        while len(line) > max_bytes and not line.endswith(b"\n"):
            line = file.readline(_CHUNK)
            if not line:
                return


def _lines(source: Source, lines: Iterable[bytes], max_bytes: int) -> Iterator[Row]:
    in_head = True
    for number, raw in enumerate(lines, 1):
        text = raw.removeprefix(_BOM).strip() if number == 1 else raw.strip()
        # Published sessions may start with lines of comment.
        if not text or (in_head and text.startswith(b"//")):
            continue
        if number == 1:
            _refuse_table(source, text)
        in_head = False
        try:
            if len(raw) > max_bytes:
                raise _too_long(source.shown, max_bytes, number)
            yield Row(_parse(source.shown, text, number), number)
        except TraceError as error:
            source.reject(error)


def _refuse_table(source: Source, head: bytes) -> None:
    """Say what is wrong with a table of lengths; its rows would each be no JSON."""
    if head.lower().startswith(b"timestamp,"):
        raise TraceFormatError(
            source.shown,
            "is a table of request lengths without prefix information",
            "what a cache can reuse does not follow from lengths; give a trace with tokens or "
            "block hashes",
            line=1,
        )


def _too_long(path: str, max_bytes: int, line: int | None) -> TraceFormatError:
    return TraceFormatError(
        path,
        f"is longer than the limit of {max_bytes} bytes",
        "split it into smaller rows",
        line=line,
    )


def _parse(path: str, raw: bytes, line: int | None) -> object:
    """One JSON value from UTF-8. line: of the file, None for a whole document."""
    raw = raw.removeprefix(_BOM)
    try:
        return cast("object", json.loads(raw.decode()))
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, line) from error
    except json.JSONDecodeError as error:
        raise TraceDecodeError(
            path,
            f"is not JSON: {error.msg}",
            "it may be cut off: record or fetch it again",
            line=line or error.lineno,
        ) from error
    except (RecursionError, ValueError) as error:
        raise _unusual(path, error, line) from error


def _not_utf8(path: str, error: UnicodeDecodeError, line: int | None) -> TraceDecodeError:
    byte = error.object[error.start]
    return TraceDecodeError(
        path, f"byte 0x{byte:02x} is not UTF-8 ({error.reason})", "convert it to UTF-8", line=line
    )


def _unusual(path: str, error: Exception, line: int | None) -> TraceDecodeError:
    """JSON by its grammar, but beyond what is read: nested too deep, a number too long."""
    is_deep = isinstance(error, RecursionError)
    problem = "nests lists and objects too deep" if is_deep else f"cannot be read: {error}"
    return TraceDecodeError(
        path, problem, "no known format does this; check where the file comes from", line=line
    )


class _Elements:
    """The elements of one top-level list, parsed as the file is read."""

    def __init__(self, source: Source, file: BinaryIO, head: bytes, max_bytes: int) -> None:
        self._path = source.shown
        self._file = file
        self._max_bytes = max_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._pos = 0
        self._line = 1
        self._ended = False
        self._damage: UnicodeDecodeError | None = None
        self._take(head.removeprefix(_BOM))

    def rows(self) -> Iterator[Row]:
        """Raises at the first place that is no list of JSON values."""
        self._next_char()
        self._pos += 1  # the bracket
        if self._next_char() != "]":
            yield self._element()
            while (char := self._next_char()) == ",":
                self._pos += 1
                self._next_char()
                yield self._element()
            if char != "]":
                raise self._not_json("is cut off" if not char else "expected ',' or ']'")
        self._pos += 1
        if self._next_char():
            raise self._not_json("more follows the end of the list")

    def _element(self) -> Row:
        line = self._line
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._pos)
                break
            except json.JSONDecodeError as error:
                # Only a text that ends too early goes wrong at its end, or in an open string.
                goes_on = error.msg.startswith("Unterminated string") or (
                    error.pos >= len(self._text) - _NEAR_END
                )
                if not goes_on or not self._refill():
                    raise self._not_json(error.msg) from error
            except (RecursionError, ValueError) as error:
                raise _unusual(self._path, error, line) from error
        self._line += self._text.count("\n", self._pos, end)
        self._pos = end
        return Row(value, line, in_list=True)

    def _next_char(self) -> str:
        """The next character that is no space, without taking it; "" at the end."""
        while True:
            while self._pos < len(self._text):
                char = self._text[self._pos]
                if char not in _SPACE:
                    return char
                self._line += char == "\n"
                self._pos += 1
            if not self._refill():
                return ""

    def _refill(self) -> bool:
        """Read on, as much again as is not used yet; False at the end of the file."""
        if self._damage is not None:
            line = self._line + self._text.count("\n", self._pos)
            raise _not_utf8(self._path, self._damage, line) from self._damage
        if self._ended:
            return False
        left = len(self._text) - self._pos
        if left > self._max_bytes:
            raise _too_long(self._path, self._max_bytes, self._line)
        self._take(self._file.read(max(_CHUNK, left)))
        return True

    def _take(self, raw: bytes) -> None:
        self._ended = not raw
        try:
            added = self._utf8.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            added, self._damage = error.object[: error.start].decode(), error
        self._text = self._text[self._pos :] + added
        self._pos = 0

    def _not_json(self, message: str) -> TraceDecodeError:
        return TraceDecodeError(
            self._path,
            f"is not JSON: {message}",
            "it may be cut off: record or fetch it again",
            line=self._line,
        )
