"""From bytes to JSON values: whole documents, or one value per line."""

from __future__ import annotations

import json
import re
import stat
from typing import TYPE_CHECKING, BinaryIO

from agentcache.errors import TraceDecodeError, TraceError, TraceFormatError, TraceNotFound
from agentcache.replay.readers.base import Record, Source, shown

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MAX_DEPTH", "MAX_RECORD_BYTES", "records", "unreadable"]

MAX_RECORD_BYTES = 256 << 20
"""Largest document, and largest line of a file of lines. Parsing takes a few times as much."""

MAX_DEPTH = 200
"""Deepest nesting of lists and objects; well below what Python's own recursion allows."""

_BOM = b"\xef\xbb\xbf"
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


def records(source: Source, max_bytes: int = MAX_RECORD_BYTES) -> Iterator[Record]:
    """The JSON values of a file: each line of a `.jsonl`, the whole of any other.

    A document that cannot be decoded raises. A line that cannot is handed to `source.reject` and
    the lines after it are read. Offsets in errors count bytes from the start of the file.
    """
    path = source.path
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            # Opening a pipe would wait for its writer for ever.
            raise TraceNotFound(source.shown, "is no regular file", "copy its content into a file")
        with path.open("rb") as file:
            if path.name.lower().endswith(".jsonl"):
                yield from _lines(source, file, max_bytes)
            elif status.st_size > max_bytes:
                raise _too_large(source.shown, max_bytes, None)
            else:
                yield Record(_parse(source.shown, file.read(), 0, None))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError | ValueError) -> TraceNotFound:
    """The error for a path that the system does not open."""
    if isinstance(error, FileNotFoundError):
        return TraceNotFound(shown(path), "does not exist", "check the path")
    # A ValueError comes from paths that no system call takes, as with a null character.
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return TraceNotFound(
        shown(path), f"cannot be read: {reason}", "check the path and its permissions"
    )


def _lines(source: Source, file: BinaryIO, max_bytes: int) -> Iterator[Record]:
    offset, line, in_head = 0, 0, True
    while raw := file.readline(max_bytes + 1):
        line += 1
        length = len(raw)
        try:
            if length > max_bytes:
                length += _skip_line(file, raw)
                raise _too_large(source.shown, max_bytes, line)
            text = raw.removeprefix(_BOM).strip() if line == 1 else raw.strip()
            # Published sessions may start with lines of comment.
            if text and not (in_head and text.startswith(b"//")):
                in_head = False
                yield Record(_parse(source.shown, raw, offset, line), line)
        except TraceError as error:
            source.reject(error)
        offset += length


def _skip_line(file: BinaryIO, raw: bytes) -> int:
    """Move to the end of an overlong line; the number of bytes passed over."""
    skipped = 0
    while raw and not raw.endswith(b"\n"):
        raw = file.readline(1 << 20)
        skipped += len(raw)
    return skipped


def _too_large(path: str, max_bytes: int, line: int | None) -> TraceFormatError:
    return TraceFormatError(
        path,
        f"is longer than the limit of {max_bytes} bytes",
        "split it into smaller records, or raise max_bytes",
        line=line,
    )


def _parse(path: str, raw: bytes, offset: int, line: int | None) -> object:
    """One JSON value from UTF-8; `offset` is where `raw` starts in the file."""
    if offset == 0 and raw.startswith(_BOM):
        raw, offset = raw.removeprefix(_BOM), len(_BOM)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise TraceDecodeError(
            path,
            f"byte 0x{raw[error.start]:02x} is not UTF-8 ({error.reason})",
            "convert it to UTF-8",
            line=line,
            offset=offset + error.start,
        ) from error
    try:
        value = json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        is_second = error.msg.startswith("Extra data") and line is None
        raise TraceDecodeError(
            path,
            f"is not JSON: {error.msg}",
            "name a file of one record per line .jsonl"
            if is_second
            else "the file may be cut off: record or fetch it again",
            line=error.lineno if line is None else line,
            offset=offset + len(text[: error.pos].encode()),
        ) from error
    except RecursionError as error:
        raise _too_deep(path, text, offset, line) from error
    if _is_too_deep(value):
        raise _too_deep(path, text, offset, line)
    return value


def _integer(digits: str) -> int | float:
    """An integer; past a length no counter has, the float that `int` would refuse to make."""
    return int(digits) if len(digits) <= 400 else float(digits)


def _is_too_deep(value: object) -> bool:
    layer = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        if not layer:
            return False
        layer = [
            child
            for node in layer
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
    return bool(layer)


def _too_deep(path: str, text: str, offset: int, line: int | None) -> TraceDecodeError:
    depth, where = 0, 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth > MAX_DEPTH:
            where = token.start()
            break
    return TraceDecodeError(
        path,
        f"nests lists and objects deeper than the limit of {MAX_DEPTH}",
        "no known format does; check where the file comes from",
        line=line,
        offset=offset + len(text[:where].encode()),
    )
