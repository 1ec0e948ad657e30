"""Work on a few rows at a time on a CPU: a decode step, a short extension.

Such work is bound by what it reads and by the number of calls, so these ops read each weight once
for all rows and do what surrounds a product in the same pass. Compiled where the installation had
a compiler, else PyTorch's; each has its formula beside it. Inputs are float32 or bfloat16,
computing is in float32, outputs have the inputs' type.

The environment variable AGENTCACHE_PURE_PYTHON, set to anything but 0, turns the compiled forms
off.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "IS_COMPILED",
    "MOST_ROWS",
    "KeyRuns",
    "attend",
    "attend_reference",
    "gate",
    "gate_reference",
    "linear",
    "linear_reference",
    "rms_norm",
    "rms_norm_reference",
    "silu_mul",
    "silu_mul_reference",
    "takes",
]

MOST_ROWS = 32
"""Up to about so many rows a product takes no longer here than in PyTorch with weights that lie row
by row, of which a few rows take it two to four times as long (bench/kernels/run.py --op rows)."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_FLOATS = frozenset({torch.float32, torch.bfloat16})
_SPLITS = 8
"""Most parts that the keys of a row are gone through in, as in `_rows.h`."""
_LANES = 16
"""Numbers that the compiled loops take at a time; widths of keys and values are multiples of it."""

IS_COMPILED = False
"""Whether the compiled forms are in use."""

if os.environ.get("AGENTCACHE_PURE_PYTHON", "0") == "0":
    try:
        # it takes the OpenMP that torch has loaded by now
        from agentcache.kernels import _rows

        IS_COMPILED = True
    except ImportError:  # no compiler when it was installed, or another OpenMP
        pass


def takes(tensor: Tensor) -> bool:
    """Whether the compiled forms take this: float32 or bfloat16 on a CPU."""
    return IS_COMPILED and tensor.is_cpu and tensor.dtype in _FLOATS


def linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """The formula in float32. Shapes as in `linear`."""
    y = x.float() @ weight.float().T
    for factor, is_sum in ((weight_scale, False), (bias, True), (scale, False)):
        if factor is not None:
            y = y + factor if is_sum else y * factor
    return y.to(x.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """`((x @ weight.T) * weight_scale + bias) * scale`, each weight read once for all rows.

    x: [R, in] float32 or bfloat16. weight: [out, in] float32, bfloat16 or int8, contiguous.
    weight_scale, bias, scale: [out] float32, or None for none. Returns [R, out] in x's dtype. A row
    comes out the same whatever other rows there are.

    >>> import torch
    >>> linear(torch.ones(2, 3), torch.ones(4, 3)).tolist()[0]
    [3.0, 3.0, 3.0, 3.0]
    """
    if not takes(x) or weight.dtype not in _KINDS or not weight.is_contiguous():
        return linear_reference(x, weight, weight_scale=weight_scale, bias=bias, scale=scale)
    x = x.contiguous()
    rows, columns = x.shape
    out = weight.shape[0]
    y = torch.empty((rows, out), dtype=x.dtype)
    kind = _KINDS[x.dtype]
    _rows.linear(
        x.data_ptr(),
        kind,
        rows,
        columns,
        weight.data_ptr(),
        _KINDS[weight.dtype],
        out,
        _address(weight_scale),
        _address(bias),
        _address(scale),
        y.data_ptr(),
        kind,
        torch.get_num_threads(),
    )
    return y


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` along the last dimension (arXiv:1910.07467, eq. 4).

    x: [..., width]. weight: [width] float32.
    """
    if not takes(x):
        return rms_norm_reference(x, weight, eps)
    x = x.contiguous()
    y, width = torch.empty_like(x), weight.shape[0]
    _rows.rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        x.numel() // width,
        width,
        eps,
        _KINDS[x.dtype],
        torch.get_num_threads(),
    )
    return y


def silu_mul_reference(x: Tensor) -> Tensor:
    """The formula in float32."""
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` of [R, 2 * width], gates first (arXiv:2002.05202)."""
    if not takes(x):
        return silu_mul_reference(x)
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty((rows, width), dtype=x.dtype)
    threads = torch.get_num_threads()
    _rows.silu_mul(x.data_ptr(), y.data_ptr(), rows, width, _KINDS[x.dtype], threads)
    return y


def gate_reference(
    y: Tensor,
    gate: Tensor,
    norm: Tensor | None = None,
    *,
    eps: float = 0.0,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> Tensor:
    """The formula in float32. Shapes as in `gate`."""
    opened = F.silu(gate.float())
    wide = y.float()
    if norm is None:
        return (wide * opened).to(y.dtype)
    x = wide if norm_before_gate else wide * opened
    parts = x.unflatten(-1, (groups, -1))
    x = F.rms_norm(parts, parts.shape[-1:], None, eps).flatten(-2) * norm
    return (x * opened if norm_before_gate else x).to(y.dtype)


def gate(
    y: Tensor,
    gate: Tensor,
    norm: Tensor | None = None,
    *,
    eps: float = 0.0,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> Tensor:
    """`y * silu(gate)`, with an RMS norm of groups of each row after that, or of y before it.

    y: [R, width]; may be overwritten. gate: [R, width] with rows any distance apart. norm: weights
    [width] float32, or None for no norm. This is Mamba-2's gated norm, and gated delta's.
    """
    if not takes(y) or not takes(gate) or y.dtype != torch.float32 or gate.stride(-1) != 1:
        return gate_reference(
            y, gate, norm, eps=eps, groups=groups, norm_before_gate=norm_before_gate
        )
    y = y.contiguous()
    _rows.gate(
        y.data_ptr(),
        gate.data_ptr(),
        _KINDS[gate.dtype],
        gate.stride(0),
        y.shape[0],
        y.shape[1],
        _address(norm),
        groups,
        norm_before_gate,
        eps,
        torch.get_num_threads(),
    )
    return y


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

    q: [R, Hq, D]. keys, values: [slots, Hkv, D] and [slots, Hkv, Dv], slots any distance apart;
    Hkv divides Hq. runs: where the keys of each row lie, its own included.
    sinks: [Hq] logits that only join the denominator. soft_cap: bounds the scaled scores:
    `soft_cap * tanh(score / soft_cap)`. Returns [R, Hq, Dv]. Parts of long sequences merge by
    their log-sum-exp (arXiv:2205.14135).
    """
    num_rows, num_heads, key_dim = q.shape
    kv_heads, value_dim = values.shape[1:]
    if not _attends(q, keys, values):
        return attend_reference(q, keys, values, runs, scale=scale, sinks=sinks, soft_cap=soft_cap)
    wide = q.float().contiguous()
    part = torch.empty(num_rows * _SPLITS * num_heads * (value_dim + 2))
    y = torch.empty((num_rows, num_heads, value_dim))
    capped = None if sinks is None else sinks.float().contiguous()
    _rows.attend(
        wide.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        _KINDS[keys.dtype],
        keys.stride(0),
        values.stride(0),
        runs.pairs.data_ptr(),
        runs.firsts.data_ptr(),
        num_rows,
        num_heads,
        kv_heads,
        key_dim,
        value_dim,
        _address(capped),
        scale,
        soft_cap or 0.0,
        part.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y.to(q.dtype)


def _attends(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the compiled form takes these."""
    return (
        takes(q)
        and takes(keys)
        and keys.dtype == values.dtype
        and keys.stride(-1) == values.stride(-1) == 1
        and keys.stride(1) == keys.shape[2]
        and values.stride(1) == values.shape[2]
        and keys.shape[2] % _LANES == 0
        and values.shape[2] % _LANES == 0
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
