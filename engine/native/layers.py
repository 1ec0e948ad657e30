"""What every family is put together from: linear maps, norms, feed-forward, residual blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentcache.engine.native.packing import Pass
    from agentcache.engine.native.weights import Weights

__all__ = ["Block", "GatedMLP", "GatedNorm", "Layer", "Linear", "Parallel", "PlainMLP", "RMSNorm"]


class Layer(Protocol):
    """Something that computes over packed tokens: [N, width] to [N, width]."""

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor: ...


class Linear:
    """`(x @ weight.T + bias) * scale`; weight [out, in], bias and scale [out].

    float32 weights lie transposed in memory: products of a few rows go several times faster so, and
    those of one row and of hundreds no slower.
    """

    __slots__ = ("bias", "scale", "weight")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        shared: bool = False,
        scale: Tensor | None = None,
    ) -> None:
        if weight.dtype == torch.float32 and weight.device.type == "cpu" and not shared:
            weight = weight.t().contiguous().t()
        self.weight = weight
        self.bias = bias
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
        is_row = len(x) == 1 and x.dim() == 2
        if is_row and self.weight.dtype == torch.float32 and self.scale is None:
            y = torch.mv(self.weight, x[0])
            return (y if self.bias is None else y.add_(self.bias))[None]
        y = F.linear(x, self.weight, self.bias)
        return y if self.scale is None else (y * self.scale).to(y.dtype)


class RMSNorm:
    """`x / rms(x) * weight`, in float32. offset: what is added to the weight (gemma: 1)."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 0.0) -> None:
        self.weight = weight if offset == 0 else weight.float() + offset
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        y = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return y.to(x.dtype)


class GatedNorm:
    """Mamba-2's norm of `y * silu(gate)`, in groups; gate_after: `norm(y) * silu(gate)` instead.

    act: in place of silu.
    """

    __slots__ = ("act", "eps", "gate_after", "groups", "weight")

    def __init__(
        self,
        weight: Tensor,
        eps: float,
        *,
        groups: int = 1,
        gate_after: bool = False,
        act: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        self.weight = weight
        self.eps = eps
        self.groups = groups
        self.gate_after = gate_after
        self.act = act

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        dtype, opened = y.dtype, self.act(gate.float())
        x = y.float() if self.gate_after else y.float() * opened
        parts = x.unflatten(-1, (self.groups, -1))
        x = F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2) * self.weight.float()
        return (x * opened if self.gate_after else x).to(dtype)


class GatedMLP:
    """`down(act(gate(x)) * up(x))`; gate and up in one product."""

    __slots__ = ("_act", "_down", "_up")

    def __init__(self, up: Linear, down: Linear, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        self._up = up
        self._down = down
        self._act = act

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        gate, up = self._up(x).chunk(2, -1)
        return self._down(self._act(gate).mul_(up))


class PlainMLP:
    """`down(act(up(x)))`."""

    __slots__ = ("_act", "_down", "_up")

    def __init__(self, up: Linear, down: Linear, act: Callable[[Tensor], Tensor]) -> None:
        self._up = up
        self._down = down
        self._act = act

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        return self._down(self._act(self._up(x)))


@dataclass(frozen=True, slots=True)
class Parallel:
    """Several layers beside each other, each with a factor on its input and its output; summed."""

    parts: tuple[tuple[Layer, float, float], ...]

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        first, *others = (
            layer(x if before == 1 else x * before, tokens) * after
            for layer, before, after in self.parts
        )
        return sum(others, first)


@dataclass(frozen=True, slots=True)
class Block:
    """`x + scale * after(inner(before(x)))`."""

    before: RMSNorm | None
    inner: Layer
    after: RMSNorm | None = None
    scale: float = 1.0

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        y = self.inner(x if self.before is None else self.before(x), tokens)
        if self.after is not None:
            y = self.after(y)
        return torch.add(x, y, alpha=self.scale)
