"""Mixtures of experts for a few rows: which experts a row goes through, and those alone are read.

Compiled where the installation had a compiler, else PyTorch's; each has its formula beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from agentcache.kernels import row_gates, rows
from agentcache.kernels.row_moves import as_type

if rows.IS_COMPILED:
    from agentcache.kernels import _rows

if TYPE_CHECKING:
    from agentcache.kernels.row_gates import Act

__all__ = [
    "Routing",
    "blend",
    "blend_reference",
    "mix",
    "mix_reference",
    "mixes",
    "route",
    "route_reference",
]

_WAYS = {"softmax_of_best": 0, "best_of_softmax": 1, "best_by_sigmoid": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the best `num` of E experts are found, and weighted.

    way: by a softmax over the best alone, by one over all, or by the sigmoids of scores. For
    sigmoids: bias [E] float32, on them where experts are chosen, not where they are weighted;
    normed: weights of a row are divided by their sum and `least`; of `groups[0]` groups of
    neighbours a row is sent to the best `groups[1]`, by the sum of the best two of each. scale: on
    the weights in the end.
    """

    num: int
    way: Literal["softmax_of_best", "best_of_softmax", "best_by_sigmoid"]
    bias: Tensor | None = None
    normed: bool = True
    scale: float = 1.0
    least: float = 0.0
    groups: tuple[int, int] = (1, 1)


