"""How states of several sequences move on in one pass, whatever the recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from agentcache.kernels import rows
from agentcache.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from agentcache.kernels.conv_step import conv_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from agentcache.engine.native.packing import Pass, Runs
    from agentcache.engine.native.weights import Weights
    from agentcache.kernels.causal_conv1d import Activation, ConvResult

__all__ = ["Convolution", "Moved", "advance", "apart"]


class Moved(Protocol):
    """What an operation over a run returns: outputs [1, T, ...], the state after it [1, ...], and
    the states at the positions that were asked for."""

    @property
    def y(self) -> Tensor: ...

    @property
    def final_state(self) -> Tensor: ...

    @property
    def states(self) -> Sequence[Tensor]: ...


def advance(
    tokens: Pass | Runs,
    layer_idx: int,
    name: str,
    step: Callable[..., Tensor],
    extend: Callable[..., Moved],
    *inputs: Tensor,
) -> Tensor:
    """Move one state of every sequence on over its tokens; returns the outputs, packed.

    inputs: [N, ...] each. step(state, *inputs): one token of R sequences, state [R, ...] changed in
    place, inputs [R, ...], outputs [R, ...]. extend(state, positions, *inputs): a run of one
    sequence, state [1, ...] only read, inputs [1, T, ...]. States at captures are set aside.
    """
    rows = tokens.pools.state[layer_idx, name]
    parts = []
    if tokens.steps:
        state = rows[tokens.rows]
        parts.append(step(state, *(each[: tokens.steps] for each in inputs)))
        if isinstance(tokens.rows, list):  # they were gathered
            rows[tokens.rows] = state
    for run in tokens.runs:
        row = run.span.row
        moved = extend(rows[row : row + 1], run.positions, *(each[None, run.at] for each in inputs))
        for capture, state in zip(run.inside, moved.states, strict=True):
            rows[capture.row] = state[0]
        rows[row] = moved.final_state[0]
        parts.append(moved.y[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def apart(
    tokens: Pass | Runs,
    step: Callable[..., Tensor],
    extend: Callable[..., Tensor],
    *inputs: Tensor,
) -> Tensor:
    """Spans of one token by a kernel that takes all their states where they lie, others otherwise.

    inputs: [N, ...] each. step(tokens, *inputs): of those spans. extend(tokens, *inputs): of the
    others, and of all where steps do not go apart (`rows.steps_apart`).
    """
    steps = tokens.steps if rows.steps_apart(inputs[0]) else 0
    if not steps:
        return extend(tokens, *inputs)
    y = step(tokens, *(each[:steps] for each in inputs))
    if not tokens.runs:
        return y
    others = extend(tokens.behind_steps, *(each[steps:] for each in inputs))
    return torch.cat([y, others.to(y.dtype)])


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A causal convolution of each channel by itself, over its state "conv" [C, K - 1].

    weight: [C, K], bias: [C] or None.
    """

    layer_idx: int
    weight: Tensor
    bias: Tensor | None
    activation: Activation | None = None

    @classmethod
    def of(
        cls,
        weights: Weights,
        layer_idx: int,
        num_channels: int,
        taps: int,
        *,
        activation: Activation | None = None,
    ) -> Convolution:
        """By the `weight` and `bias` of a depthwise `torch.nn.Conv1d`."""
        weight = weights.get("weight", num_channels, 1, taps)[:, 0].contiguous()
        bias = weights.maybe("bias", num_channels)
        return cls(layer_idx=layer_idx, weight=weight, bias=bias, activation=activation)

    @cached_property
    def wide_weight(self) -> Tensor:
        """The weight in float32."""
        return self.weight.float()

    @cached_property
    def wide_bias(self) -> Tensor | None:
        """The bias in float32."""
        return None if self.bias is None else self.bias.float()

    @property
    def num_channels(self) -> int:
        return len(self.weight)

    def __call__(self, x: Tensor, tokens: Pass | Runs) -> Tensor:
        """[N, C] to [N, C]."""
        return apart(tokens, self._step_all, self._scan, x)

    def _step_all(self, tokens: Pass, x: Tensor) -> Tensor:
        return conv_step(
            x,
            tokens.pools.state[self.layer_idx, "conv"],
            tokens.step_rows,
            taps=self.wide_weight,
            bias=self.wide_bias,
            act=F.silu if self.activation == "silu" else None,
        )

    def _scan(self, tokens: Pass | Runs, x: Tensor) -> Tensor:
        return advance(tokens, self.layer_idx, "conv", self._step, self._extend, x)

    def _step(self, state: Tensor, x: Tensor) -> Tensor:
        return causal_conv1d_update(x, state, self.weight, self.bias, activation=self.activation)

    def _extend(self, state: Tensor, positions: tuple[int, ...], x: Tensor) -> ConvResult:
        return causal_conv1d(
            x,
            self.weight,
            self.bias,
            state,
            activation=self.activation,
            state_positions=positions,
        )
