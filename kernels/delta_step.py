"""One token of the gated delta rule for each of several sequences: its convolution, its norms, its
decays and the update in one pass over the states where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from agentcache.kernels import rows as row_ops
from agentcache.kernels.conv_step import conv_step_reference, convolution, convolves
from agentcache.kernels.gated_delta import gated_delta_update

if row_ops.IS_COMPILED:
    from agentcache.kernels import _rows

if TYPE_CHECKING:
    from agentcache.kernels.row_gates import Act

__all__ = ["delta_step", "delta_step_reference"]


def delta_step_reference(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    conv: Tensor,
    state: Tensor,
    rows: Tensor,
    *,
    taps: Tensor,
    bias: Tensor | None,
    act: Act | None,
    A: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    eps: float,
) -> Tensor:
    """By the ops of a single step each. Shapes as in `delta_step`."""
    _, num_heads, key_dim, value_dim = state.shape
    x = conv_step_reference(mixed.float(), conv, rows, taps=taps, bias=bias, act=act)
    keys = num_key_heads * key_dim
    q, k, v = x.split([keys, keys, num_heads * value_dim], -1)
    q, k = (each.unflatten(-1, (num_key_heads, key_dim)) for each in (q, k))
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + eps) for each in (q, k))
    rates = A if decay.dim() == 2 else A[:, None]
    moved = state[rows]
    y = gated_delta_update(
        moved,
        q * key_dim**-0.5,
        k,
        v.unflatten(-1, (num_heads, value_dim)),
        rates * F.softplus(decay.float() + dt_bias),
        beta.float().sigmoid(),
    )
    state[rows] = moved
    return y


def delta_step(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    conv: Tensor,
    state: Tensor,
    rows: Tensor,
    *,
    taps: Tensor,
    bias: Tensor | None,
    act: Act | None,
    A: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    eps: float,
) -> Tensor:
    """Absorb one token of each of R sequences; returns the outputs before their gate.

    Args:
        mixed: [R, C] with C = 2 G K + H V: queries and keys of G heads of width K, values of H
            heads of width V. Rows of this and of what follows may lie any distance apart.
        decay: [R, H], or by key channel [R, H, K]; the logarithm of a decay is
            `A * softplus(decay + dt_bias)`.
        beta: [R, H]; its sigmoid is how much of a correction is written.
        conv: [pool, C, Kc - 1], state: [pool, H, K, V] float32: the pool's states, of which `rows`
            are moved on in place.
        rows: [R] int64, different ones of the pool.
        taps, bias: [C, Kc], [C] or None, of the convolution; act: behind it.
        A: [H], negative, and dt_bias: [H] or [H, K], float32.
        num_key_heads: G, of which H is a multiple.
        eps: beside the squares that queries and keys are normed by.

    Returns [R, H, V] float32: with queries, scaled by the root of K, and keys of length one, the
    step of arXiv:2412.06464, eq. 10, or arXiv:2510.26692, eq. 1, which `gated_delta` writes out.
    """
    num_heads, key_dim, value_dim = state.shape[1:]
    if not _takes(mixed, decay, beta, state) or not convolves(mixed, conv, taps, bias, act):
        return delta_step_reference(
            mixed,
            decay,
            beta,
            conv,
            state,
            rows,
            taps=taps,
            bias=bias,
            act=act,
            A=A,
            dt_bias=dt_bias,
            num_key_heads=num_key_heads,
            eps=eps,
        )
    convolved = torch.empty(mixed.shape)
    y = torch.empty((len(mixed), num_heads, value_dim))
    _rows.delta_step(
        *convolution(mixed, conv, rows, taps, bias, act),
        convolved.data_ptr(),
        state.data_ptr(),
        state.stride(0),
        decay.data_ptr(),
        decay.stride(0),
        beta.data_ptr(),
        beta.stride(0),
        A.data_ptr(),
        dt_bias.data_ptr(),
        decay.dim() == 3,
        eps,
        num_key_heads,
        key_dim,
        num_heads,
        value_dim,
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def _takes(mixed: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> bool:
    """Whether the compiled form takes these."""
    key_dim, value_dim = state.shape[2:]
    return (
        decay.dtype == beta.dtype == mixed.dtype
        and decay.stride()[1:] == ((1,) if decay.dim() == 2 else (key_dim, 1))
        and beta.stride(1) == 1
        and state.dtype == torch.float32
        and state.stride()[1:] == (key_dim * value_dim, value_dim, 1)
    )
