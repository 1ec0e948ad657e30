"""Cases of the kernels for a few rows: a decode step, a short extension."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from _cases import Case, Form, alone

from agentcache.kernels.mamba2_step import mamba2_step, mamba2_step_reference
from agentcache.kernels.rows import linear, linear_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _cases import Outputs
    from torch import Tensor

__all__ = ["mamba2_step_cases", "rows_cases"]

_PRODUCTS = ((448, 2076), (768, 3376))
"""Inputs and outputs of the first product of a Mamba-2 layer in models of these widths."""


def rows_cases() -> Iterator[Case]:
    """`linear`, the op that takes the time."""
    for width, out in _PRODUCTS:
        for num_rows in (1, 8, 32):
            yield _float32_product(num_rows, width, out)
            yield _bfloat16_product(num_rows, width, out)


def _float32_product(num_rows: int, width: int, out: int) -> Case:
    """PyTorch's product also with the weights as it is faster with them: transposed in memory."""
    x, weight = torch.randn(num_rows, width), torch.randn(out, width)
    return Case(
        f"float32 {width}x{out} R{num_rows}",
        num_rows,
        alone(partial(linear, x, weight)),
        alone(partial(linear_reference, x, weight)),
        {
            "torch": alone(partial(F.linear, x, weight)),
            "torch_transposed": alone(partial(F.linear, x, weight.t().contiguous().t())),
        },
    )


def _bfloat16_product(num_rows: int, width: int, out: int) -> Case:
    """Of small whole numbers: their sums are exact in any order, so all forms round them alike."""
    x, weight = (
        torch.randint(-8, 9, shape).bfloat16() for shape in ((num_rows, width), (out, width))
    )

    def widened() -> Tensor:
        return F.linear(x.float(), weight.float()).bfloat16()

    return Case(
        f"bfloat16 {width}x{out} R{num_rows}",
        num_rows,
        alone(partial(linear, x, weight)),
        alone(partial(linear_reference, x, weight)),
        {"torch": alone(partial(F.linear, x, weight)), "torch_widened": alone(widened)},
    )


def mamba2_step_cases() -> Iterator[Case]:
    """One token each of several sequences; transformers' forms of the ops that it joins."""
    for num_heads, head_dim, state_dim in ((12, 32, 64), (28, 32, 128)):
        for num_rows in (1, 8):
            yield _step(num_rows, num_heads, head_dim, state_dim)


def _step(num_rows: int, num_heads: int, head_dim: int, state_dim: int) -> Case:
    width = num_heads * head_dim
    channels = width + 2 * state_dim
    projected = torch.randn(num_rows, width + channels + num_heads)
    conv = torch.randn(num_rows, channels, 3)
    state = torch.randn(num_rows, num_heads, head_dim, state_dim)
    weights = {
        "taps": torch.randn(channels, 4),
        "bias": torch.randn(channels),
        "dt_bias": torch.randn(num_heads) - 4.0,
        "A": -torch.linspace(0.01, 16.0, num_heads),
        "D": torch.randn(num_heads),
    }
    ours, reference = (
        _moving(
            partial(
                form,
                projected,
                rows=torch.arange(num_rows),
                dt_limits=(0.0, float("inf")),
                num_groups=1,
                **weights,
            ),
            conv,
            state,
        )
        for form in (mamba2_step, mamba2_step_reference)
    )
    return Case(
        f"H{num_heads} P{head_dim} N{state_dim} R{num_rows}",
        num_rows,
        ours,
        reference,
        {"transformers": _moving(partial(_their_step, projected, **weights), conv, state)},
    )


def _moving(step: Callable[..., Tensor], conv: Tensor, state: Tensor) -> Form:
    """A form that changes both states: timed on one copy, checked on fresh ones."""

    def outputs() -> Outputs:
        moved = {"conv": conv.clone(), "state": state.clone()}
        y = step(**moved)
        return y, *moved.values()

    return Form(partial(step, conv=conv.clone(), state=state.clone()), outputs)


def _their_step(
    projected: Tensor,
    *,
    conv: Tensor,
    state: Tensor,
    taps: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
) -> Tensor:
    """Time steps, A and D per channel, as its one-token form takes them."""
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

    _, num_heads, head_dim, state_dim = state.shape
    shape = (num_heads, head_dim)
    width, channels = num_heads * head_dim, conv.shape[1]
    _, mixed, dt = projected.split([width, channels, num_heads], -1)
    mixed = granite.causal_conv1d_update(mixed[..., None], conv, taps, bias, "silu")[..., 0]
    x, b, c = mixed.split([width, state_dim, state_dim], -1)
    y: Tensor = granite.mamba2_selective_state_update(
        state,
        x.unflatten(-1, shape),
        dt[..., None].expand(-1, *shape),
        A[:, None, None].expand(*shape, state_dim),
        b.unsqueeze(1),
        c.unsqueeze(1),
        D=D[:, None].expand(shape),
        dt_bias=dt_bias[:, None].expand(shape),
        dt_softplus=True,
    )
    return y.flatten(1)
