"""One token's attention to the keys of its sequence, for each of several rows, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentcache.kernels import rows
from agentcache.kernels.row_moves import as_type

if rows.IS_COMPILED:
    from agentcache.kernels import _rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["KeyRuns", "attend", "attend_reference"]

_SPLITS = 8
"""Most parts that the keys of a row are gone through in, as in `_rows.h`."""
_LANES = 16
"""Numbers that the compiled loops take at a time; widths of keys and values are multiples of it."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyRuns:
    """Where the keys of each of several rows lie. pairs: [num, 2] int64, start and length of runs
    of slots, row after row. firsts: [R + 1] int64, the first run of each row and the end."""

    pairs: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, runs: Sequence[Sequence[tuple[int, int]]]) -> KeyRuns:
        """By (start, length) for each row."""
        firsts = [0]
        for own in runs:
            firsts.append(firsts[-1] + len(own))
        return cls(
            torch.tensor([pair for own in runs for pair in own], dtype=torch.int64),
            torch.tensor(firsts, dtype=torch.int64),
        )

    def __iter__(self) -> Iterator[list[list[int]]]:
        pairs, firsts = self.pairs.tolist(), self.firsts.tolist()
        return (pairs[a:b] for a, b in pairwise(firsts))


def attend_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    runs: KeyRuns,
    *,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """The formula in float32, row by row. Shapes as in `attend`."""
    group = q.shape[1] // keys.shape[1]
    out = []
    for query, own in zip(q.float(), runs, strict=True):
        k, v = (
            torch.cat([each[at : at + num] for at, num in own]).float().repeat_interleave(group, 1)
            for each in (keys, values)
        )
        scores = torch.einsum("hd,nhd->hn", query, k) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(k)]
        out.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(out).to(q.dtype)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    runs: KeyRuns,
    *,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of one token each of R sequences to all keys of its own.

    q: [R, Hq, D]. keys, values: [slots, Hkv, D] and [slots, Hkv, Dv]; rows and slots may lie any
    distance apart, Hkv divides Hq. runs: where the keys of each row lie, its own included.
    sinks: [Hq] logits that only join the denominator. soft_cap: bounds the scaled scores:
    `soft_cap * tanh(score / soft_cap)`. Returns [R, Hq, Dv]. Parts of long sequences merge by
    their log-sum-exp (arXiv:2205.14135).
    """
    num_rows, num_heads, key_dim = q.shape
    kv_heads, value_dim = values.shape[1:]
    if not _attends(q, keys, values):
        return attend_reference(q, keys, values, runs, scale=scale, sinks=sinks, soft_cap=soft_cap)
    is_ready = q.dtype == torch.float32 and q.stride()[1:] == (key_dim, 1)
    wide = q if is_ready else as_type(q, torch.float32)
    part = torch.empty(num_rows * _SPLITS * num_heads * (value_dim + 2))
    y = torch.empty((num_rows, num_heads, value_dim))
    capped = None if sinks is None else sinks.float().contiguous()
    _rows.attend(
        wide.data_ptr(),
        wide.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        rows.KINDS[keys.dtype],
        keys.stride(0),
        values.stride(0),
        runs.pairs.data_ptr(),
        runs.firsts.data_ptr(),
        num_rows,
        num_heads,
        kv_heads,
        key_dim,
        value_dim,
        rows.address(capped),
        scale,
        soft_cap or 0.0,
        part.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return as_type(y, q.dtype)


def _attends(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the compiled form takes these."""
    return (
        rows.takes(q)
        and rows.takes(keys)
        and keys.dtype == values.dtype
        and keys.stride(-1) == values.stride(-1) == 1
        and keys.stride(1) == keys.shape[2]
        and values.stride(1) == values.shape[2]
        and keys.shape[2] % _LANES == 0
        and values.shape[2] % _LANES == 0
    )
