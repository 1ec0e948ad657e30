"""Activations of rows and gates: what is computed number by number between products.

Compiled where the installation had a compiler, else PyTorch's; each has its formula beside it.
Inputs are float32 or bfloat16, computing is in float32, outputs have the inputs' type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from agentcache.kernels import rows

if rows.IS_COMPILED:
    from agentcache.kernels import _rows

if TYPE_CHECKING:
    from collections.abc import Callable

    Act = Callable[[Tensor], Tensor]

__all__ = [
    "ACTS",
    "gate",
    "gate_reference",
    "gelu_tanh",
    "multiply",
    "opened",
    "opened_reference",
    "relu_squared",
    "soft_cap",
    "soft_cap_reference",
    "takes",
]


def relu_squared(x: Tensor) -> Tensor:
    """`max(x, 0)^2` (arXiv:2109.08668)."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by the formula with a tanh (arXiv:1606.08415, section 2)."""
    return F.gelu(x, approximate="tanh")


ACTS: dict[Act | None, int] = {
    None: 0,
    F.silu: 1,
    torch.sigmoid: 2,
    relu_squared: 3,
    F.gelu: 4,
    gelu_tanh: 5,
}
"""Activations with a compiled form, by their number in `_rows_gates.h`; None: none."""
_SOFT_CAP = 6


def takes(x: Tensor, act: Act | None) -> bool:
    """Whether there is a compiled form for this."""
    return rows.takes(x) and act in ACTS


def opened_reference(x: Tensor, act: Act | None, by: Tensor | None = None) -> Tensor:
    """The formula in float32. Shapes as in `opened`."""
    y = x.float() if act is None else act(x.float())
    return (y if by is None else y * by.float()).to(x.dtype)


def opened(x: Tensor, act: Act | None, by: Tensor | None = None) -> Tensor:
    """`act(x) * by`, or `act(x)` alone.

    x, by: [R, width] or [R, parts, width] of one type, rows and parts any distance apart. This is
    what a gated MLP does with its gate and the rest (arXiv:2002.05202), and gated attention.

    >>> import torch
    >>> opened(torch.tensor([[-1.0, 3.0]]), relu_squared, torch.full((1, 2), 2.0)).tolist()
    [[0.0, 18.0]]
    """
    both = (x,) if by is None else (x, by)
    if not takes(x, act) or not all(each.dtype == x.dtype and _is_plain(each) for each in both):
        return opened_reference(x, act, by)
    return _open(x, ACTS[act], by)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """`x * y`. Shapes as in `opened`."""
    return opened(x, None, y)


def soft_cap_reference(x: Tensor, cap: float) -> Tensor:
    """The formula in float32."""
    return (cap * torch.tanh(x.float() / cap)).to(x.dtype)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)` of [R, width] (arXiv:2408.00118, section 2)."""
    if not rows.takes(x) or not _is_plain(x):
        return soft_cap_reference(x, cap)
    return _open(x, _SOFT_CAP, None, cap)


def _is_plain(x: Tensor) -> bool:
    """Whether only rows and parts lie apart."""
    return x.dim() in (2, 3) and x.stride(-1) == 1


def _open(x: Tensor, act: int, by: Tensor | None, limit: float = 0.0) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    _rows.open_up(
        x.data_ptr(),
        *_strides(x),
        act,
        limit,
        rows.address(by),
        *((0, 0) if by is None else _strides(by)),
        y.data_ptr(),
        len(x),
        x.shape[1] if x.dim() == 3 else 1,
        x.shape[-1],
        rows.KINDS[x.dtype],
        torch.get_num_threads(),
    )
    return y


def _strides(x: Tensor) -> tuple[int, int]:
    """Between rows, and between their parts."""
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0


def gate_reference(
    y: Tensor,
    gate: Tensor,
    norm: Tensor | None = None,
    *,
    act: Act = F.silu,
    eps: float = 0.0,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> Tensor:
    """The formula in float32. Shapes as in `gate`."""
    open_by = act(gate.float())
    wide = y.float()
    if norm is None:
        return (wide * open_by).to(y.dtype)
    x = wide if norm_before_gate else wide * open_by
    parts = x.unflatten(-1, (groups, -1))
    x = F.rms_norm(parts, parts.shape[-1:], None, eps).flatten(-2) * norm
    return (x * open_by if norm_before_gate else x).to(y.dtype)


def gate(
    y: Tensor,
    gate: Tensor,
    norm: Tensor | None = None,
    *,
    act: Act = F.silu,
    eps: float = 0.0,
    groups: int = 1,
    norm_before_gate: bool = False,
) -> Tensor:
    """`y * act(gate)`, with an RMS norm of groups of each row after that, or of y before it.

    y: [R, width]; may be overwritten. gate: [R, width] with rows any distance apart. norm: weights
    [width] float32, or None for no norm. This is Mamba-2's gated norm, and gated delta's.
    """
    is_plain = y.dtype == torch.float32 and gate.stride(-1) == 1
    if not takes(y, act) or not rows.takes(gate) or not is_plain:
        return gate_reference(
            y, gate, norm, act=act, eps=eps, groups=groups, norm_before_gate=norm_before_gate
        )
    y = y.contiguous()
    _rows.gate(
        y.data_ptr(),
        gate.data_ptr(),
        rows.KINDS[gate.dtype],
        ACTS[act],
        gate.stride(0),
        y.shape[0],
        y.shape[1],
        rows.address(norm),
        groups,
        norm_before_gate,
        eps,
        torch.get_num_threads(),
    )
    return y
