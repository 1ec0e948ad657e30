"""Keys: the namespace that keeps models, adapters and tenants apart, and token comparison."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from agentcache.types import IntArray

__all__ = ["Namespace", "Salt", "common_prefix_len"]

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Namespace:
    """What besides its tokens identifies a prefix, as separate typed parts.

    `tenant=None` is the default tenant and differs from every string; `model` is the fingerprint of
    weights, config, tokenizer and template. shares_head: the namespace in which sessions that share
    their heads across tenants begin; what follows a head is kept apart by a `Salt`. split: all of
    it is computed in passes that end at multiples of so many tokens, and shared with nothing else.

    >>> Namespace(model="m", tenant="a").digest() == Namespace(model="ma").digest()
    False
    """

    model: str
    tenant: str | None = None
    adapter: str | None = None
    shares_head: bool = False
    split: int | None = None

    def digest(self) -> bytes:
        """32 bytes; equal exactly where every part is equal.

        Each part enters with its name, whether it is set, and its length, so that no two tuples of
        parts that concatenate to the same text collide.
        """
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "shares_head"}
        parts["split"] = None if self.split is None else str(self.split)
        return _digest("shared namespace" if self.shares_head else "namespace", parts)


@dataclass(frozen=True, slots=True)
class Salt:
    """Further identity of everything from position `at` on, as separate typed parts.

    Tokens below `at` are shared with every sequence of the namespace that has them; from there on
    only with those that carry an equal salt at the same position. tenant: a private tail behind a
    shared head. adapter: a switch on the way. content: digest of what the tokens at `at` stand for
    besides their ids (an image, an audio clip).

    >>> Salt(at=4, tenant="a").digest() == Salt(at=4, adapter="a").digest()
    False
    """

    at: int
    tenant: str | None = None
    adapter: str | None = None
    content: bytes | None = None

    def digest(self) -> bytes:
        """32 bytes; equal exactly where every part but the position is equal."""
        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "at"}
        return _digest("salt", parts)


def _digest(what: str, parts: dict[str, str | bytes | None]) -> bytes:
    out = hashlib.sha256(f"{what}:{len(parts)}:".encode())
    for name, value in parts.items():
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value or b""
        out.update(f"{name}:{int(value is not None)}:{len(data)}:".encode())
        out.update(data)
    return out.digest()


def common_prefix_len(a: IntArray, b: IntArray) -> int:
    """How many leading tokens of two arrays are equal; compares block by block.

    >>> common_prefix_len(np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32))
    2
    """
    total = min(len(a), len(b))
    for start in range(0, total, _BLOCK):
        stop = min(start + _BLOCK, total)
        differs = a[start:stop] != b[start:stop]
        if differs.any():
            return start + int(np.argmax(differs))
    return total
