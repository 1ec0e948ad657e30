"""Folders of generated files in the user's cache directory: written whole, checked when opened."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from agentcache.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MARKER_NAME", "cache_home", "ensure_folder"]

MARKER_NAME = "agentcache.json"


def cache_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where generated files are kept.

    `$AGENTCACHE_HOME`, else `$XDG_CACHE_HOME/agentcache`, else `~/.cache/agentcache`. A relative
    `$XDG_CACHE_HOME` is passed over, as its specification asks.
    """
    if own := environ.get("AGENTCACHE_HOME"):
        return Path(own).expanduser()
    shared = Path(environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "agentcache"


def ensure_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `write` unless it already holds the files that `write` left there.

    `write` fills an empty folder with files and gives the same bytes each time. Several processes
    may call this at once. A missing folder appears in one step; in a damaged one each file is
    replaced in one step, so that a process that has the old file open keeps it.

    Raises `ModelError` if the folder cannot be written.
    """
    if _is_intact(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-") as staging:
            fresh = Path(staging) / folder.name
            fresh.mkdir()
            write(fresh)
            _write_marker(fresh)
            _publish(fresh, folder)
    except OSError as error:
        raise ModelError(
            f"cannot write the model folder {folder}: {error}; free or unlock that path, or set "
            "AGENTCACHE_HOME to a folder that can be written"
        ) from error
    return folder


def _publish(fresh: Path, folder: Path) -> None:
    """Put `fresh` in the place of `folder`, which another process may just have filled."""
    try:
        fresh.rename(folder)
    except OSError:
        if _is_intact(folder):
            return
        # The marker goes last: a folder with a marker that fits is complete.
        for file in sorted(fresh.iterdir(), key=lambda path: path.name == MARKER_NAME):
            file.replace(folder / file.name)


def _write_marker(folder: Path) -> None:
    digests = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / MARKER_NAME).write_text(json.dumps({"sha256": digests}, indent=1), encoding="utf-8")


def _is_intact(folder: Path) -> bool:
    """Whether every file the marker lists is there with the bytes it had when it was written."""
    try:
        marker = json.loads((folder / MARKER_NAME).read_text(encoding="utf-8"))
        digests = dict(marker["sha256"])
        return bool(digests) and all(_sha256(folder / name) == digests[name] for name in digests)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
