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
    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import Pass

__all__ = ["Experts", "Opened", "best_by_sigmoid", "best_of_softmax", "softmax_of_best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Every token through its best experts, and through a shared one where there is.

    route: of tokens [N, width] the numbers of their experts and their weights, [N, k] each. up
    [E, 2 I, width] (gate and up, or [E, I, width] without gates) and down [E, width, I]. Tokens are
    brought together by their experts, so each expert is one product. enter and leave: maps to a
    narrower width in which experts work, and back.
    """

    route: Callable[[Tensor], tuple[Tensor, Tensor]]
    up: Tensor
    down: Tensor
    act: Callable[[Tensor], Tensor] = F.silu
    gated: bool = True
    shared: Layer | None = None
    enter: Linear | None = None
    leave: Linear | None = None

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        chosen, weights = self.route(x)
        shared = None if self.shared is None else self.shared(x, tokens)
        x = x if self.enter is None else self.enter(x)
        out = torch.zeros_like(x)
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
        out = out if self.leave is None else self.leave(out)
        return out if shared is None else out.add_(shared)

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        y = F.linear(x, self.up[expert])
        if self.gated:
            gate, up = y.chunk(2, -1)
            y = self.act(gate) * up
        else:
            y = self.act(y)
        return F.linear(y, self.down[expert])


@dataclass(frozen=True, slots=True)
class Opened:
    """A layer behind a gate: its output times the sigmoid of one number per token."""

    inner: Layer
    gate: Linear

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        return self.inner(x, tokens) * self.gate(x).sigmoid()


def softmax_of_best(weight: Tensor, num: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Route by a softmax over the best `num` alone. weight: [E, width]."""

    def route(x: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = F.linear(x, weight).float().topk(num, -1)
        return chosen, best.softmax(-1)

    return route


def best_of_softmax(weight: Tensor, num: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Route to the best `num`, weighted by a softmax over all. weight: [E, width]."""

    def route(x: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = F.linear(x, weight).float().softmax(-1).topk(num, -1)
        return chosen, best

    return route


def best_by_sigmoid(
    weight: Tensor,
    num: int,
    *,
    bias: Tensor | None = None,
    normed: bool = True,
    scale: float = 1.0,
    least: float = 0.0,
    groups: tuple[int, int] = (1, 1),
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Route to the best `num`, weighted by the sigmoids of their own scores. weight: [E, width].

    bias: [E], on the sigmoids where experts are chosen, not where they are weighted. normed: the
    weights of a token are divided by their sum and `least`. scale: on the weights after that.
    groups: of so many groups of neighbours a token is sent to the best few, by the sum of the best
    two of each. Scores have the width of `weight`.
    """
    num_groups, num_best = groups

    def route(x: Tensor) -> tuple[Tensor, Tensor]:
        shares = F.linear(x.to(weight.dtype), weight).float().sigmoid()
        ranks = shares if bias is None else shares + bias
        if num_best < num_groups:
            grouped = ranks.unflatten(-1, (num_groups, -1))
            of_groups = grouped.topk(2, -1).values.sum(-1)
            closed = torch.ones_like(of_groups, dtype=torch.bool)
            closed.scatter_(-1, of_groups.topk(num_best, -1).indices, False)
            ranks = grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)
        chosen = ranks.topk(num, -1).indices
        best = shares.gather(-1, chosen)
        if normed:
            best = best / (best.sum(-1, keepdim=True) + least)
        return chosen, best * scale

    return route
