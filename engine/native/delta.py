"""Gated DeltaNet (arXiv:2412.06464), over the rows of several sequences in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from agentcache.engine.native.recurrence import advance, apart
from agentcache.kernels.delta_step import delta_step
from agentcache.kernels.gated_delta import DeltaResult, gated_delta, gated_delta_update
from agentcache.kernels.row_moves import as_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentcache.engine.native.layers import GatedNorm
    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import Pass, Runs
    from agentcache.engine.native.recurrence import Convolution

__all__ = ["DeltaRule", "GatedDelta"]

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """A short convolution and the gated delta rule behind it.

    H heads of values of width V, over G heads of keys and of queries of width K. conv: of
    C = 2 G K + H V channels: queries, keys, values. act: on what is convolved. A [H] (negative),
    dt_bias [H], or [H, K] for decays by key channel: float32.
    """

    layer_idx: int
    conv: Convolution
    act: Callable[[Tensor], Tensor]
    num_key_heads: int
    key_dim: int
    num_heads: int
    value_dim: int
    A: Tensor
    dt_bias: Tensor

    def __call__(self, mixed: Tensor, decay: Tensor, beta: Tensor, tokens: Pass) -> Tensor:
        """Channels [N, C] to [N, H V]. decay: before dt_bias, softplus and A, [N, H] or by key
        channel [N, H K]. beta: before its sigmoid, how much of a correction is written, [N, H]."""
        decay = decay.unflatten(-1, self.dt_bias.shape)
        return apart(tokens, self._step_all, self._scan, mixed, decay, beta).flatten(1)

    def _step_all(self, tokens: Pass, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        state = tokens.pools.state
        return delta_step(
            mixed,
            decay,
            beta,
            state[self.layer_idx, "conv"],
            state[self.layer_idx, "recurrent"],
            tokens.step_rows,
            taps=self.conv.wide_weight,
            bias=self.conv.wide_bias,
            act=self.act,
            A=self.A,
            dt_bias=self.dt_bias,
            num_key_heads=self.num_key_heads,
            eps=_NORM_EPS,
        )

    def _scan(self, tokens: Pass | Runs, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        q, k, v = self._split(self.conv(mixed, tokens))
        rates = self.A.view(-1, *(1,) * (self.dt_bias.dim() - 1))
        return advance(
            tokens,
            self.layer_idx,
            "recurrent",
            gated_delta_update,
            _extend,
            q,
            k,
            v,
            rates * F.softplus(decay.float() + self.dt_bias),
            beta.sigmoid(),
        )

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels [..., C] as queries and keys [..., G, K], normalised in float32, and values
        [..., H, V]."""
        heads, width = self.num_key_heads, self.num_key_heads * self.key_dim
        x = self.act(convolved)
        qk = x[..., : 2 * width].float().unflatten(-1, (2 * heads, self.key_dim))
        qk = qk * torch.rsqrt(torch.linalg.vecdot(qk, qk).unsqueeze(-1) + _NORM_EPS)
        q, k = qk.split([heads, heads], -2)
        v = x[..., 2 * width :].unflatten(-1, (self.num_heads, self.value_dim))
        return q * self.key_dim**-0.5, k, v


def _extend(state: Tensor, positions: tuple[int, ...], *inputs: Tensor) -> DeltaResult:
    return gated_delta(*inputs, initial_state=state, state_positions=positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """The delta rule with one decay per head.

    project: the rule's channels, gates [H V], and what strengths and decays are made of, [H] each,
    in one product. norm: of each head by itself.
    """

    project: Linear
    rule: DeltaRule
    norm: GatedNorm
    out: Linear

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        rule, heads = self.rule, self.rule.num_heads
        sizes = [rule.conv.num_channels, heads * rule.value_dim, heads, heads]
        mixed, gate, b, a = self.project(x).split(sizes, -1)
        y = self.norm(rule(mixed, a, b, tokens), gate)
        return self.out(as_type(y, x.dtype))
