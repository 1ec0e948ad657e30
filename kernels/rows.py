"""Work on a few rows at a time on a CPU: a decode step, a short extension.

Such work is bound by what it reads and by the number of calls, so these ops read each weight once
for all rows and do what surrounds a product in the same pass. Compiled where the installation had
a compiler, else PyTorch's; each has its formula beside it. Inputs are float32 or bfloat16,
computing is in float32, outputs have the inputs' type.

The environment variable AGENTCACHE_PURE_PYTHON, set to anything but 0, turns the compiled forms
off.
"""

from __future__ import annotations

import os
import platform
import time
from functools import cache, partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "IS_COMPILED",
    "KINDS",
    "MOST_ROWS",
    "Way",
    "address",
    "linear",
    "linear_reference",
    "rms_norm",
    "rms_norm_reference",
    "steps_apart",
    "takes",
    "way_of_many",
]

MOST_ROWS = 32
"""Up to about so many rows a product takes no longer here than in PyTorch with weights that lie row
by row, of which a few rows take it two to four times as long (bench/kernels/run.py --op rows)."""

Way = Literal["compiled", "pytorch", "widened"]
"""A way to compute a product: here, by PyTorch, or by PyTorch in float32."""

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Types by their number in `_rows.h`."""
_TRIED_ROWS, _TRIED_WIDTH = 128, 512
_CLEAR_LEAD = 1.2
_FLOATS = frozenset({torch.float32, torch.bfloat16})
IS_COMPILED = False
"""Whether the compiled forms are in use."""


def _is_known_processor() -> bool:
    """Whether this processor has the instructions that the compiled forms are made of."""
    is_x86_64 = platform.machine() == "x86_64"
    return not is_x86_64 or torch.backends.cpu.get_cpu_capability().startswith("AVX")


if os.environ.get("AGENTCACHE_PURE_PYTHON", "0") == "0" and _is_known_processor():
    try:
        # it takes the OpenMP that torch has loaded by now
        from agentcache.kernels import _rows

        IS_COMPILED = True
    except ImportError:  # no compiler when it was installed, or another OpenMP
        pass


def way_of_many(dtype: torch.dtype) -> Way:
    """How products of more than MOST_ROWS rows go fastest on this machine, by the weights' type.

    Measured once. PyTorch's library for float32 takes the widest vectors on the processors of one
    maker only, and is twice as fast or half as fast as the compiled form by that; with bfloat16 it
    is several times as fast, or as slow, by whether the processor multiplies such numbers. Another
    way than the usual one is taken with a clear lead only, so that every process on a machine
    decides the same.
    """
    return _measured_way(dtype) if IS_COMPILED else _usual_way(dtype)


def _usual_way(dtype: torch.dtype) -> Way:
    return "pytorch" if dtype == torch.float32 else "widened"


@cache
def _measured_way(dtype: torch.dtype) -> Way:
    usual = _usual_way(dtype)
    ways: dict[Way, Callable[[Tensor, Tensor], Tensor]] = {
        "pytorch": F.linear,
        "compiled": linear,
        "widened": lambda x, weight: F.linear(x.float(), weight.float()).to(x.dtype),
    }
    x = torch.ones((_TRIED_ROWS, _TRIED_WIDTH), dtype=dtype)
    weight = torch.ones((2 * _TRIED_WIDTH, _TRIED_WIDTH), dtype=dtype)
    with torch.inference_mode():
        took = {way: _seconds(partial(product, x, weight)) for way, product in ways.items()}
    best = min(took, key=took.__getitem__)
    return best if took[best] * _CLEAR_LEAD < took[usual] else usual


def _seconds(compute: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        compute()
        times.append(time.perf_counter() - begin)
    return min(times)


def takes(tensor: Tensor) -> bool:
    """Whether the compiled forms take this: float32 or bfloat16 on a CPU."""
    return IS_COMPILED and tensor.is_cpu and tensor.dtype in _FLOATS


def steps_apart(tensor: Tensor) -> bool:
    """Whether one token each of several sequences goes by operations of its own, which find states
    and keys by numbers in tensors: the compiled forms on a CPU, and on other devices, where such a
    step can be captured whole."""
    return takes(tensor) or not tensor.is_cpu


def linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """The formula in float32. Shapes as in `linear`."""
    y = x.float() @ weight.float().T
    for factor, is_sum in ((weight_scale, False), (bias, True), (scale, False)):
        if factor is not None:
            y = y.add_(factor) if is_sum else y.mul_(factor)
    return y.to(x.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """`((x @ weight.T) * weight_scale + bias) * scale`, each weight read once for all rows.

    x: [R, in] float32 or bfloat16. weight: [out, in] float32, bfloat16 or int8, contiguous.
    weight_scale, bias, scale: [out] float32, or None for none. Returns [R, out] in x's dtype. A row
    comes out the same whatever other rows there are.

    >>> import torch
    >>> linear(torch.ones(2, 3), torch.ones(4, 3)).tolist()[0]
    [3.0, 3.0, 3.0, 3.0]
    """
    if not takes(x) or weight.dtype not in KINDS or not weight.is_contiguous():
        return linear_reference(x, weight, weight_scale=weight_scale, bias=bias, scale=scale)
    x = x.contiguous()
    rows, columns = x.shape
    out = weight.shape[0]
    y = torch.empty((rows, out), dtype=x.dtype)
    is_narrow = x.dtype != torch.float32
    wide = torch.empty((rows, columns)) if is_narrow else x
    _rows.linear(
        x.data_ptr() if is_narrow else 0,
        wide.data_ptr(),
        rows,
        columns,
        weight.data_ptr(),
        KINDS[weight.dtype],
        out,
        address(weight_scale),
        address(bias),
        address(scale),
        y.data_ptr(),
        KINDS[x.dtype],
        torch.get_num_threads(),
    )
    return y


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` along the last dimension (arXiv:1910.07467, eq. 4).

    x: [..., width]; of [R, width] and [R, parts, width] rows and parts may lie any distance apart.
    weight: [width] float32.
    """
    if not takes(x):
        return rms_norm_reference(x, weight, eps)
    width = weight.shape[0]
    if x.stride(-1) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    in_parts = x.dim() == 3
    _rows.rms_norm(
        x.data_ptr(),
        x.stride(0),
        x.stride(1) if in_parts else 0,
        weight.data_ptr(),
        y.data_ptr(),
        len(x),
        x.shape[1] if in_parts else 1,
        width,
        eps,
        KINDS[x.dtype],
        torch.get_num_threads(),
    )
    return y


def address(tensor: Tensor | None) -> int:
    """Where its data begins; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
