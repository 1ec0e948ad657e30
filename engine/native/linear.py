"""Linear maps, whatever their weights are kept as."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from agentcache.kernels import rows

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.weights import Weights

__all__ = ["Linear"]


class Linear:
    """`(x @ weight.T + bias) * scale`; weight [out, in], bias and scale [out].

    On a CPU a few rows are computed by kernels of our own, which read each weight once. More rows
    go the way that is fastest on this machine (`rows.way_of_many`). Without the compiled kernels
    float32 weights lie transposed in memory, with which PyTorch's products of a few rows take less
    long.
    """

    __slots__ = ("_few", "bias", "scale", "weight", "weight_scale")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        shared: bool = False,
        scale: Tensor | None = None,
    ) -> None:
        self._few = rows.takes(weight)
        if self._few:
            weight = weight.contiguous()
        elif weight.dtype == torch.float32 and weight.device.type == "cpu" and not shared:
            weight = weight.t().contiguous().t()
        self.weight = weight
        self.bias = bias.float() if self._few and bias is not None else bias
        self.scale = scale
        self.weight_scale: Tensor | None = None

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

    def round_to_int8(self) -> None:
        """Keep the weights as whole numbers of 8 bits, the largest of each output as 127.

        From here on `weight * weight_scale[:, None]` is what they were, to 1/254 of that largest.
        """
        wide = self.weight.float()
        scale = wide.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / 127
        self.weight = (wide / scale[:, None]).round_().to(torch.int8).contiguous()
        self.weight_scale = scale
        self.bias = None if self.bias is None else self.bias.float()
        self._few = True

    def __call__(self, x: Tensor) -> Tensor:
        way = self._way(x) if self._few else "pytorch"
        if way == "compiled":
            return rows.linear(
                x,
                self.weight,
                weight_scale=self.weight_scale,
                bias=self.bias,
                scale=self.scale,
            )
        if way == "widened":
            return self._widened(x)
        y = F.linear(x, self.weight, None if self.bias is None else self.bias.to(x.dtype))
        return y if self.scale is None else (y * self.scale).to(y.dtype)

    def _way(self, x: Tensor) -> rows.Way:
        if x.shape[0] <= rows.MOST_ROWS:
            return "compiled"
        if self.weight.dtype == torch.int8:  # PyTorch would take it as float32 as well
            return "compiled" if rows.way_of_many(torch.float32) == "compiled" else "widened"
        return rows.way_of_many(self.weight.dtype)

    def _widened(self, x: Tensor) -> Tensor:
        """Many rows with narrow weights."""
        y = F.linear(x.float(), self.weight.float())
        if self.weight_scale is not None:
            y.mul_(self.weight_scale)
        if self.bias is not None:
            y.add_(self.bias)
        return (y if self.scale is None else y.mul_(self.scale)).to(x.dtype)