def route_reference(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The formula in float32. Shapes as in `route`."""
    if routing.way == "softmax_of_best":
        best, chosen = scores.float().topk(routing.num, -1)
        return chosen, best.softmax(-1) * routing.scale
    if routing.way == "best_of_softmax":
        best, chosen = scores.float().softmax(-1).topk(routing.num, -1)
        return chosen, best * routing.scale
    shares = scores.float().sigmoid()
    ranks = shares if routing.bias is None else shares + routing.bias
    num_groups, num_best = routing.groups
    if num_best < num_groups:
        grouped = ranks.unflatten(-1, (num_groups, -1))
        of_groups = grouped.topk(2, -1).values.sum(-1)
        closed = torch.ones_like(of_groups, dtype=torch.bool)
        closed.scatter_(-1, of_groups.topk(num_best, -1).indices, False)
        ranks = grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)
    chosen = ranks.topk(routing.num, -1).indices
    best = shares.gather(-1, chosen)
    if routing.normed:
        best = best / (best.sum(-1, keepdim=True) + routing.least)
    return chosen, best * routing.scale


def route(scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """The experts of each row, [R, num] int64 with the best first, and their weights, float32.

    scores: [R, E].

    >>> import torch
    >>> routing = Routing(num=2, way="softmax_of_best")
    >>> route(torch.tensor([[0.0, 2.0, 2.0]]), routing)[1].tolist()
    [[0.5, 0.5]]
    """
    num_rows, num_experts = scores.shape
    group_size, num_best = num_experts // routing.groups[0], routing.groups[1]
    is_enough = routing.num <= num_best * group_size and (routing.groups[0] == 1 or group_size > 1)
    if not (is_enough and _is_few(scores) and scores.is_contiguous()):
        return route_reference(scores, routing)
    chosen = torch.empty((num_rows, routing.num), dtype=torch.int64)
    weights = torch.empty((num_rows, routing.num))
    _rows.route(
        scores.data_ptr(),
        rows.KINDS[scores.dtype],
        rows.address(routing.bias),
        chosen.data_ptr(),
        weights.data_ptr(),
        num_rows,
        num_experts,
        routing.num,
        *routing.groups,
        _WAYS[routing.way],
        routing.normed,
        routing.scale,
        routing.least,
        torch.get_num_threads(),
    )
    return chosen, weights


def blend_reference(x: Tensor, weights: Tensor) -> Tensor:
    """The formula in float32. Shapes as in `blend`."""
    return torch.einsum("rnd,rn->rd", x.float(), weights.float()).to(x.dtype)


def blend(x: Tensor, weights: Tensor) -> Tensor:
    """`sum_n weights[r, n] * x[r, n]`: [R, n, width] by weights [R, n] to [R, width]."""
    if not _is_few(x) or not x.is_contiguous() or not rows.takes(weights):
        return blend_reference(x, weights)
    return _blend(x, as_type(weights, torch.float32), x.dtype)


def mix_reference(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    act: Act | None,
    *,
    gated: bool = True,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """The formula in float32, with the weights of one expert of each row at a time. Shapes as in
    `mix`; nothing is read on the host."""
    up_scale, down_scale = scales
    wide = x.float()[:, :, None]
    y = torch.zeros((len(x), down.shape[1]), device=x.device)
    for experts, shares in zip(chosen.unbind(1), weights.float().unbind(1), strict=True):
        opened = (up[experts].float() @ wide)[:, :, 0]
        opened = opened if up_scale is None else opened * up_scale[experts]
        gate, *others = opened.chunk(2, -1) if gated else (opened,)
        inner = gate if act is None else act(gate)
        for other in others:
            inner = inner * other
        out = (down[experts].float() @ inner[:, :, None])[:, :, 0]
        y += shares[:, None] * (out if down_scale is None else out * down_scale[experts])
    return y.to(x.dtype)


def mix(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    act: Act | None,
    *,
    gated: bool = True,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Each row through its experts, whose outputs are added by their weights (arXiv:1701.06538,
    eq. 1).

    x: [R, width]. chosen, weights: [R, n], as `route` gives them. up: [E, 2 I, width], gates and
    then inputs, or [E, I, width] without gates. down: [E, width, I]. scales: factors of up's and
    down's outputs, [E, 2 I] and [E, width] float32, as weights of int8 have them. Returns [R,
    width] in x's dtype. A row comes out the same whatever other rows there are.
    """
    if not _mixes(x, up, down, act):
        return mix_reference(x, chosen, weights, up, down, act, gated=gated, scales=scales)
    num = chosen.shape[1]
    opened = _selected(as_type(x, torch.float32), up, scales[0], chosen, num)
    halves = opened.chunk(2, -1) if gated else (opened,)
    inner = row_gates.opened(halves[0], act, *halves[1:])
    outputs = _selected(inner, down, scales[1], chosen, 1).unflatten(0, (-1, num))
    return _blend(outputs, weights, x.dtype)


def mixes(x: Tensor, up: Tensor, down: Tensor, act: Act | None) -> bool:
    """Whether these are better given to `mix` than brought together by their experts: a few rows
    for the compiled form, or on a device other than a CPU, where how many rows an expert has cannot
    be known without waiting."""
    on_device = rows.steps_apart(x) and not rows.takes(x)
    return _mixes(x, up, down, act) or (on_device and len(x) <= rows.MOST_ROWS)


def _mixes(x: Tensor, up: Tensor, down: Tensor, act: Act | None) -> bool:
    """Whether the compiled form takes these."""
    return (
        _is_few(x)
        and x.stride(-1) == 1
        and act in row_gates.ACTS
        and all(each.dtype in rows.KINDS and each.is_contiguous() for each in (up, down))
    )


def _is_few(x: Tensor) -> bool:
    return rows.takes(x) and len(x) <= rows.MOST_ROWS


def _selected(
    x: Tensor, weight: Tensor, scale: Tensor | None, chosen: Tensor, repeat: int
) -> Tensor:
    """Each row, `repeat` times, by the weights [out, in] of its expert; [R, n] of them."""
    _, out, columns = weight.shape
    y = torch.empty((chosen.numel(), out))
    _rows.select(
        x.data_ptr(),
        weight.data_ptr(),
        rows.KINDS[weight.dtype],
        rows.address(scale),
        chosen.data_ptr(),
        y.data_ptr(),
        chosen.numel(),
        repeat,
        columns,
        out,
        torch.get_num_threads(),
    )
    return y


def _blend(x: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    num_rows, num, width = x.shape
    y = torch.empty((num_rows, width), dtype=dtype)
    _rows.blend(
        x.data_ptr(),
        rows.KINDS[x.dtype],
        weights.data_ptr(),
        y.data_ptr(),
        rows.KINDS[dtype],
        num_rows,
        num,
        width,
        torch.get_num_threads(),
    )
    return y
