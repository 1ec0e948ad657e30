"""One token of Mamba-1 for each of several sequences, over its states where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

from agentcache.kernels import rows as row_ops
from agentcache.kernels.selective_scan import selective_state_update

if row_ops.IS_COMPILED:
    from agentcache.kernels import _rows

__all__ = ["mamba1_step", "mamba1_step_reference"]


def mamba1_step_reference(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor,
    state: Tensor,
    rows: Tensor,
    *,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
) -> Tensor:
    """By the op of a single step. Shapes as in `mamba1_step`."""
    moved = state[rows]
    y = selective_state_update(
        moved, x, dt, A, b[:, None], c[:, None], D=D, z=gate, dt_bias=dt_bias, dt_softplus=True
    )
    state[rows] = moved
    return y


def mamba1_step(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor,
    state: Tensor,
    rows: Tensor,
    *,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
) -> Tensor:
    """Absorb one token of each of R sequences; returns the gated outputs.

    Args:
        x, dt: what is convolved, and time steps before dt_bias and softplus, [R, E] each.
        b, c: input and output projections [R, N], of all channels.
        gate: [R, E]; rows may lie any distance apart.
        state: [pool, E, N] float32: the pool's states, of which `rows` are moved on in place.
        rows: [R] int64, different ones of the pool.
        dt_bias, D: [E], A: [E, N] float32; A is negative.

    Returns [R, E] in x's dtype (arXiv:2312.00752, eq. 2, discretised as in section 3.3):
    `h = exp(dt A) h + dt x b`, `(c h + D x) * silu(gate)`.
    """
    inputs = (x, dt, b, c)
    is_plain = (
        all(each.dtype == x.dtype and each.is_contiguous() for each in inputs)
        and gate.dtype == x.dtype
        and gate.stride(1) == 1
        and state.dtype == torch.float32
        and state.stride()[1:] == (state.shape[2], 1)
    )
    if not row_ops.takes(x) or not is_plain:
        return mamba1_step_reference(x, dt, b, c, gate, state, rows, dt_bias=dt_bias, A=A, D=D)
    y = torch.empty(x.shape, dtype=x.dtype)
    _rows.mamba1_step(
        x.data_ptr(),
        dt.data_ptr(),
        b.data_ptr(),
        c.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        row_ops.KINDS[x.dtype],
        state.data_ptr(),
        state.stride(0),
        rows.data_ptr(),
        len(x),
        x.shape[1],
        b.shape[1],
        A.data_ptr(),
        D.data_ptr(),
        dt_bias.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y
