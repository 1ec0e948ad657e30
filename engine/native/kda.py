"""Kimi Delta Attention (arXiv:2510.26692): a gated delta rule whose key channels decay alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.kernels.row_moves import as_type

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
    in one product. decay, gate: from there to [H K]. norm: of each head by itself.
    """

    project: Linear
    decay: Linear
    gate: Linear
    rule: DeltaRule
    norm: GatedNorm
    out: Linear

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        rule = self.rule
        sizes = [rule.conv.num_channels, rule.num_heads, rule.key_dim, rule.key_dim]
        mixed, b, *narrow = self.project(x).split(sizes, -1)
        to_decay, to_gate = (as_type(each, x.dtype) for each in narrow)  # side by side
        y = rule(mixed, self.decay(to_decay), b, tokens)
        return self.out(as_type(self.norm(y, self.gate(to_gate)), x.dtype))
