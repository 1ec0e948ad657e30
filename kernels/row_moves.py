"""What lies between products: a few rows added, copied, gathered, put away, turned by positions.

On a CPU and up to `rows.MOST_ROWS` rows the compiled forms serve, so that a decode step can be
recorded whole (`recording.py`); else PyTorch's.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from agentcache.kernels import rows

if rows.IS_COMPILED:
    from agentcache.kernels import _rows

__all__ = [
    "add",
    "as_type",
    "gather",
    "gather_rounded",
    "rotate",
    "rotate_reference",
    "scale",
    "scatter",
]

_FLOATS = (torch.float32, torch.bfloat16)


def add(x: Tensor, y: Tensor, factor: float = 1.0) -> Tensor:
    """`x + factor * y`, of one shape and type."""
    is_alike = x.shape == y.shape and x.dtype == y.dtype
    if not (is_alike and _is_few(x, y) and x.is_contiguous() and y.is_contiguous()):
        return torch.add(x, y, alpha=factor)
    out = torch.empty(x.shape, dtype=x.dtype)
    _sum(x, 1.0, y, factor, out)
    return out


def scale(x: Tensor, factor: float) -> Tensor:
    """`x * factor`."""
    if factor == 1:
        return x
    if not (_is_few(x) and x.is_contiguous()):
        return x * factor
    out = torch.empty(x.shape, dtype=x.dtype)
    _sum(x, factor, None, 0.0, out)
    return out


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In this type, and contiguous."""
    if x.dtype == dtype and x.is_contiguous():
        return x
    if not (_is_few(x) and dtype in _FLOATS and _are_whole(x)):
        return x.to(dtype).contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    _move(x, None, out, None)
    return out


def gather(table: Tensor, index: Tensor) -> Tensor:
    """`table[index]`: rows of [num, ...] by index [R] int64."""
    if not (_is_few_numbers(index) and rows.takes(table) and _are_whole(table)):
        return table[index]
    out = torch.empty((len(index), *table.shape[1:]), dtype=table.dtype)
    _move(table, index, out, None)
    return out


def gather_rounded(table: Tensor, factors: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """`(table * factors)[index]` in this type: rows of [num, width] int8 by index [R] int64.

    factors: [num] float32.
    """
    if not (_is_few_numbers(index) and dtype in _FLOATS and _are_whole(table)):
        return (table[index].float() * factors[index, None]).to(dtype)
    out = torch.empty((len(index), table.shape[1]), dtype=dtype)
    _move(table, index, out, None, factors)
    return out


def scatter(target: Tensor, index: Tensor, new: Tensor) -> None:
    """`target[index] = new`, in the target's type; index: [R] int64, different ones."""
    is_whole = _are_whole(new) and _are_whole(target)
    if is_whole and _is_few(new) and _is_few_numbers(index) and rows.takes(target):
        _move(new, None, target, index)
    else:
        target.index_copy_(0, index, new.to(target.dtype))


def rotate_reference(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    scale: float = 1.0,
    in_turns: bool = False,
) -> Tensor:
    """The formula in float32. Shapes as in `rotate`."""
    angles = (positions.float()[:, None] * frequencies)[:, None]
    cosine, sine = angles.cos() * scale, angles.sin() * scale
    turned, kept = x.float().split([2 * len(frequencies), x.shape[2] - 2 * len(frequencies)], 2)
    if in_turns:
        a, b = turned[..., ::2], turned[..., 1::2]
        new = torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).flatten(2)
    else:
        a, b = turned.chunk(2, 2)
        new = torch.cat([a * cosine - b * sine, b * cosine + a * sine], 2)
    return torch.cat([new, kept], 2).to(x.dtype)


def rotate(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    scale: float = 1.0,
    in_turns: bool = False,
) -> Tensor:
    """Rotary positions (arXiv:2104.09864, eq. 34): pairs of the first 2 * F channels of each head
    turned by position times frequency, the other channels as they are.

    x: [R, H, D], rows any distance apart. positions: [R] int64. frequencies: [F] float32. scale: on
    cosine and sine. in_turns: neighbouring channels are pairs, not halves.
    """
    is_ready = _are_whole(x) and _is_few_numbers(positions) and frequencies.is_contiguous()
    if not (is_ready and _is_few(x)):
        return rotate_reference(x, positions, frequencies, scale=scale, in_turns=in_turns)
    out = torch.empty(x.shape, dtype=x.dtype)
    _rows.rotate(
        x.data_ptr(),
        rows.KINDS[x.dtype],
        x.stride(0),
        out.data_ptr(),
        positions.data_ptr(),
        frequencies.data_ptr(),
        len(x),
        x.shape[1],
        x.shape[2],
        len(frequencies),
        scale,
        in_turns,
        torch.get_num_threads(),
    )
    return out


def _is_few(*tensors: Tensor) -> bool:
    """Whether the compiled forms take tensors of so many rows and these types."""
    return all(len(each) <= rows.MOST_ROWS and rows.takes(each) for each in tensors)


def _is_few_numbers(index: Tensor) -> bool:
    """Whether they take these as indices or positions."""
    is_ready = index.is_cpu and index.dtype == torch.int64 and index.is_contiguous()
    return rows.IS_COMPILED and is_ready and len(index) <= rows.MOST_ROWS


def _are_whole(x: Tensor) -> bool:
    """Whether each row's numbers lie one behind the other."""
    return not len(x) or x[0].is_contiguous()


def _sum(x: Tensor, alpha: float, y: Tensor | None, beta: float, out: Tensor) -> None:
    _rows.sum_of_two(
        x.data_ptr(),
        alpha,
        rows.address(y),
        beta,
        out.data_ptr(),
        x.numel(),
        rows.KINDS[x.dtype],
        torch.get_num_threads(),
    )


def _move(
    x: Tensor,
    source: Tensor | None,
    y: Tensor,
    to: Tensor | None,
    factors: Tensor | None = None,
) -> None:
    """`y[to] = x[source]`, or `(x * factors)[source]`, row by row."""
    _rows.move(
        x.data_ptr(),
        rows.KINDS[x.dtype],
        x.stride(0),
        rows.address(source),
        rows.address(factors),
        y.data_ptr(),
        rows.KINDS[y.dtype],
        y.stride(0),
        rows.address(to),
        len(x) if source is None else len(source),
        prod(x.shape[1:]),
        torch.get_num_threads(),
    )
