"""Recorded agent runs, as `agentcache replay` reads and interleaves them."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from agentcache.errors import AgentCacheError, TraceError, TraceFormatError
from agentcache.replay.readers.base import shown
from agentcache.replay.schedule import interleave
from agentcache.replay.trace import read_paths
from agentcache.simulate.readers.encode import RunEncoder
from agentcache.simulate.readers.stream import is_gzip, unpack
from agentcache.simulate.trace import SimRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentcache.replay.trace import Trajectory
    from agentcache.simulate.readers.base import ReadOptions

__all__ = ["paced", "read_runs"]

_UNIT_S = 1.0
"""Between calls whose times were not recorded."""

_WARNING = re.compile(
    r"(?P<path>.*?)(?:, line (?P<line>\d+))?(?:, offset (?P<offset>\d+))?: "
    r"(?P<problem>.*); (?P<remedy>[^;]*)",
    re.DOTALL,
)


def read_runs(
    name: str, files: Sequence[Path], options: ReadOptions
) -> tuple[str, list[SimRequest], list[TraceError]]:
    """(format, requests, problems) of the runs in files, `concurrency` of them open at once."""
    problems: list[TraceError] = []
    with ExitStack() as stack:
        copies = _Copies(stack)
        for file in files:
            try:
                copies.add(file)
            except TraceError as error:
                problems.append(error)
        read = read_paths(copies.given)
    given = copies.given
    errors = [error for _, error in read.rejected]
    errors += filter(None, map(_error_of, read.warnings))
    problems += [_at(error, given) for error in errors]
    runs = [
        replace(run, path=shown(given.get(run.path, Path(run.path)))) for run in read.trajectories
    ]
    requests = list(_requests(name, runs, options, problems)) if runs else []
    return "+".join(sorted({run.format for run in runs})), requests, problems


class _Copies:
    """Files to read, compressed ones unpacked for as long as the stack stays open.

    The files of one folder stay in one folder of the same name: they may be calls of one run.
    given: the path of each file or folder that is read, to the one it stands for.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._folders: dict[Path, Path] = {}
        self.given: dict[str, Path] = {}

    def add(self, file: Path) -> None:
        """Take one more file. Raises TraceError for one that cannot be unpacked."""
        if not is_gzip(file):
            self.given[shown(file)] = file
            return
        target = self._folder(file.parent) / file.name.removesuffix(".gz")
        unpack(file, target)
        self.given[shown(target)] = file

    def _folder(self, parent: Path) -> Path:
        if parent not in self._folders:
            folder = Path(self._stack.enter_context(TemporaryDirectory()))
            folder /= parent.resolve().name or "runs"
            folder.mkdir()
            self._folders[parent] = folder
        return self._folders[parent]


def paced(runs: Sequence[Trajectory], concurrency: int) -> Iterator[tuple[int, int, bool, float]]:
    """(run, call, is its last, seconds) in the order in which `replay` makes the calls."""
    now: dict[int, float] = {}
    ends: list[float] = []
    for index, number, last in interleave(runs, concurrency):
        if number:
            calls = runs[index].calls
            at, before = calls[number].at, calls[number - 1].at
            pause = _UNIT_S if at is None or before is None else max(0.0, at - before)
            now[index] += pause
        else:
            # The first runs begin together, each later one when an earlier one has ended.
            now[index] = ends[index - concurrency] if index >= concurrency else 0.0
        yield index, number, last, now[index]
        if last:
            ends.append(now[index])


def _requests(
    name: str, runs: Sequence[Trajectory], options: ReadOptions, problems: list[TraceError]
) -> Iterator[SimRequest]:
    encoder = options.chat_encoder(name)
    encoders = [RunEncoder(encoder) for _ in runs]
    names = {run.id for run in runs}
    count = 0
    for index, number, last, at in paced(runs, options.concurrency):
        run = runs[index]
        try:
            encoded = encoders[index].encode(run.calls[number])
        except AgentCacheError as error:
            problems.append(
                TraceFormatError(
                    run.path, f"{run.id}, call {number}: {error}", "the other calls are kept"
                )
            )
            continue
        yield SimRequest(
            run.id,
            at,
            encoded.ids,
            encoded.prompt_len,
            parent=run.parent if run.parent in names else None,
            closes=last,
            marks=encoded.marks,
            passing=encoded.passing,
        )
        count += 1
        if count == options.limit:
            return


def _error_of(warning: str) -> TraceError | None:
    """A warning as the error that it is the text of."""
    found = _WARNING.fullmatch(warning)
    if found is None:
        return None
    line, offset = found["line"], found["offset"]
    return TraceFormatError(
        found["path"],
        found["problem"],
        found["remedy"],
        line=None if line is None else int(line),
        offset=None if offset is None else int(offset),
    )


def _at(error: TraceError, given: dict[str, Path]) -> TraceError:
    """The error with the path that was given, where it names an unpacked copy."""
    path = given.get(error.path)
    if path is None or shown(path) == error.path:
        return error
    return type(error)(
        shown(path), error.problem, error.remedy, line=error.line, offset=error.offset
    )
