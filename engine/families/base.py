"""What the engine needs to know of a model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from agentcache.types import Mixer

__all__ = ["Captures", "Family", "as_it_is"]

Captures = Literal["mixer", "conv", "cut"]
"""Who sets a state from inside a pass aside: the mixer that was installed; the layer that keeps the
convolutions, where those are all the state there is; or nobody, so that the pass is cut there."""


def as_it_is(model: nn.Module) -> None:
    """Leave a model's modules alone."""


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of transformers, under the `model_type` of its (text) config.

    Sizes are not written down here: they are read off a short run of the loaded model (see
    `describe`). mixer: what its state layers compute, for estimates of cost. install: make a loaded
    model compute what the stock modules cannot. gathers: keys and values are computed from what the
    cache returns, so it has to return the whole history. refuses: why a config cannot be admitted.
    traps: what goes wrong here when nobody thinks of it.
    """

    model_types: tuple[str, ...]
    mixer: Mixer = "none"
    install: Callable[[nn.Module], None] = as_it_is
    captures: Captures = "cut"
    gathers: bool = False
    refuses: Callable[[Any], str | None] = lambda config: None
    traps: tuple[str, ...] = ()
