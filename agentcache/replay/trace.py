"""Recorded agent runs as model calls: reading files and folders, writing the canonical form.

`docs/replay-formats.md` describes the formats.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentcache.errors import TraceError, TraceFormatError, TraceNotFound
from agentcache.replay.readers import FORMATS, find_format
from agentcache.replay.readers._decode import MAX_RECORD_BYTES, records
from agentcache.replay.readers._walk import Found, find_files
from agentcache.replay.readers.base import Call, Source, Trajectory, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agentcache.replay.readers.base import Record

__all__ = [
    "MAX_RECORD_BYTES",
    "Call",
    "ReadResult",
    "Trajectory",
    "read_file",
    "read_paths",
    "write_calls_jsonl",
]

_KNOWN = (
    "mini-swe-agent, SWE-agent, tau-bench, OpenHands (llm-completions, output.jsonl), Claude Code "
    "and calls JSONL can be read"
)
_ONE_CALL_PER_FILE = frozenset(known.name for known in FORMATS if known.one_call_per_file)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What came of reading files and folders.

    `trajectories` have at least one call and ids that differ from each other. Every file is
    counted once: `loaded` whole; `partial`, where some records could not be used or held no call
    (each is named in `warnings`); `skipped`, valid without any call; `rejected`, with its error.
    `unknown` are the files below a given folder that are no recorded runs.
    """

    trajectories: tuple[Trajectory, ...]
    loaded: int
    partial: int
    skipped: int
    rejected: tuple[tuple[str, TraceError], ...]
    unknown: tuple[str, ...]
    warnings: tuple[str, ...]


def read_file(path: str | Path, *, max_bytes: int = MAX_RECORD_BYTES) -> list[Trajectory]:
    """The trajectories of one file; runs without any call are among them.

    Raises a `TraceError` at the first record that cannot be used: `TraceNotFound`,
    `TraceDecodeError` (not UTF-8, not JSON) or `TraceFormatError` (unknown format, wrong types).
    No document or line may be longer than `max_bytes`.

    >>> import json, tempfile
    >>> question = {"role": "user", "content": "What is 1 + 1?"}
    >>> row = {"messages": [question], "answer": {"role": "assistant", "content": "2"}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "sum.calls.jsonl"
    ...     _ = path.write_text(json.dumps(row))
    ...     [run] = read_file(path)
    >>> run.id, len(run.calls), run.calls[0].answer["content"]
    ('sum', 1, '2')
    """
    source = Source(Path(path))
    trajectories = _read(source, max_bytes)
    if source.problems:
        raise source.problems[0]
    if trajectories is None:
        raise _unknown_format(source)
    return _with_own_ids(trajectories, set())


