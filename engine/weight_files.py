"""Safetensors files of a folder: which there are, and what their headers say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Stored", "stored_in", "weight_files"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file. dtype: by its name in the format."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def weight_files(folder: Path | None) -> tuple[Path, ...]:
    """The safetensors files of a folder; none unless they are all there."""
    if folder is None:
        return ()
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        names = ["model.safetensors"]
    files = tuple(folder / name for name in names)
    return files if all(file.is_file() for file in files) else ()


def stored_in(file: Path) -> dict[str, Stored]:
    """The tensors of a file by name. Its header is a length and JSON; no more is read.

    Raises ValueError, OSError.
    """
    with file.open("rb") as opened:
        header_len = int.from_bytes(opened.read(8), "little")
        if header_len > file.stat().st_size:
            raise ValueError(f"{file.name} is no safetensors file, or not the whole of it")
        header: dict[str, Any] = json.loads(opened.read(header_len))
    return {name: _stored(file, each) for name, each in header.items() if name != "__metadata__"}


def _stored(file: Path, found: dict[str, Any]) -> Stored:
    begin, end = found["data_offsets"]
    return Stored(file, found["dtype"], tuple(found["shape"]), end - begin)
