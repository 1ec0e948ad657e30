"""Keys: the namespace that keeps models, adapters and tenants apart, and token comparison."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from agentcache.types import IntArray

__all__ = ["Namespace", "common_prefix_len"]

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Namespace:
    """What besides its tokens identifies a prefix, as separate typed parts.

    `tenant=None` is the default tenant and differs from every string; `model` is the fingerprint of
    weights, config, tokenizer and template.

    >>> Namespace(model="m", tenant="a").digest() == Namespace(model="ma").digest()
    False
    """

    model: str
    tenant: str | None = None
    adapter: str | None = None

    def digest(self) -> bytes:
        """32 bytes; equal exactly where every part is equal.

        Each part enters with its name, whether it is set, and its length, so that no two tuples of
        parts that concatenate to the same text collide.
        """
        out = hashlib.sha256()
        for name in ("model", "tenant", "adapter"):
            value = getattr(self, name)
            data = b"" if value is None else value.encode("utf-8", "surrogatepass")
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
