"""Mamba-2 (arXiv:2405.21060), over the rows of several sequences in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F

from agentcache.engine.native.recurrence import advance, apart
from agentcache.kernels import row_gates
from agentcache.kernels.mamba2_step import mamba2_step
from agentcache.kernels.row_moves import as_type
from agentcache.kernels.ssd_scan import ScanResult, ssd_scan
from agentcache.kernels.state_update import state_update

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.layers import GatedNorm
    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import Pass, Runs
    from agentcache.engine.native.recurrence import Convolution

__all__ = ["Mamba2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """H heads of width P over G groups of states of N channels each.

    project: gate, convolution channels (x, B, C) and time steps in one product. A (negative), D,
    dt_bias: [H] float32. norm: None where the output is only gated.
    """

    layer_idx: int
    project: Linear
    conv: Convolution
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
        projected = self.project(x)
        y = apart(tokens, self._step_all, self._scan, projected)
        gate = projected[:, : self.num_heads * self.head_dim]
        y = row_gates.gate(y, gate) if self.norm is None else self.norm(y, gate)
        return self.out(as_type(y, x.dtype))

    def _step_all(self, tokens: Pass, projected: Tensor) -> Tensor:
        """Outputs, before their gate, of the spans of one token."""
        state = tokens.pools.state
        return mamba2_step(
            projected,
            state[self.layer_idx, "conv"],
            state[self.layer_idx, "recurrent"],
            tokens.step_rows,
            taps=self.conv.wide_weight,
            bias=self.conv.wide_bias,
            dt_bias=self.dt_bias,
            dt_limits=self.dt_limits,
            A=self.A,
            D=self.D,
            num_groups=self.num_groups,
        )

    def _scan(self, tokens: Pass | Runs, projected: Tensor) -> Tensor:
        """Outputs, before their gate."""
        width, groups = self.num_heads * self.head_dim, self.num_groups * self.state_dim
        _, mixed, dt = projected.split([width, self.conv.num_channels, self.num_heads], -1)
        dt = F.softplus(dt.float() + self.dt_bias).clamp_(*self.dt_limits)
        x, b, c = self.conv(mixed, tokens).split([width, groups, groups], -1)
        return advance(
            tokens,
            self.layer_idx,
            "recurrent",
            self._step,
            self._extend,
            x.unflatten(-1, (self.num_heads, self.head_dim)),
            dt,
            b.unflatten(-1, (self.num_groups, self.state_dim)),
            c.unflatten(-1, (self.num_groups, self.state_dim)),
        ).flatten(1)

    def _step(self, state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return state_update(state, x, dt, self.A, b, c, D=self.D)

    def _extend(
        self,
        state: Tensor,
        positions: tuple[int, ...],
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
    ) -> ScanResult:
        return ssd_scan(
            x, dt, self.A, b, c, D=self.D, initial_state=state, state_positions=positions
        )
