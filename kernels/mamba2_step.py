"""One token of Mamba-2 for each of several sequences, from the mixer's input product to its
output: convolution, time step and state update in one pass over the states where they lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from agentcache.kernels import rows as row_ops
from agentcache.kernels.causal_conv1d import causal_conv1d_update
from agentcache.kernels.conv_step import convolution, convolves
from agentcache.kernels.state_update import state_update

if row_ops.IS_COMPILED:
    from agentcache.kernels import _rows

__all__ = ["mamba2_step", "mamba2_step_reference"]


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
    channels = num_heads * head_dim + 2 * num_groups * state_dim
    mixed = projected[:, num_heads * head_dim :][:, :channels]
    if not _takes(projected, state, num_groups) or not convolves(mixed, conv, taps, bias, F.silu):
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
    convolved = torch.empty(mixed.shape)
    y = torch.empty((len(mixed), num_heads * head_dim))
    _rows.mamba2_step(
        *convolution(mixed, conv, rows, taps, bias, F.silu),
        convolved.data_ptr(),
        state.data_ptr(),
        state.stride(0),
        dt_bias.data_ptr(),
        A.data_ptr(),
        D.data_ptr(),
        *dt_limits,
        num_heads,
        head_dim,
        num_groups,
        state_dim,
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def _takes(projected: Tensor, state: Tensor, num_groups: int) -> bool:
    """Whether the compiled form takes these."""
    return (
        projected.is_contiguous()
        and state.dtype == torch.float32
        and state.stride()[2:] == (state.shape[3], 1)
        and state.stride(1) == state.shape[2] * state.shape[3]
        and state.shape[1] % num_groups == 0
    )
