"""How the weights of linear layers lie in memory.

`torch.nn.Linear` keeps its weight [out, in] row by row, and multiplies by the transpose of it. On a
CPU the product of a few rows, as in a batched decode step or a short extension, goes several times
faster where the transpose itself is what lies row by row; the product of one row, and of hundreds,
costs the same. bfloat16 gains nothing and float16 loses, so both stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["lay_out_for_few_rows"]


def lay_out_for_few_rows(model: torch.nn.Module) -> None:
    """Keep float32 weights of linear layers on a CPU transposed; shapes and values stay the same.

    Weights that something else than a linear layer holds too, such as a tied embedding, are left
    alone: it reads them row by row.
    """
    modules = list(model.modules())
    others = {
        id(parameter)
        for module in modules
        if type(module) is not torch.nn.Linear
        for parameter in module.parameters(recurse=False)
    }
    for weight in _weights(modules):
        if id(weight) not in others and weight.is_contiguous():
            weight.data = weight.data.t().contiguous().t()


def _weights(modules: Iterable[torch.nn.Module]) -> Iterable[torch.Tensor]:
    for module in modules:
        if type(module) is torch.nn.Linear:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                yield weight
