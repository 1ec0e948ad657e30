"""Checkpoints in fewer bytes: float states rounded to 16 or 8 bits while they are parked.

A number format per tensor, all tensors of one format rounded in one go. Numbers are scaled in
groups of neighbours, so that neither the largest nor the smallest of floats leaves the range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.pools.layout import StateLayout, StateSpec

__all__ = ["Packing", "make_packing"]

_ALIGN = 64
_GROUPS = (16, 128)
"""Numbers that share one scale: the fewest and the most."""

Encode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Decode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Codec:
    """A number format. encode: float32 [groups, n] to codes [groups, n] and scales [groups];
    decode: back. What is not finite comes back as it was."""

    code: torch.dtype
    scale: torch.dtype
    encode: Encode
    decode: Decode


def _peaks(values: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Each group's largest finite magnitude, and whether everything is finite."""
    peaks = values.abs().amax(dim=1)
    if bool(peaks.isfinite().all()):
        return peaks, True
    finite = torch.where(values.isfinite(), values, 0.0)
    return finite.abs().amax(dim=1), False


_BIAS = 127  # of a float32's exponent, which lies in the bits from 23 on
_EXPONENTS = (-126, 126)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2 to whole numbers within `_EXPONENTS`, exactly."""
    return ((exponents.to(torch.int32) + _BIAS) << 23).view(torch.float32)


def _encode_half(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divided by a power of two, which loses nothing, the largest of a group is about 1."""
    peaks, _ = _peaks(values)
    exponents = torch.frexp(peaks).exponent.clamp(*_EXPONENTS)
    halves = (values * _power_of_two(-exponents)[:, None]).to(torch.float16)
    return halves, (exponents + _BIAS).to(torch.uint8)