def read_paths(
    paths: str | Path | Iterable[str | Path], *, max_bytes: int = MAX_RECORD_BYTES
) -> ReadResult:
    """Read files and folders, sorted below each folder; a bad file does not stop the others."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    batch = _Batch(max_bytes)
    for found in find_files(Path(path) for path in given):
        batch.take(found)
    return batch.result()


def write_calls_jsonl(trajectories: Iterable[Trajectory], path: str | Path) -> int:
    """Write calls in the canonical form, one per line; the number of lines.

    Reading the file gives back the same calls under the same ids. A trajectory without calls
    leaves no line.
    """
    num_lines = 0
    try:
        with Path(path).open("w", encoding="utf-8", newline="\n") as file:
            for trajectory in trajectories:
                for idx, call in enumerate(trajectory.calls):
                    row = _row(trajectory, call, is_first=idx == 0)
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    num_lines += 1
    except OSError as error:
        raise TraceNotFound(
            path, f"cannot be written: {error.strerror}", "check the folder and its permissions"
        ) from error
    return num_lines


def _row(trajectory: Trajectory, call: Call, *, is_first: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"trajectory": trajectory.id}
    if is_first and trajectory.parent is not None:
        row["parent"] = trajectory.parent
    if is_first and trajectory.notes:
        row["notes"] = trajectory.notes
    if call.at is not None:
        row["at"] = call.at
    if not call.exact:
        row["exact"] = False
    if call.tools is not None:
        row["tools"] = call.tools
    row |= {"messages": call.messages, "answer": call.answer}
    if call.answer_ids is not None:
        row["answer_ids"] = call.answer_ids
    if call.fingerprint is not None:
        row["fingerprint"] = call.fingerprint
    return row


def _read(source: Source, max_bytes: int) -> list[Trajectory] | None:
    """The trajectories of a file; None if no format matches any of its records."""
    try:
        return _read_records(source, records(source, max_bytes))
    except MemoryError as error:
        raise TraceFormatError(
            source.shown, "does not fit into memory", "split it, or read it on a larger machine"
        ) from error


def _read_records(source: Source, stream: Iterator[Record]) -> list[Trajectory] | None:
    unknown: list[int | None] = []
    for record in stream:
        known = find_format(record.data)
        if known is not None:
            for line in unknown:
                source.reject(_unknown_format(source, line))
            return known.read(source, chain([record], stream))
        unknown.append(record.line)
    return None if unknown else []


def _unknown_format(source: Source, line: int | None = None) -> TraceFormatError:
    return TraceFormatError(source.shown, "is no recorded run of a known format", _KNOWN, line=line)


class _Batch:
    """Counts and trajectories of the files read so far."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._trajectories: list[Trajectory] = []
        self._loaded = 0
        self._partial = 0
        self._skipped = 0
        self._rejected: list[tuple[str, TraceError]] = []
        self._unknown: list[str] = []
        self._warnings: list[str] = []

    def take(self, found: Found) -> None:
        """Read one file, or count why it was not read."""
        if found.error is not None:
            self._rejected.append((shown(found.path), found.error))
        elif found.warning is not None:
            self._warnings.append(found.warning)
            self._unknown += found.unknown
        else:
            self._read(found)

    def _read(self, found: Found) -> None:
        source = Source(found.path)
        try:
            trajectories = _read(source, self._max_bytes)
        except TraceError as error:
            source.reject(error)
            trajectories = []
        if trajectories is None and not source.problems:
            self._take_unknown(source, is_named=found.is_named)
        else:
            self._count(source, trajectories or [])

    def _take_unknown(self, source: Source, *, is_named: bool) -> None:
        error = _unknown_format(source)
        if is_named:
            self._rejected.append((source.shown, error))
        else:
            self._unknown.append(source.shown)
            self._warnings.append(f"{source.shown}: is no recorded run; left out")

    def _count(self, source: Source, trajectories: list[Trajectory]) -> None:
        usable = [trajectory for trajectory in trajectories if trajectory.calls]
        problems = [str(error) for error in source.problems]
        if source.problems and not usable:
            self._rejected.append((source.shown, source.problems[0]))
            self._warnings += problems[1:]
        elif not usable:
            self._skipped += 1
            self._warnings.append(f"{source.shown}: holds no model call; skipped")
        else:
            empty = [
                f"{source.shown}: {trajectory.id} holds no model call; left out"
                for trajectory in trajectories
                if not trajectory.calls
            ]
            self._warnings += problems + empty
            if problems or empty:
                self._partial += 1
            else:
                self._loaded += 1
            self._trajectories += _with_own_ids(usable, set())

    def result(self) -> ReadResult:
        """The sum of what was taken."""
        taken: set[str] = set()
        joined = _join_folders(self._trajectories)
        by_file: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in joined:
            by_file[trajectory.path].append(trajectory)
        return ReadResult(
            tuple(own for group in by_file.values() for own in _with_own_ids(group, taken)),
            self._loaded,
            self._partial,
            self._skipped,
            tuple(self._rejected),
            tuple(self._unknown),
            tuple(self._warnings),
        )


def _join_folders(trajectories: list[Trajectory]) -> list[Trajectory]:
    """Make one trajectory of the single-call files that lie in one folder."""
    folders: dict[Path, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.format in _ONE_CALL_PER_FILE:
            folders[Path(trajectory.path).parent].append(trajectory)
    joined = []
    for trajectory in trajectories:
        folder = Path(trajectory.path).parent
        group = folders[folder] if trajectory.format in _ONE_CALL_PER_FILE else []
        if len(group) < 2:
            joined.append(trajectory)
        elif trajectory is group[0]:
            joined.append(_join(folder, group))
    return joined


def _join(folder: Path, group: list[Trajectory]) -> Trajectory:
    calls = [call for trajectory in group for call in trajectory.calls]
    if all(call.at is not None for call in calls):
        calls.sort(key=lambda call: call.at or 0.0)
    notes = dict.fromkeys(note for trajectory in group for note in trajectory.notes)
    return replace(
        group[0],
        id=folder.resolve().name,
        path=str(folder),
        calls=tuple(calls),
        notes=tuple(notes),
    )


def _with_own_ids(trajectories: list[Trajectory], taken: set[str]) -> list[Trajectory]:
    """The trajectories of one file under ids not in `taken`, which grows by them."""
    renamed: dict[str, str] = {}
    own = []
    for trajectory in trajectories:
        new_id, copy = trajectory.id, 1
        while new_id in taken:
            copy += 1
            new_id = f"{trajectory.id}#{copy}"
        taken.add(new_id)
        renamed.setdefault(trajectory.id, new_id)
        own.append(replace(trajectory, id=new_id))
    return [
        replace(trajectory, parent=renamed.get(trajectory.parent, trajectory.parent))
        if trajectory.parent is not None
        else trajectory
        for trajectory in own
    ]
