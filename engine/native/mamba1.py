"""Mamba-1 (arXiv:2312.00752) with norms on what it selects, over several sequences in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentcache.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from agentcache.kernels.selective_scan import selective_scan, selective_state_update

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.layers import Linear, RMSNorm
    from agentcache.engine.native.packing import Pass, Run

__all__ = ["Mamba1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1:
    """E channels, each with a state of S elements.

    project: channels and their gates in one product. conv_weight [E, K]. select: what the channels
    choose, a time step of low rank, B and C. dt_project: that step for every channel, before
    dt_bias [E] and softplus. A [E, S] (negative) and D [E] are float32.
    """

    layer_idx: int
    project: Linear
    conv_weight: Tensor
    conv_bias: Tensor | None
    select: Linear
    dt_norm: RMSNorm
    b_norm: RMSNorm
    c_norm: RMSNorm
    dt_project: Linear
    dt_bias: Tensor
    A: Tensor
    D: Tensor
    out: Linear

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        x, gate = self.project(x).chunk(2, -1)
        x = self._convolve(x, tokens)
        rank, state_dim = len(self.dt_norm.weight), self.A.shape[1]
        dt, b, c = self.select(x).split([rank, state_dim, state_dim], -1)
        dt = self.dt_project(self.dt_norm(dt))
        b, c = self.b_norm(b)[:, None], self.c_norm(c)[:, None]
        chosen = (x, dt, b, c, gate)
        parts = []
        if tokens.steps:
            parts.append(self._step(*(part[: tokens.steps] for part in chosen), tokens=tokens))
        for run in tokens.runs:
            of_run = (part[None, run.at] for part in chosen)
            parts.append(self._extend(*of_run, run=run, tokens=tokens))
        return self.out(_joined(parts))

    def _convolve(self, x: Tensor, tokens: Pass) -> Tensor:
        """Channels [N, E] mixed over time; windows move on, and are set aside at captures."""
        windows = tokens.pools.state[self.layer_idx, "conv"]
        weight, bias = self.conv_weight, self.conv_bias
        parts = []
        if tokens.steps:
            at_rows = windows[tokens.rows]
            new = x[: tokens.steps]
            parts.append(causal_conv1d_update(new, at_rows, weight, bias, activation="silu"))
            if isinstance(tokens.rows, list):
                windows[tokens.rows] = at_rows
        for run in tokens.runs:
            row = run.span.row
            conv = causal_conv1d(
                x[None, run.at],
                weight,
                bias,
                windows[row : row + 1],
                activation="silu",
                state_positions=run.positions,
            )
            for capture, window in zip(run.inside, conv.states, strict=True):
                windows[capture.row] = window[0]
            windows[row] = conv.final_state[0]
            parts.append(conv.y[0])
        return _joined(parts)

    def _step(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor, *, tokens: Pass
    ) -> Tensor:
        """One token of each of several sequences, [R, E]; their states move on in place."""
        states = tokens.pools.state[self.layer_idx, "recurrent"]
        at_rows = states[tokens.rows]
        y = selective_state_update(
            at_rows,
            x,
            dt,
            self.A,
            b,
            c,
            D=self.D,
            z=gate,
            dt_bias=self.dt_bias,
            dt_softplus=True,
        )
        if isinstance(tokens.rows, list):
            states[tokens.rows] = at_rows
        return y

    def _extend(
        self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor, *, run: Run, tokens: Pass
    ) -> Tensor:
        """Several tokens of one sequence [1, T, E], with the states at its captures set aside."""
        states, row = tokens.pools.state[self.layer_idx, "recurrent"], run.span.row
        scan = selective_scan(
            x,
            dt,
            self.A,
            b,
            c,
            D=self.D,
            z=gate,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            initial_state=states[row : row + 1],
            state_positions=run.positions,
        )
        for capture, state in zip(run.inside, scan.states, strict=True):
            states[capture.row] = state[0]
        states[row] = scan.final_state[0]
        return scan.y[0]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
