"""Mamba-1 (arXiv:2312.00752) with norms on what it selects, over several sequences in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache.engine.native.recurrence import advance, apart
from agentcache.kernels.mamba1_step import mamba1_step
from agentcache.kernels.selective_scan import (
    SelectiveScanResult,
    selective_scan,
    selective_state_update,
)

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.layers import RMSNorm
    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import Pass, Runs
    from agentcache.engine.native.recurrence import Convolution

__all__ = ["Mamba1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1:
    """E channels, each with a state of S elements.

    project: channels and their gates in one product. select: what the channels
    choose, a time step of low rank, B and C. dt_project: that step for every channel, before
    dt_bias [E] and softplus. A [E, S] (negative) and D [E] are float32.
    """

    layer_idx: int
    project: Linear
    conv: Convolution
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
        x = self.conv(x, tokens)
        rank, state_dim = len(self.dt_norm.weight), self.A.shape[1]
        dt, b, c = self.select(x).split([rank, state_dim, state_dim], -1)
        dt = self.dt_project(self.dt_norm(dt))
        inputs = (x, dt, self.b_norm(b), self.c_norm(c), gate)
        return self.out(apart(tokens, self._step_all, self._scan, *inputs))

    def _step_all(
        self, tokens: Pass, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor
    ) -> Tensor:
        return mamba1_step(
            x,
            dt,
            b,
            c,
            gate,
            tokens.pools.state[self.layer_idx, "recurrent"],
            tokens.step_rows,
            dt_bias=self.dt_bias,
            A=self.A,
            D=self.D,
        )

    def _scan(
        self, tokens: Pass | Runs, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor
    ) -> Tensor:
        inputs = (x, dt, b[:, None], c[:, None], gate)
        return advance(tokens, self.layer_idx, "recurrent", self._step, self._extend, *inputs)

    def _step(
        self, state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, gate: Tensor
    ) -> Tensor:
        return selective_state_update(state, x, dt, B=b, C=c, z=gate, **self._fixed())

    def _extend(
        self,
        state: Tensor,
        positions: tuple[int, ...],
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        gate: Tensor,
    ) -> SelectiveScanResult:
        return selective_scan(
            x,
            dt,
            B=b,
            C=c,
            z=gate,
            initial_state=state,
            state_positions=positions,
            **self._fixed(),
        )

    def _fixed(self) -> dict[str, Any]:
        """What the recurrence has from the weights alone."""
        return {"A": self.A, "D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True}
