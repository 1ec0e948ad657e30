"""One token's attention to the keys of its sequence, for each of several rows, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentcache.kernels import rows
from agentcache.kernels.row_moves import as_type

if rows.IS_COMPILED:
    from agentcache.kernels import _rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["KeyRuns", "attend", "attend_gathered", "attend_reference"]

_SPLITS = 8
"""Most parts that the keys of a row are gone through in, as in `_rows.h`."""
_GATHERED_BYTES = 64 << 20
"""Most memory for keys and values that are gathered."""
_LANES = 16
"""Numbers that the compiled loops take at a time; widths of keys and values are multiples of it."""


@dataclass(frozen=True, eq=False)
class KeyRuns:
    """Where the keys of each of several rows lie. pairs: [num, 2] int64, start and length of runs
    of slots, row after row. firsts: [R + 1] int64, the first run of each row and the end. most: no
    row has more keys."""

    pairs: Tensor
    firsts: Tensor
    most: int

    @classmethod
    def of(
        cls, runs: Sequence[Sequence[tuple[int, int]]], device: torch.device | None = None
    ) -> KeyRuns:
        """By (start, length) for each row."""
        firsts = [0]
        for own in runs:
            firsts.append(firsts[-1] + len(own))
        pairs = [pair for own in runs for pair in own]
        return cls(
            torch.tensor(pairs, dtype=torch.int64, device=device),
            torch.tensor(firsts, dtype=torch.int64, device=device),
            max(sum(num for _, num in own) for own in runs),
        )

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """The slot of each key of each row, [R, most] int64, and whether there is one. Where there
        is none it says the row's last. Nothing of it is read on the host."""
        lengths = self.pairs[:, 1]
        ends = lengths.cumsum(0)
        bounds = torch.cat([ends.new_zeros(1), ends])[self.firsts]
        at = bounds[:-1, None] + torch.arange(self.most, device=ends.device)
        is_there = at < bounds[1:, None]
        at = at.minimum(bounds[1:, None] - 1)
        run = torch.searchsorted(ends, at, right=True)
        return self.pairs[run, 0] + at - (ends - lengths)[run], is_there


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
    """The formula in float32. Shapes as in `attend`; all keys of all rows are gathered at once."""
    slots, is_there = runs.slots
    q_heads = q.float().unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("rhgd,rnhd->rhgn", q_heads, keys[slots].float()) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~is_there[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.float().view(keys.shape[1], -1, 1).expand(len(q), -1, -1, -1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : runs.most]
    return torch.einsum("rhgn,rnhd->rhgd", weights, values[slots].float()).flatten(1, 2).to(q.dtype)


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
    their log-sum-exp (arXiv:2205.14135). Where there is no compiled form keys are gathered, some at
    a time, without anything being read on the host.
    """
    num_rows, num_heads, key_dim = q.shape
    kv_heads, value_dim = values.shape[1:]
    if not _attends(q, keys, values):
        return attend_gathered(
            q,
            lambda slots: (keys[slots], values[slots]),
            runs,
            (kv_heads, key_dim, value_dim),
            scale=scale,
            sinks=sinks,
            soft_cap=soft_cap,
        )
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


def attend_gathered(
    q: Tensor,
    read: Callable[[Tensor], tuple[Tensor, Tensor]],
    runs: KeyRuns,
    sizes: tuple[int, int, int],
    *,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """As `attend`, by PyTorch, with memory for as many keys at a time as `_GATHERED_BYTES` holds.

    read: of slots [R, n] their keys [R, n, Hkv, D] and values [R, n, Hkv, Dv]; sizes: Hkv, D, Dv.
    What was found so far is kept as its largest score, and sums over `exp(score - largest)`.
    """
    (slots, is_there), (kv_heads, key_dim, value_dim) = runs.slots, sizes
    q_heads = q.float().unflatten(1, (kv_heads, -1))
    largest = q_heads.new_full(q_heads.shape[:-1], float("-inf"))
    total = torch.zeros_like(largest)
    y: Tensor = q_heads.new_zeros((*largest.shape, value_dim))
    if sinks is not None:
        largest = sinks.float().view(kv_heads, -1).expand_as(largest)
        total = torch.ones_like(largest)
    num = max(1, _GATHERED_BYTES // (4 * len(q) * kv_heads * (key_dim + value_dim)))
    for some, there in zip(slots.split(num, 1), is_there.split(num, 1), strict=True):
        keys, values = read(some)
        scores = torch.einsum("rhgd,rnhd->rhgn", q_heads, keys.float()) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~there[:, None, None], float("-inf"))
        before, largest = largest, largest.maximum(scores.amax(-1))
        kept, weights = (before - largest).exp(), (scores - largest[..., None]).exp()
        total = total * kept + weights.sum(-1)
        found = torch.einsum("rhgn,rnhd->rhgd", weights, values.float())
        y = y * kept[..., None] + found
    y /= total[..., None]
    return y.flatten(1, 2).to(q.dtype)


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
