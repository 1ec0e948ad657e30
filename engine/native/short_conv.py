"""LFM2's short convolution between two gates, over the rows of several sequences in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentcache.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.layers import Linear
    from agentcache.engine.native.packing import Pass, Run

__all__ = ["ShortConv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """`out(after * conv(before * x))`, channel by channel, without an activation.

    project: the gate before, the gate after and x in one product, [N, 3 C]. conv_weight [C, K]. Its
    state "conv" is the last K - 1 inputs of the convolution, [C, K - 1].
    """

    layer_idx: int
    project: Linear
    conv_weight: Tensor
    conv_bias: Tensor | None
    out: Linear

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        before, after, inner = self.project(x).chunk(3, -1)
        mixed = before * inner
        parts = []
        if tokens.steps:
            parts.append(self._step(mixed[: tokens.steps], tokens))
        parts += [self._extend(mixed[None, run.at], run, tokens) for run in tokens.runs]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out(y.mul_(after))

    def _step(self, mixed: Tensor, tokens: Pass) -> Tensor:
        """One token of each of several sequences [R, C]; their states move on in place."""
        states = tokens.pools.state[self.layer_idx, "conv"]
        state = states[tokens.rows]
        y = causal_conv1d_update(mixed, state, self.conv_weight, self.conv_bias)
        if isinstance(tokens.rows, list):
            states[tokens.rows] = state
        return y

    def _extend(self, mixed: Tensor, run: Run, tokens: Pass) -> Tensor:
        """Several tokens of one sequence [1, T, C], with the states at its captures set aside."""
        row = run.span.row
        states = tokens.pools.state[self.layer_idx, "conv"]
        conv = causal_conv1d(
            mixed,
            self.conv_weight,
            self.conv_bias,
            states[row : row + 1],
            state_positions=run.positions,
        )
        for capture, state in zip(run.inside, conv.states, strict=True):
            states[capture.row] = state[0]
        states[row] = conv.final_state[0]
        return conv.y[0]
