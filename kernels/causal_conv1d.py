"""Depthwise causal convolution over tokens that carries its last inputs as state.

Channel c of token t is `bias[c] + sum_k weight[c, k] * input[t - (K - 1) + k, c]`, then SiLU if
asked for. The state is the K - 1 inputs before the next token, oldest first; zeros stand for
inputs before the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Activation",
    "ConvResult",
    "causal_conv1d",
    "causal_conv1d_reference",
    "causal_conv1d_update",
]

Activation = Literal["silu"]

# From about this many elements on, the library convolution repays its fixed cost per call.
_LIBRARY_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class ConvResult:
    """What a convolution returns: `y` `[B, T, C]` in the dtype of x; states `[B, C, K-1]`.

    `states[i]` is the state after `state_positions[i]` tokens. States have the dtype of the
    initial state, or of x without one, and share memory with nothing.
    """

    y: Tensor
    final_state: Tensor
    states: tuple[Tensor, ...]


def causal_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    *,
    activation: Activation | None = None,
) -> tuple[Tensor, Tensor]:
    """The formula, token by token in float32. Shapes as in `causal_conv1d`; returns y and state."""
    window = x.new_zeros(x.shape[0], x.shape[2], weight.shape[1], dtype=torch.float32)
    if initial_state is not None:
        window[..., 1:] = initial_state
    ys = []
    for t in range(x.shape[1]):
        window = torch.cat([window[..., 1:], x[:, t, :, None].float()], dim=-1)
        y = (window * weight.float()).sum(-1)
        if bias is not None:
            y = y + bias.float()
        ys.append(F.silu(y) if activation == "silu" else y)
    state_dtype = x.dtype if initial_state is None else initial_state.dtype
    return torch.stack(ys, dim=1).to(x.dtype), window[..., 1:].to(state_dtype)


@torch.no_grad()
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    *,
    activation: Activation | None = None,
    state_positions: Sequence[int] = (),
) -> ConvResult:
    """Convolve T >= 1 tokens; return outputs, final state and the states at `state_positions`.

    Args:
        x: inputs `[B, T, C]`, channels contiguous.
        weight: `[C, K]`.
        bias: `[C]` or None.
        initial_state: `[B, C, K-1]`, read only; None means zeros.
        activation: applied to the outputs.
        state_positions: counts of absorbed tokens in `0..T` at which to return states.

    Computes in float32, without gradients.

    >>> import torch
    >>> result = causal_conv1d(
    ...     torch.ones(1, 5, 2), torch.ones(2, 4), None, None, state_positions=[1]
    ... )
    >>> result.y[0, :, 0].tolist(), result.states[0][0, 0].tolist()
    ([1.0, 2.0, 3.0, 4.0, 4.0], [0.0, 0.0, 1.0])
    """
    num_tokens, history_len = x.shape[1], weight.shape[1] - 1
    for position in state_positions:
        if not 0 <= position <= num_tokens:
            raise ValueError(
                f"state position {position} is outside 0..{num_tokens}; "
                "pass counts of absorbed tokens"
            )
    if initial_state is None:
        history = x.new_zeros(x.shape[0], history_len, x.shape[2])
    else:
        history = initial_state.transpose(1, 2)
    inputs = torch.cat([history, x], dim=1)
    y = _convolve(inputs.float(), weight.float(), None if bias is None else bias.float())
    if activation == "silu":
        F.silu(y, inplace=True)
    final_state, *states = (
        inputs[:, p : p + history_len]
        .transpose(1, 2)
        .to(history.dtype)
        .clone(memory_format=torch.contiguous_format)
        for p in (num_tokens, *state_positions)
    )
    return ConvResult(y.to(x.dtype), final_state, tuple(states))


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[B, K-1+T, C]` to a fresh `[B, T, C]`."""
    width = weight.shape[1]
    num_tokens = inputs.shape[1] - width + 1
    if inputs.shape[0] * num_tokens * inputs.shape[2] >= _LIBRARY_ELEMENTS:
        # As a 2-D convolution over an image of height 1 the channels-last input is taken as it is.
        image = inputs.transpose(1, 2)[:, :, None]
        y = F.conv2d(image, weight[:, None, None], bias, groups=weight.shape[0])
        return y[:, :, 0].transpose(1, 2)
    taps = weight.t().contiguous()
    y = inputs[:, :num_tokens] * taps[0]
    for k in range(1, width):
        y.addcmul_(inputs[:, k : k + num_tokens], taps[k])
    return y if bias is None else y.add_(bias)


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: Activation | None = None,
) -> Tensor:
    """Absorb one token per row into `state`, in place, and return y `[R, C]` in x's dtype.

    x is `[R, C]`, state `[R, C, K-1]` with any strides, weight `[C, K]`, bias `[C]` or None.
    """
    window = torch.cat([state, x[..., None]], dim=-1)
    state.copy_(window[..., 1:])
    y: Tensor = torch.linalg.vecdot(window.float(), weight.float())
    if bias is not None:
        y.add_(bias)
    if activation == "silu":
        F.silu(y, inplace=True)
    return y.to(x.dtype)
