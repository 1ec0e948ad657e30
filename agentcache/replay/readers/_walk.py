"""Files below given paths, in a fixed order, each once."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentcache.errors import TraceError, TraceNotFound
from agentcache.replay.readers._decode import unreadable
from agentcache.replay.readers.base import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Found", "find_files"]

_SUFFIXES = (".json", ".jsonl", ".traj")
_SHOWN = 5
"""How many of a folder's other files a warning names."""

_Identity = tuple[int, int]
"""Device and inode: the same for every name of a file or folder."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file to read, or the `error` or `warning` why there is none.

    `is_named` tells a file that was given from one found in a folder. `unknown` lists the files
    a warning stands for.
    """

    path: Path
    is_named: bool = False
    error: TraceError | None = None
    warning: str | None = None
    unknown: tuple[str, ...] = ()


def find_files(paths: Iterable[Path]) -> Iterator[Found]:
    """The files at and below paths; links are followed, folders sorted by name."""
    visited: set[_Identity] = set()
    for path in paths:
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            yield Found(path, error=unreadable(path, error))
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _below(path, visited)
        else:
            yield _file(path, visited, is_named=True)


def _below(folder: Path, visited: set[_Identity]) -> Iterator[Found]:
    # A stack instead of recursion: paths may nest deeper than Python calls can.
    stack: list[tuple[Path, frozenset[_Identity]]] = [(folder, frozenset())]
    while stack:
        current, above = stack.pop()
        try:
            real = _identity(current)
            folders, files, other = _entries(current)
        except OSError as error:
            yield Found(current, error=unreadable(current, error))
            continue
        if real in above:
            loop = TraceNotFound(
                shown(current), "leads back to a folder it lies in", "remove the link"
            )
            yield Found(current, error=loop)
            continue
        if real in visited:
            yield Found(current, warning=f"{shown(current)}: was given twice; read once")
            continue
        visited.add(real)
        if other:
            names = tuple(shown(file) for file in other)
            yield Found(current, warning=_left_out(current, other), unknown=names)
        for file in files:
            yield _file(file, visited, is_named=False)
        stack += [(inner, above | {real}) for inner in reversed(folders)]


def _identity(path: Path) -> _Identity:
    status = path.stat()
    return status.st_dev, status.st_ino


def _entries(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """The folders in a folder, its files that may be runs, and its other files, by name."""
    folders: list[Path] = []
    files: list[Path] = []
    other: list[Path] = []
    for entry in sorted(folder.iterdir()):
        is_candidate = entry.name.lower().endswith(_SUFFIXES)
        (folders if entry.is_dir() else files if is_candidate else other).append(entry)
    return folders, files, other


def _file(path: Path, visited: set[_Identity], *, is_named: bool) -> Found:
    try:
        real = _identity(path)
    except OSError as error:
        return Found(path, error=unreadable(path, error))
    if real in visited:
        return Found(path, warning=f"{shown(path)}: was given twice; read once")
    visited.add(real)
    return Found(path, is_named=is_named)


def _left_out(folder: Path, files: list[Path]) -> str:
    names = ", ".join(shown(Path(file.name)) for file in files[:_SHOWN])
    rest = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return f"{shown(folder)}: left out what is no recorded run by its name: {names}{rest}"
