"""Kimi Delta Attention (arXiv:2510.26692): a gated delta rule whose key channels decay alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.delta import DeltaRule
    from agentcache.engine.native.layers import GatedNorm
    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import Pass

__all__ = ["KDA"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KDA:
    """The delta rule with one decay per key channel; H heads of width K.

    project: the rule's channels, strengths [H], and the narrow middles of decays and gates, K each,
    in one product. decay, gate: from there to [H K]. A (negative) [H, 1], dt_bias [H K]: float32.
    norm: of each head by itself.
    """

    project: Linear
    decay: Linear
    gate: Linear
    rule: DeltaRule
    A: Tensor
    dt_bias: Tensor
    norm: GatedNorm
    out: Linear

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        rule = self.rule
        shape = (rule.num_heads, rule.key_dim)
        sizes = [rule.conv.num_channels, rule.num_heads, rule.key_dim, rule.key_dim]
        mixed, b, to_decay, to_gate = self.project(x).split(sizes, -1)
        step = F.softplus(self.decay(to_decay).float() + self.dt_bias)
        y = rule(mixed, self.A * step.unflatten(-1, shape), b.sigmoid(), tokens)
        gate = self.gate(to_gate).unflatten(-1, shape)
        return self.out(self.norm(y, gate).flatten(1))
