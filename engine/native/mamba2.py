"""Mamba-2 (arXiv:2405.21060), over the rows of several sequences in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from agentcache.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from agentcache.kernels.ssd_scan import ssd_scan
from agentcache.kernels.state_update import state_update

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.layers import GatedNorm, Linear
    from agentcache.engine.native.packing import Pass, Run

__all__ = ["Mamba2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """H heads of width P over G groups of states of N channels each.

    project: gate, convolution channels (x, B, C) and time steps in one product. conv_weight
    [C, K]; A (negative), D, dt_bias: [H] float32. norm: None where the output is only gated.
    """

    layer_idx: int
    project: Linear
    conv_weight: Tensor
    conv_bias: Tensor | None
    dt_bias: Tensor
    dt_limits: tuple[float, float]
    A: Tensor
    D: Tensor
    norm: GatedNorm | None
    out: Linear
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        width = self.num_heads * self.head_dim
        gate, mixed, dt = self.project(x).split([width, len(self.conv_weight), self.num_heads], -1)
        dt = F.softplus(dt.float() + self.dt_bias).clamp_(*self.dt_limits)
        parts = []
        if tokens.steps:
            parts.append(self._step(mixed[: tokens.steps], dt[: tokens.steps], tokens))
        parts += [
            self._extend(mixed[None, run.at], dt[None, run.at], run, tokens) for run in tokens.runs
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        y = y * F.silu(gate) if self.norm is None else self.norm(y, gate)
        return self.out(y)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved channels [..., C] as x [..., H, P], B and C [..., G, N]."""
        width, groups = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        x, b, c = mixed.split([width, groups, groups], -1)
        heads = (self.num_heads, self.head_dim)
        b, c = (part.unflatten(-1, (self.num_groups, self.state_dim)) for part in (b, c))
        return x.unflatten(-1, heads), b, c

    def _step(self, mixed: Tensor, dt: Tensor, tokens: Pass) -> Tensor:
        """One token of each of several sequences; their states move on in place."""
        all_convs = tokens.pools.state[self.layer_idx, "conv"]
        all_states = tokens.pools.state[self.layer_idx, "recurrent"]
        conv, state = all_convs[tokens.rows], all_states[tokens.rows]
        mixed = causal_conv1d_update(
            mixed, conv, self.conv_weight, self.conv_bias, activation="silu"
        )
        x, b, c = self._split(mixed)
        y = state_update(state, x, dt, self.A, b, c, D=self.D)
        if isinstance(tokens.rows, list):
            all_convs[tokens.rows], all_states[tokens.rows] = conv, state
        return y.flatten(1)

    def _extend(self, mixed: Tensor, dt: Tensor, run: Run, tokens: Pass) -> Tensor:
        """Several tokens of one sequence [1, T, C], with the states at its captures set aside."""
        row, at = run.span.row, run.positions
        convs = tokens.pools.state[self.layer_idx, "conv"]
        states = tokens.pools.state[self.layer_idx, "recurrent"]
        conv = causal_conv1d(
            mixed,
            self.conv_weight,
            self.conv_bias,
            convs[row : row + 1],
            activation="silu",
            state_positions=at,
        )
        x, b, c = self._split(conv.y)
        scan = ssd_scan(
            x,
            dt,
            self.A,
            b,
            c,
            D=self.D,
            initial_state=states[row : row + 1],
            state_positions=at,
        )
        for capture, window, state in zip(run.inside, conv.states, scan.states, strict=True):
            convs[capture.row], states[capture.row] = window[0], state[0]
        convs[row], states[row] = conv.final_state[0], scan.final_state[0]
        return scan.y[0].flatten(1)
