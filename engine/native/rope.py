"""Rotary positions, by the same frequencies as transformers'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentcache.kernels import rows
from agentcache.kernels.row_moves import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.packing import Pass

__all__ = ["Rope"]


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotation of the first `2 * len(frequencies)` channels of a head, halves against each other.

    frequencies: [D / 2] float32, per position. scale: on cosine and sine. in_turns: neighbouring
    channels are pairs, not halves.
    """

    frequencies: Tensor
    scale: float = 1.0
    in_turns: bool = False

    @classmethod
    def of(
        cls, config: Any, width: int, kind: str | None = None, *, in_turns: bool = False
    ) -> Rope:
        """By a config of transformers; width: of a head. kind: of layers, where they differ. On
        torch's default device."""
        given = dict(config.rope_parameters)
        if kind is not None and kind in given:
            given = dict(given[kind])
        rope_type = given.get("rope_type", "default")
        if rope_type == "default":
            turned = int(width * given.get("partial_rotary_factor", 1.0))
            powers = torch.arange(0, turned, 2, dtype=torch.float32) / turned
            return cls(given["rope_theta"] ** -powers, in_turns=in_turns)
        options = {} if kind is None else {"layer_type": kind}
        device = torch.get_default_device()
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, device, **options)
        return cls(frequencies, scale, in_turns)

    def turn(self, x: Tensor, tokens: Pass) -> Tensor:
        """[N, heads, D] with its positions in it."""
        if len(x) <= rows.MOST_ROWS and rows.takes(x):  # others' angles are made once a pass
            return rotate(
                x,
                tokens.positions,
                self.frequencies,
                scale=self.scale,
                in_turns=self.in_turns,
            )
        cosine, sine = tokens.once(self, self._angles)
        turned = x[..., : cosine.shape[-1]]
        if self.in_turns:
            other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
        else:
            low, high = turned.chunk(2, -1)
            other = torch.cat([-high, low], -1)
        y = (turned * cosine.to(x.dtype)).addcmul_(other, sine.to(x.dtype))
        return y if y.shape == x.shape else torch.cat([y, x[..., y.shape[-1] :]], -1)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * self.frequencies
        both = (
            torch.repeat_interleave(angles, 2, -1) if self.in_turns else torch.cat([angles] * 2, -1)
        )
        return (both.cos() * self.scale)[:, None], (both.sin() * self.scale)[:, None]
