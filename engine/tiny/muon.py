"""Muon in float32: `torch.optim.Muon` computes in bfloat16, which a CPU without units for it
multiplies at a third of the speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["Muon", "orthogonal"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """Momentum whose steps are made nearly orthogonal (K. Jordan, Muon, 2024), for matrices.

    A step has the root mean square that AdamW's has (arXiv:2502.16982, section 2.2), so both take
    the same rate. Decay of weights is decoupled.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.02,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Apply the gradients. closure: must be None."""
        if closure is not None:
            raise ValueError("a closure is not supported; compute the gradients before the step")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        average = state["momentum"].lerp_(grad, 1 - group["momentum"])
        way = orthogonal(grad.lerp(average, group["momentum"]))  # Nesterov's form
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(way, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: singular values come out between 0.7 and 1.2."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_TINY)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
