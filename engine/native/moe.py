"""Mixtures of experts: a router, and the few experts each token goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentcache.engine.native.layers import Layer
    from agentcache.engine.native.packing import Pass

__all__ = ["Experts", "softmax_of_best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Every token through its best experts, and through a shared one where there is.

    route: of tokens [N, width] the numbers of their experts and their weights, [N, k] each. up
    [E, 2 I, width] (gate and up, or [E, I, width] without gates) and down [E, width, I]. Tokens are
    brought together by their experts, so each expert is one product.
    """

    route: Callable[[Tensor], tuple[Tensor, Tensor]]
    up: Tensor
    down: Tensor
    act: Callable[[Tensor], Tensor] = F.silu
    gated: bool = True
    shared: Layer | None = None

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        chosen, weights = self.route(x)
        out = torch.zeros_like(x) if self.shared is None else self.shared(x, tokens)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.up)).tolist()
        rows = order // chosen.shape[1]
        shares = weights.flatten()[order, None].to(x.dtype)
        at = 0
        for expert, count in enumerate(counts):
            if count:
                of_expert = rows[at : at + count]
                y = self._expert(x[of_expert], expert) * shares[at : at + count]
                out.index_add_(0, of_expert, y)
                at += count
        return out

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        y = F.linear(x, self.up[expert])
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = self.act(gate) * up
        else:
            y = self.act(y)
        return F.linear(y, self.down[expert])


def softmax_of_best(weight: Tensor, num: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Route by a softmax over the best `num` alone. weight: [E, width]."""

    def route(x: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = F.linear(x, weight).float().topk(num, -1)
        return chosen, best.softmax(-1)

    return route
