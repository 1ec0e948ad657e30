"""Cases of the steps of recurrent mixers: one token for each of several sequences."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from _cases import Case, moving

from agentcache.kernels.conv_step import conv_step, conv_step_reference
from agentcache.kernels.delta_step import delta_step, delta_step_reference
from agentcache.kernels.mamba1_step import mamba1_step, mamba1_step_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["conv_step_cases", "delta_step_cases", "mamba1_step_cases"]


def conv_step_cases() -> Iterator[Case]:
    """One token each of several sequences."""
    for channels in (448, 8192):
        for num_rows in (1, 8):
            x = torch.randn(num_rows, channels)
            conv = torch.randn(num_rows, channels, 3)
            weights = {"taps": torch.randn(channels, 4), "bias": torch.randn(channels)}
            yield Case(
                f"C{channels} R{num_rows}",
                num_rows,
                *(
                    moving(
                        partial(form, x, rows=torch.arange(num_rows), act=F.silu, **weights),
                        conv=conv,
                    )
                    for form in (conv_step, conv_step_reference)
                ),
                {"transformers": moving(partial(_their_convolution, x, **weights), conv=conv)},
            )


def _their_convolution(x: Tensor, *, conv: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    y: Tensor = qwen.causal_conv1d_update(x[..., None], conv, taps, bias, "silu")
    return y[..., 0]


def mamba1_step_cases() -> Iterator[Case]:
    """One token each of several sequences; PyTorch's is the formula with as few passes."""
    for channels, state_dim in ((512, 16), (8192, 16)):
        for num_rows in (1, 8):
            x, dt, gate = torch.randn(3, num_rows, channels)
            b, c = torch.randn(2, num_rows, state_dim)
            state = torch.randn(num_rows, channels, state_dim)
            weights = {
                "dt_bias": torch.randn(channels) - 4.0,
                "A": -torch.arange(1.0, state_dim + 1).expand(channels, -1).contiguous(),
                "D": torch.randn(channels),
            }
            given = (x, dt, b, c, gate)
            yield Case(
                f"E{channels} N{state_dim} R{num_rows}",
                num_rows,
                *(
                    moving(
                        partial(form, *given, rows=torch.arange(num_rows), **weights), state=state
                    )
                    for form in (mamba1_step, mamba1_step_reference)
                ),
                {"torch": moving(partial(_plain_mamba1, *given, **weights), state=state)},
            )


def _plain_mamba1(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor,
    *,
    state: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
) -> Tensor:
    dt = F.softplus(dt + dt_bias)
    state.mul_((dt[..., None] * A).exp_()).addcmul_((dt * x)[..., None], b[:, None])
    y = torch.einsum("ren,rn->re", state, c)
    return (y + D * x) * F.silu(gate)


def delta_step_cases() -> Iterator[Case]:
    """One token each of several sequences; transformers' forms of the ops that it joins."""
    for sizes in ((2, 64, 4, 64), (16, 128, 32, 128)):
        for num_rows in (1, 8):
            yield _delta(num_rows, *sizes)


def _delta(num_rows: int, key_heads: int, key_dim: int, heads: int, value_dim: int) -> Case:
    channels = 2 * key_heads * key_dim + heads * value_dim
    projected = torch.randn(num_rows, channels + 2 * heads)
    mixed, decay, beta = projected.split([channels, heads, heads], -1)
    states = {
        "conv": torch.randn(num_rows, channels, 3),
        "state": torch.randn(num_rows, heads, key_dim, value_dim),
    }
    weights = {
        "taps": torch.randn(channels, 4),
        "bias": None,
        "A": -torch.linspace(0.01, 16.0, heads),
        "dt_bias": torch.randn(heads) - 4.0,
        "num_key_heads": key_heads,
    }
    ours, reference = (
        moving(
            partial(
                form,
                mixed,
                decay,
                beta,
                rows=torch.arange(num_rows),
                act=F.silu,
                eps=1e-6,
                **weights,
            ),
            **states,
        )
        for form in (delta_step, delta_step_reference)
    )
    return Case(
        f"G{key_heads} K{key_dim} H{heads} V{value_dim} R{num_rows}",
        num_rows,
        ours,
        reference,
        {"transformers": moving(partial(_their_delta, mixed, decay, beta, **weights), **states)},
    )


def _their_delta(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    conv: Tensor,
    state: Tensor,
    taps: Tensor,
    bias: None,
    A: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
) -> Tensor:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    _, heads, key_dim, value_dim = state.shape
    mixed = qwen.causal_conv1d_update(mixed[..., None], conv, taps, bias, "silu")[..., 0]
    keys = num_key_heads * key_dim
    q, k, v = mixed.split([keys, keys, heads * value_dim], -1)
    q, k = (
        each.unflatten(-1, (num_key_heads, -1)).repeat_interleave(heads // num_key_heads, 1)
        for each in (q, k)
    )
    y, moved = qwen.torch_recurrent_gated_delta_rule(
        q[:, None],
        k[:, None],
        v.unflatten(-1, (heads, -1))[:, None],
        (A * F.softplus(decay + dt_bias))[:, None],
        beta.sigmoid()[:, None],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    state.copy_(moved)
    out: Tensor = y[:, 0]
    return out
