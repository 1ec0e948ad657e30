"""LFM2's short convolution between two gates, over the rows of several sequences in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.kernels import row_gates

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import Pass
    from agentcache.engine.native.recurrence import Convolution

__all__ = ["ShortConv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConv:
    """`out(after * conv(before * x))`, channel by channel, without an activation.

    project: the gate before, the gate after and x in one product, [N, 3 C].
    """

    project: Linear
    conv: Convolution
    out: Linear

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        before, after, inner = self.project(x).chunk(3, -1)
        if row_gates.takes(x, None):
            convolved = self.conv(row_gates.multiply(before, inner), tokens)
            return self.out(row_gates.multiply(convolved, after))
        return self.out(self.conv(before * inner, tokens).mul_(after))