def _decode_half(halves: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    exponents = scales.to(torch.int32) - _BIAS
    return halves.float().mul_(_power_of_two(exponents)[:, None])


_TOP = 127
_LEAST_SCALE = 2.0**-120
_NOT_A_NUMBER, _INFINITE = -128, 127
"""Codes in a group whose scale is negative: there, finite numbers end one below `_INFINITE`."""


def _encode_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole multiples of a group's largest magnitude over 127.

    The scale of a group that holds anything that is not finite is negative.
    """
    peaks, all_finite = _peaks(values)
    scales = (peaks / _TOP).clamp_min_(_LEAST_SCALE).to(torch.bfloat16)
    codes = (values / scales.float()[:, None]).round_()
    if all_finite:
        return codes.clamp_(-_TOP, _TOP).to(torch.int8), scales
    broken = ~values.isfinite().all(dim=1)
    limits = torch.where(broken, _INFINITE - 1, _TOP)[:, None]
    finite = torch.clamp(codes.nan_to_num(0.0), -limits, limits)
    infinite = torch.where(values.isinf(), values.sign() * _INFINITE, finite)
    codes = torch.where(values.isnan(), float(_NOT_A_NUMBER), infinite)
    return codes.to(torch.int8), torch.where(broken, -scales, scales)


def _decode_int8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = codes.float().mul_(scales.float().abs()[:, None])
    broken = scales < 0
    if not bool(broken.any()):
        return values
    special = broken[:, None] & (codes.abs() == _INFINITE)
    values = torch.where(special, codes.sign() * torch.inf, values)
    return torch.where(broken[:, None] & (codes == _NOT_A_NUMBER), torch.nan, values)


_HALF = _Codec(torch.float16, torch.uint8, _encode_half, _decode_half)
_INT8 = _Codec(torch.int8, torch.bfloat16, _encode_int8, _decode_int8)

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _codec(spec: StateSpec, checkpoint_format: str) -> _Codec | None:
    """The format of a tensor; None: as it is.

    Only recurrent states are rounded to 8 bits. A convolution's state is its last few inputs: 8
    bits of so little would save next to nothing, and the next tokens would see all of the error.
    Sidecars' waiting tokens, and what holds no floats, are kept.
    """
    is_recurrent = spec.name.startswith("recurrent")
    if checkpoint_format == "int8" and is_recurrent and spec.dtype in _FLOATS:
        return _INT8
    is_state = is_recurrent or spec.name.startswith("conv")
    return _HALF if is_state and spec.dtype == torch.float32 else None


def _group(spec: StateSpec) -> int:
    """How many neighbours share a scale: a part of the last dimension, unless that is short."""
    length = spec.shape[-1] if spec.shape and spec.shape[-1] >= _GROUPS[0] else prod(spec.shape)
    fitting = [n for n in range(_GROUPS[0], _GROUPS[-1] + 1) if length % n == 0]
    return max(fitting, default=length)


@dataclass(frozen=True, slots=True)
class _Section:
    """Tensors that are packed alike, side by side.

    parts: [start, stop) of each in the bytes of a row. codes, scales: [start, stop) of all of them
    in the bytes of a packed checkpoint. codec None: bytes that are copied.
    """

    codec: _Codec | None
    dtype: torch.dtype
    group: int
    parts: tuple[tuple[int, int], ...]
    codes: tuple[int, int]
    scales: tuple[int, int]

    def views(self, row: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each tensor of a row in groups, [groups, n]."""
        for start, stop in self.parts:
            yield row[start:stop].view(self.dtype).view(-1, self.group)


class Packing:
    """How one layout's states are packed: made once, for all checkpoints.

    checkpoint_format: its name. num_bytes: of a packed checkpoint.
    """

    def __init__(self, layout: StateLayout, checkpoint_format: str) -> None:
        self.checkpoint_format = checkpoint_format
        self._sections: list[_Section] = []
        alike: dict[tuple[_Codec | None, torch.dtype, int], list[tuple[int, int]]] = {}
        for spec, at in zip(layout.specs, layout.offsets, strict=True):
            codec = _codec(spec, checkpoint_format)
            group = 1 if codec is None else _group(spec)
            if codec is not None and _packed_bytes(spec, codec, group) >= spec.num_bytes:
                codec, group = None, 1
            dtype = torch.uint8 if codec is None else spec.dtype
            alike.setdefault((codec, dtype, group), []).append((at, at + spec.num_bytes))
        self.num_bytes = 0
        for (codec, dtype, group), parts in alike.items():
            size = sum(stop - start for start, stop in parts)
            count = size // dtype.itemsize
            codes = self._place(count * (1 if codec is None else codec.code.itemsize))
            scales = self._place(0 if codec is None else count // group * codec.scale.itemsize)
            self._sections.append(_Section(codec, dtype, group, tuple(parts), codes, scales))

    def _place(self, num_bytes: int) -> tuple[int, int]:
        start = self.num_bytes
        self.num_bytes += -(-num_bytes // _ALIGN) * _ALIGN
        return start, start + num_bytes

    def pack(self, row: torch.Tensor, out: torch.Tensor) -> None:
        """Write the state in `row` into `out`; both bytes, [row_bytes] and [num_bytes or more]."""
        for section in self._sections:
            target = out[slice(*section.codes)]
            if section.codec is None:
                torch.cat([row[start:stop] for start, stop in section.parts], out=target)
                continue
            values = torch.cat(list(section.views(row))).float()
            codes, scales = section.codec.encode(values)
            target.copy_(codes.view(-1).view(torch.uint8))
            out[slice(*section.scales)].copy_(scales.view(torch.uint8))

    def unpack(self, packed: torch.Tensor, row: torch.Tensor) -> None:
        """The way back; bytes of the row that no tensor lies in stay as they are."""
        for section in self._sections:
            source = packed[slice(*section.codes)]
            if section.codec is None:
                sizes = [stop - start for start, stop in section.parts]
                for (start, stop), part in zip(section.parts, source.split(sizes), strict=True):
                    row[start:stop].copy_(part)
                continue
            codes = source.view(section.codec.code).view(-1, section.group)
            scales = packed[slice(*section.scales)].view(section.codec.scale)
            values = section.codec.decode(codes, scales)
            at = 0
            for view in section.views(row):
                view.copy_(values[at : at + len(view)])
                at += len(view)


def _packed_bytes(spec: StateSpec, codec: _Codec, group: int) -> int:
    count = prod(spec.shape)
    return count * codec.code.itemsize + count // group * codec.scale.itemsize


def make_packing(layout: StateLayout, checkpoint_format: str) -> Packing | None:
    """How states are packed; None where that would not make them smaller, or is not wanted."""
    if checkpoint_format == "unchanged":
        return None
    packing = Packing(layout, checkpoint_format)
    return packing if packing.num_bytes < layout.num_bytes else None
