"""What every family is put together from: norms, feed-forward, residual blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from agentcache.kernels import row_gates, row_moves, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import Pass

__all__ = ["Block", "GatedMLP", "GatedNorm", "Layer", "Parallel", "PlainMLP", "RMSNorm"]


class Layer(Protocol):
    """Something that computes over packed tokens: [N, width] to [N, width]."""

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor: ...


class RMSNorm:
    """`x / rms(x) * weight`, in float32. offset: what is added to the weight (gemma: 1)."""

    __slots__ = ("_wide", "eps", "weight")

    def __init__(self, weight: Tensor, eps: float, *, offset: float = 0.0) -> None:
        self.weight = weight if offset == 0 else weight.float() + offset
        self.eps = eps
        self._wide = self.weight.float() if rows.takes(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._wide is not None:
            return rows.rms_norm(x, self._wide, self.eps)
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
        self.weight = weight.float()
        self.eps = eps
        self.groups = groups
        self.gate_after = gate_after
        self.act = act

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        """Of [N, width]; y may be overwritten."""
        if row_gates.takes(y, self.act):
            wide = row_gates.gate(
                row_moves.as_type(y, torch.float32),
                gate,
                self.weight,
                act=self.act,
                eps=self.eps,
                groups=self.groups,
                norm_before_gate=self.gate_after,
            )
            return row_moves.as_type(wide, y.dtype)
        dtype, opened = y.dtype, self.act(gate.float())
        x = y.float() if self.gate_after else y.float() * opened
        parts = x.unflatten(-1, (self.groups, -1))
        x = F.rms_norm(parts, parts.shape[-1:], None, self.eps).flatten(-2) * self.weight
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
        if row_gates.takes(gate, self._act):
            return self._down(row_gates.opened(gate, self._act, up))
        return self._down(self._act(gate).mul_(up))


class PlainMLP:
    """`down(act(up(x)))`."""

    __slots__ = ("_act", "_down", "_up")

    def __init__(self, up: Linear, down: Linear, act: Callable[[Tensor], Tensor]) -> None:
        self._up = up
        self._down = down
        self._act = act

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        up = self._up(x)
        if row_gates.takes(up, self._act):
            return self._down(row_gates.opened(up, self._act))
        return self._down(self._act(up))


@dataclass(frozen=True, slots=True)
class Parallel:
    """Several layers beside each other, each with a factor on its input and its output; summed."""

    parts: tuple[tuple[Layer, float, float], ...]

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        (layer, before, after), *others = self.parts
        out = row_moves.scale(layer(row_moves.scale(x, before), tokens), after)
        for layer, before, after in others:
            out = row_moves.add(out, layer(row_moves.scale(x, before), tokens), after)
        return out


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
        return row_moves.add(x, y, self.scale)
