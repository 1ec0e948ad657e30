"""One token of Mamba-2 for each of several sequences, from the mixer's input product to its
output: convolution, time step and state update in one pass over the states where they lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from agentcache.kernels import rows as row_ops
from agentcache.kernels.causal_conv1d import causal_conv1d_update
from agentcache.kernels.state_update import state_update

if row_ops.IS_COMPILED:
    from agentcache.kernels import _rows

__all__ = ["mamba2_step", "mamba2_step_reference"]

_KINDS = {torch.float32: 0, torch.bfloat16: 1}


def mamba2_step_reference(
    projected: Tensor,
    conv: Tensor,
    state: Tensor,
    rows: Tensor,
    *,
    taps: Tensor,
    bias: Tensor | None,
    dt_bias: Tensor,
    dt_limits: tuple[float, float],
    A: Tensor,
    D: Tensor,
    num_groups: int,
) -> Tensor:
    """By the ops of a single step each. Shapes as in `mamba2_step`."""
    _, num_heads, head_dim, state_dim = state.shape
    width, grouped = num_heads * head_dim, num_groups * state_dim
    _, mixed, dt = projected.split([width, width + 2 * grouped, num_heads], -1)
    dt = F.softplus(dt.float() + dt_bias).clamp_(*dt_limits)
    kept, moved = conv[rows], state[rows]
    mixed = causal_conv1d_update(mixed, kept, taps, bias, activation="silu")
    x, b, c = mixed.split([width, grouped, grouped], -1)
    y = state_update(
        moved,
        x.unflatten(-1, (num_heads, head_dim)),
        dt,
        A,
        b.unflatten(-1, (num_groups, state_dim)),
        c.unflatten(-1, (num_groups, state_dim)),
        D=D,
    )
    conv[rows], state[rows] = kept, moved
    return y.flatten(1).float()


def mamba2_step(
    projected: Tensor,
    conv: Tensor,
    state: Tensor,
    rows: Tensor,
    *,
    taps: Tensor,
    bias: Tensor | None,
    dt_bias: Tensor,
    dt_limits: tuple[float, float],
    A: Tensor,
    D: Tensor,
    num_groups: int,
) -> Tensor:
    """Absorb one token of each of R sequences; returns the outputs before their gate.

    Args:
        projected: [R, width + channels + H], the gate (not used here), x B C, and time steps, with
            width = H * P and channels = width + 2 * G * N.
        conv: [pool, channels, K - 1], state: [pool, H, P, N] float32: the pool's states, of which
            `rows` are moved on in place.
        rows: [R] int64, different ones of the pool.
        taps, bias: [channels, K], [channels] or None, of the convolution.
        dt_bias, A, D: [H] float32; A is negative. dt_limits: of the time steps.

    Returns [R, width] float32 (arXiv:2405.21060, eq. 16, and the convolution before it).
    """
    num_heads, head_dim, state_dim = state.shape[1:]
    if not _takes(projected, conv, state, taps, bias, num_groups):
        return mamba2_step_reference(
            projected,
            conv,
            state,
            rows,
            taps=taps,
            bias=bias,
            dt_bias=dt_bias,
            dt_limits=dt_limits,
            A=A,
            D=D,
            num_groups=num_groups,
        )
    num, channels = projected.shape[0], conv.shape[1]
    mixed = torch.empty((num, channels))
    y = torch.empty((num, num_heads * head_dim))
    _rows.mamba2_step(
        projected.data_ptr(),
        _KINDS[projected.dtype],
        conv.data_ptr(),
        _KINDS[conv.dtype],
        conv.stride(0),
        state.data_ptr(),
        state.stride(0),
        rows.data_ptr(),
        num,
        taps.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        taps.shape[1],
        dt_bias.data_ptr(),
        A.data_ptr(),
        D.data_ptr(),
        *dt_limits,
        num_heads,
        head_dim,
        num_groups,
        state_dim,
        mixed.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def _takes(
    projected: Tensor,
    conv: Tensor,
    state: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    num_groups: int,
) -> bool:
    """Whether the compiled form takes these."""
    return (
        row_ops.takes(projected)
        and projected.is_contiguous()
        and projected.dtype in _KINDS
        and conv.dtype in _KINDS
        and state.dtype == taps.dtype == torch.float32
        and (bias is None or bias.dtype == torch.float32)
        and conv.stride()[1:] == (taps.shape[1] - 1, 1)
        and state.stride()[2:] == (state.shape[3], 1)
        and state.stride(1) == state.shape[2] * state.shape[3]
        and state.shape[1] % num_groups == 0
    )
