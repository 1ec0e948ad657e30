"""Mixtures of experts: a router, and the few experts each token goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from agentcache.engine.native.linear import Linear, LinearStack
from agentcache.kernels import row_gates, rows
from agentcache.kernels.row_experts import Routing, blend, mix, mixes, route
from agentcache.kernels.row_moves import add, as_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentcache.engine.native.layers import Layer
    from agentcache.engine.native.packing import Pass

    Route = Callable[[Tensor], tuple[Tensor, Tensor]]

__all__ = ["Experts", "Opened", "best_by_sigmoid", "best_of_softmax", "softmax_of_best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Every token through its best experts, and through a shared one where there is.

    route: of tokens [N, width] the numbers of their experts and their weights, [N, k] each. up: E
    maps from width to 2 I (gate and up, or to I without gates); down: as many from I to width. A
    few tokens are taken one by one; more are brought together by their experts, so each expert is
    one product. enter and leave: maps to a narrower width in which experts work, and back.
    """

    route: Route
    up: LinearStack
    down: LinearStack
    act: Callable[[Tensor], Tensor] = F.silu
    gated: bool = True
    shared: Layer | None = None
    enter: Linear | None = None
    leave: Linear | None = None

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        chosen, weights = self.route(x)
        shared = None if self.shared is None else self.shared(x, tokens)
        x = x if self.enter is None else self.enter(x)
        up, down = self.up.weight, self.down.weight
        if mixes(x, up, down, self.act):
            scales = self.up.weight_scale, self.down.weight_scale
            out = mix(x, chosen, weights, up, down, self.act, gated=self.gated, scales=scales)
        else:
            # PyTorch has products in groups for this type alone; others wait for the counts
            is_grouped = x.dtype == torch.bfloat16 and not x.is_cpu
            out = (self._grouped if is_grouped else self._by_expert)(x, chosen, weights)
        out = out if self.leave is None else self.leave(out)
        return out if shared is None else add(out, shared)

    def _by_expert(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.up)).tolist()
        tokens = order // chosen.shape[1]
        shares = weights.flatten()[order, None].to(x.dtype)
        at = 0
        for expert, count in enumerate(counts):
            if count:
                of_expert = tokens[at : at + count]
                y = self._expert(x[of_expert], expert) * shares[at : at + count]
                out.index_add_(0, of_expert, y)
                at += count
        return out

    def _grouped(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The same as products in groups, without anything read on the host."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(len(self.up), dtype=torch.int32, device=x.device)
        ends = counts.scatter_add_(0, flat, counts.new_ones(()).expand_as(flat)).cumsum(0).int()
        y = F.grouped_mm(x[order // chosen.shape[1]], self.up.weight.transpose(1, 2), offs=ends)
        y = F.grouped_mm(self._opened(y), self.down.weight.transpose(1, 2), offs=ends)
        y = torch.empty_like(y).index_copy_(0, order, y).unflatten(0, chosen.shape)
        return blend(y, weights)

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        return self.down(self._opened(self.up(x, expert)), expert)

    def _opened(self, y: Tensor) -> Tensor:
        if not self.gated:
            return self.act(y)
        gate, up = y.chunk(2, -1)
        return self.act(gate) * up


@dataclass(frozen=True, slots=True)
class Opened:
    """A layer behind a gate: its output times the sigmoid of one number per token."""

    inner: Layer
    gate: Linear

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        y, gate = self.inner(x, tokens), self.gate(x)
        if rows.takes(y) and len(y) <= rows.MOST_ROWS:
            return blend(y[:, None], row_gates.opened(gate, torch.sigmoid))
        return y * gate.sigmoid()


def softmax_of_best(weight: Tensor, num: int) -> Route:
    """Route by a softmax over the best `num` alone. weight: [E, width]."""
    return _router(weight, Routing(num=num, way="softmax_of_best"))


def best_of_softmax(weight: Tensor, num: int) -> Route:
    """Route to the best `num`, weighted by a softmax over all. weight: [E, width]."""
    return _router(weight, Routing(num=num, way="best_of_softmax"))


def best_by_sigmoid(
    weight: Tensor, num: int, *, bias: Tensor | None = None, **options: Any
) -> Route:
    """Route to the best `num`, weighted by the sigmoids of their own scores. weight: [E, width].

    bias, options: as `Routing` has them. Scores have the width of `weight`.
    """
    wide = None if bias is None else bias.float()
    return _router(weight, Routing(num=num, way="best_by_sigmoid", bias=wide, **options))


def _router(weight: Tensor, routing: Routing) -> Route:
    project = Linear(weight)

    def of(x: Tensor) -> tuple[Tensor, Tensor]:
        return route(project(as_type(x, weight.dtype)), routing)

    return of
