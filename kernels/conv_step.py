"""One token of a causal convolution for each of several sequences, over its states where they lie,
by itself and as the first part of a mixer's step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentcache.kernels import row_gates
from agentcache.kernels import rows as row_ops
from agentcache.kernels.causal_conv1d import causal_conv1d_update

if row_ops.IS_COMPILED:
    from agentcache.kernels import _rows

if TYPE_CHECKING:
    from agentcache.kernels.row_gates import Act

__all__ = ["conv_step", "conv_step_reference", "convolution", "convolves"]


def conv_step_reference(
    x: Tensor,
    conv: Tensor,
    rows: Tensor,
    *,
    taps: Tensor,
    bias: Tensor | None,
    act: Act | None = None,
) -> Tensor:
    """The formula in float32. Shapes as in `conv_step`."""
    held = conv[rows]
    y = causal_conv1d_update(x.float(), held, taps, bias)
    conv[rows] = held
    return (y if act is None else act(y)).to(x.dtype)


def conv_step(
    x: Tensor,
    conv: Tensor,
    rows: Tensor,
    *,
    taps: Tensor,
    bias: Tensor | None,
    act: Act | None = None,
) -> Tensor:
    """Absorb one token of each of R sequences; the decode step of `causal_conv1d`.

    Args:
        x: inputs [R, C], rows any distance apart.
        conv: [pool, C, K - 1]: the pool's states, of which `rows` are moved on in place.
        rows: [R] int64, different ones of the pool.
        taps, bias: [C, K], [C] or None.
        act: on the outputs.

    Returns [R, C] in x's dtype.
    """
    if not convolves(x, conv, taps, bias, act):
        return conv_step_reference(x, conv, rows, taps=taps, bias=bias, act=act)
    y = torch.empty(x.shape, dtype=x.dtype)
    _rows.convolve(
        *convolution(x, conv, rows, taps, bias, act),
        y.data_ptr(),
        row_ops.KINDS[y.dtype],
        torch.get_num_threads(),
    )
    return y


def convolves(x: Tensor, conv: Tensor, taps: Tensor, bias: Tensor | None, act: Act | None) -> bool:
    """Whether the compiled forms take these. Shapes as in `conv_step`."""
    return (
        row_gates.takes(x, act)
        and row_ops.takes(conv)
        and x.stride(-1) == 1
        and taps.dtype == torch.float32
        and (bias is None or bias.dtype == torch.float32)
        and conv.stride()[1:] == (taps.shape[1] - 1, 1)
    )


_Args = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]


def convolution(
    x: Tensor,
    conv: Tensor,
    rows: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    act: Act | None,
) -> _Args:
    """What `_rows` takes of a convolution, but for where its outputs go."""
    return (
        x.data_ptr(),
        row_ops.KINDS[x.dtype],
        x.stride(0),
        conv.data_ptr(),
        row_ops.KINDS[conv.dtype],
        conv.stride(0),
        rows.data_ptr(),
        len(x),
        conv.shape[1],
        taps.data_ptr(),
        row_ops.address(bias),
        taps.shape[1],
        row_gates.ACTS[act],
    )
