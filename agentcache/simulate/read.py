"""Traces from files and folders. `docs/simulate-formats.md` describes the formats."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from agentcache.errors import TraceError, TraceFormatError, TraceNotFound
from agentcache.replay.readers.base import Source, shown
from agentcache.simulate.readers import find_trace_format, is_trajectory
from agentcache.simulate.readers.base import ReadOptions
from agentcache.simulate.readers.encode import ChatEncoder
from agentcache.simulate.readers.stream import rows
from agentcache.simulate.readers.trajectories import read_runs
from agentcache.simulate.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from agentcache.simulate.readers.base import Row
    from agentcache.simulate.trace import SimRequest

__all__ = ["ChatEncoder", "read_traces"]

_SUFFIXES = (".json", ".jsonl", ".traj")
_KNOWN = (
    "Marconi, Mooncake, Claude Code KV, ShareGPT, LMSys, mt-bench-101 and what replay reads are "
    "known"
)


def read_traces(
    paths: str | Path | Iterable[str | Path],
    *,
    tokens: ChatEncoder | Callable[[], ChatEncoder] | None = None,
    limit: int | None = None,
    concurrency: int = 8,
    seed: int = 0,
) -> list[Trace]:
    """One trace per file, and one of all recorded runs that lie in a folder, in the given order.

    tokens: what encodes messages, or a function that makes it; called only for traces of text.
    limit: requests of each trace, from its beginning. concurrency: recorded runs open at once.
    seed: of times for chats that have none.

    Rows that cannot be used are listed in `Trace.problems`, and so are files of a folder. Raises a
    TraceError for a path without any usable row, and ConfigError for text without `tokens`.

    >>> import json, tempfile
    >>> row = {"session_id": 1, "ts": 0.0, "input_tokens": [5, 6], "output_tokens": [7]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "short.jsonl"
    ...     _ = path.write_text(json.dumps(row))
    ...     [trace] = read_traces(path)
    >>> trace.name, trace.format, trace.requests[0].ids.tolist(), trace.prompt_tokens
    ('short', 'marconi', [5, 6, 7], 2)
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    make = (lambda: tokens) if isinstance(tokens, ChatEncoder) else tokens
    options = ReadOptions(make, limit, concurrency, seed)
    return _with_own_names(trace for path in given for trace in _read(Path(path), options))


def _read(path: Path, options: ReadOptions) -> list[Trace]:
    if path.is_dir():
        return _read_folder(path, options)
    trace = _read_file(path, options)
    return [trace or _read_runs(path, [path], [], options)]


def _read_folder(folder: Path, options: ReadOptions) -> list[Trace]:
    traces: list[Trace] = []
    runs: list[Path] = []
    problems: list[TraceError] = []
    for file in _candidates(folder, problems):
        try:
            trace = _read_file(file, options)
        except TraceError as error:
            problems.append(error)
            continue
        if trace is None:
            runs.append(file)
        else:
            traces.append(trace)
    if runs:
        try:
            traces.append(_read_runs(folder, runs, problems, options))
        except TraceError as error:
            if not traces:
                raise
            problems.append(error)
        else:
            return traces
    if not traces:
        raise (
            problems[0]
            if problems
            else TraceNotFound(
                shown(folder),
                "holds no trace",
                "give a folder with .json, .jsonl or .traj files, plain or .gz",
            )
        )
    return [replace(traces[0], problems=(*traces[0].problems, *problems)), *traces[1:]]


def _candidates(folder: Path, problems: list[TraceError]) -> list[Path]:
    """Files that may be traces by name, in the order of `replay`: a folder's own files first.

    Links to folders are not followed. Folders that cannot be read are added to `problems`.
    """

    def refuse(error: OSError) -> None:
        problems.append(
            TraceNotFound(
                shown(Path(error.filename)),
                f"cannot be read: {error.strerror}",
                "check its permissions",
            )
        )

    found: list[Path] = []
    for inner, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        found += [
            Path(inner, name)
            for name in sorted(files)
            if name.lower().removesuffix(".gz").endswith(_SUFFIXES)
        ]
    return found


def _read_file(path: Path, options: ReadOptions) -> Trace | None:
    """The trace in a file; None if it is one of recorded runs."""
    source = Source(path)
    stream = _until_damaged(source, rows(source))
    for row in stream:
        known = find_trace_format(row)
        if known is not None:
            requests = known.read(source, chain([row], stream), options)
            return _trace(path, known.name, requests, source.problems)
        if is_trajectory(row):
            return None
        source.reject(_unknown(source, row))
    return _trace(path, "", [], source.problems)


def _read_runs(
    path: Path, files: list[Path], problems: list[TraceError], options: ReadOptions
) -> Trace:
    name, requests, more = read_runs(shown(path), files, options)
    return _trace(path, name, requests, [*problems, *more])


def _until_damaged(source: Source, stream: Iterator[Row]) -> Iterator[Row]:
    """The rows before the place from which nothing can be read, which is a problem like others."""
    try:
        yield from stream
    except TraceError as error:
        source.reject(error)


def _unknown(source: Source, row: Row) -> TraceFormatError:
    return TraceFormatError(source.shown, "is no trace of a known format", _KNOWN, line=row.line)


def _trace(path: Path, form: str, requests: list[SimRequest], problems: list[TraceError]) -> Trace:
    if not requests:
        raise (
            problems[0]
            if problems
            else TraceFormatError(shown(path), "holds no request", "give a trace with one at least")
        )
    return Trace(_name(path), form, tuple(requests), tuple(problems))


def _name(path: Path) -> str:
    name = path.name or path.resolve().name
    for suffix in (".gz", ".jsonl", ".json", ".traj", ".calls", ".output"):
        name = name.removesuffix(suffix)
    return shown(Path(name or path.name))


def _with_own_names(traces: Iterable[Trace]) -> list[Trace]:
    counts: dict[str, int] = {}
    own = []
    for trace in traces:
        count = counts[trace.name] = counts.get(trace.name, 0) + 1
        own.append(trace if count == 1 else replace(trace, name=f"{trace.name}#{count}"))
    return own
