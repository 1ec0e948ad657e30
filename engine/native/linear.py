"""Linear maps, whatever their weights are kept as."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from agentcache.kernels import row_moves, rows

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.weights import Weights

__all__ = ["Linear", "LinearStack", "Roundable", "to_int8"]


class Roundable:
    """Weights [..., out, in] that may be rounded.

    Rounded ones are whole numbers of 8 bits, and `weight * weight_scale[..., None]` is what they
    were; weight_scale: [..., out] float32.
    """

    __slots__ = ("weight", "weight_scale")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.weight_scale: Tensor | None = None

    def round_to_int8(self) -> None:
        """Keep them as 8 bits from here on."""
        self.weight, self.weight_scale = to_int8(self.weight)


class Linear(Roundable):
    """`(x @ weight.T + bias) * scale`; weight [out, in], bias and scale [out].

    On a CPU a few rows are computed by kernels of our own, which read each weight once. More rows
    go the way that is fastest on this machine (`rows.way_of_many`). Without the compiled kernels
    float32 weights lie transposed in memory, with which PyTorch's products of a few rows take less
    long, unless they are looked up row by row as well.
    """

    __slots__ = ("bias", "dtype", "scale")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        looked_up: bool = False,
        scale: Tensor | None = None,
    ) -> None:
        is_few = rows.takes(weight)
        if is_few:
            weight = weight.contiguous()
        elif weight.dtype == torch.float32 and weight.device.type == "cpu" and not looked_up:
            weight = weight.t().contiguous().t()
        super().__init__(weight)
        self.dtype = weight.dtype
        self.bias = bias.float() if is_few and bias is not None else bias
        self.scale = scale

    @classmethod
    def of(cls, weights: Weights, name: str, out: int, width: int) -> Linear:
        """By its name in a checkpoint."""
        part = weights.at(name)
        return cls(part.get("weight", out, width), part.maybe("bias", out))

    @classmethod
    def joined(cls, weights: Weights, sizes: dict[str, int], width: int) -> Linear:
        """Several maps of one input as one; sizes: their outputs, by name."""
        parts = [weights.at(name).get("weight", out, width) for name, out in sizes.items()]
        biases = [weights.at(name).maybe("bias", out) for name, out in sizes.items()]
        bias = None
        if any(part is not None for part in biases):
            bias = torch.cat(
                [
                    parts[i].new_zeros(len(parts[i])) if part is None else part
                    for i, part in enumerate(biases)
                ]
            )
        return cls(torch.cat(parts), bias)

    def scaled(self, *factors: tuple[int, float]) -> Linear:
        """With a factor on each so many of the outputs, bias included.

        float32 weights take them in; narrower ones would lose by it and keep them beside.
        """
        if all(factor == 1 for _, factor in factors):
            return self
        scale = torch.cat([torch.full((num,), float(factor)) for num, factor in factors])
        scale = scale.to(self.weight.device)
        if self.scale is not None:
            scale = scale * self.scale
        if self.weight.dtype != torch.float32:
            return Linear(self.weight, self.bias, scale=scale)
        bias = None if self.bias is None else self.bias * scale
        return Linear(self.weight * scale[:, None], bias)

    def __call__(self, x: Tensor) -> Tensor:
        return _product(x, self.weight, self.weight_scale, self.bias, self.scale)

    def rows_of(self, index: Tensor) -> Tensor:
        """The weights of some outputs, by index [R] int64: [R, in] in the type they came in."""
        if self.weight_scale is None:
            return row_moves.gather(self.weight, index)
        return row_moves.gather_rounded(self.weight, self.weight_scale, index, self.dtype)


class LinearStack(Roundable):
    """Linear maps of one shape without biases, one for each expert; weight [E, out, in]."""

    __slots__ = ()

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.contiguous())

    def __len__(self) -> int:
        return len(self.weight)

    def __call__(self, x: Tensor, number: int) -> Tensor:
        """Through one of them."""
        scale = None if self.weight_scale is None else self.weight_scale[number]
        return _product(x, self.weight[number], scale)


_ROWS_AT_ONCE = 4096
"""Rounded together, so that little is kept in float32 meanwhile."""


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of 8 bits [..., out, in] and their scales [..., out].

    The largest weight of each output is 127, so the others are off by 1/254 of it at most.
    """
    numbers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[:-1])
    for part, out, scale in zip(
        weight.flatten(0, -2).split(_ROWS_AT_ONCE),
        numbers.flatten(0, -2).split(_ROWS_AT_ONCE),
        scales.flatten().split(_ROWS_AT_ONCE),
        strict=True,
    ):
        wide = part.float()
        most = wide.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny)
        torch.div(most, 127, out=scale)
        out.copy_((wide / scale[:, None]).round_())
    return numbers, scales


def _product(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """`((x @ weight.T) * weight_scale + bias) * scale`."""
    way = _way(x, weight)
    if way == "compiled":
        return rows.linear(x, weight, weight_scale=weight_scale, bias=bias, scale=scale)
    if way == "widened":
        return rows.linear_reference(x, weight, weight_scale=weight_scale, bias=bias, scale=scale)
    y = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return y if scale is None else (y * scale).to(y.dtype)


def _way(x: Tensor, weight: Tensor) -> rows.Way:
    is_rounded = weight.dtype == torch.int8
    if not (is_rounded or rows.takes(weight)):
        return "pytorch"
    if x.shape[0] <= rows.MOST_ROWS:
        return "compiled"
    if is_rounded:  # PyTorch would take it as float32 as well
        return "compiled" if rows.way_of_many(torch.float32) == "compiled" else "widened"
    return rows.way_of_many(weight.dtype)
