"""What the engine needs to know of a model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from transformers.cache_utils import Cache

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from agentcache.engine.backend import Span
    from agentcache.engine.sidecar_layers import Part
    from agentcache.pools.layout import KVSpec, StateSpec
    from agentcache.types import Mixer

__all__ = ["Captures", "Family", "KeptLayer"]

Captures = Literal["mixer", "conv", "cut"]
"""Who sets a state from inside a pass aside: the mixer that was installed; the layer that keeps the
convolutions, where those are all the state there is; or nobody, so that the pass is cut there."""


def _plain_cache(layers: list[Any]) -> Cache:
    return Cache(layers=layers)


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """What one cache layer keeps: KV, states, both or nothing; and its parts of sidecars."""

    kv: KVSpec | None
    states: tuple[StateSpec, ...]
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of transformers, under the `model_type` of its (text) config.

    Sizes are not written down here: they are read off a short run of the loaded model (see
    `describe`), but for a family that does not hand them to its cache: keeps says them of a model,
    one entry per cache layer. mixer: what its state layers compute, for estimates of cost. install:
    "module:function", which makes a loaded model compute what the stock modules cannot; by name,
    since such modules need transformers' modeling code, which takes memory and a second to import.
    cache: an object of the class the modeling code insists on, with our layers in it. gathers: keys
    and values are computed from what the cache returns, so it has to return the whole history.
    refuses: why a config cannot be admitted, by the flag neither. traps: what goes wrong here when
    nobody thinks of it.

    ragged: sequences of unequal length can share a pass; else they decode one by one. mask: what
    the modeling code needs as `attention_mask` for a config and a span. layer: makes the cache
    layer of attention, where it is not the usual one. whole_convs: numbers of the convolutions
    whose state is as wide as what is named to the cache; others' is a column less. fills: by name,
    what states of a config begin with where that is not zero.
    """

    model_types: tuple[str, ...]
    mixer: Mixer = "none"
    install: str | None = None
    captures: Captures = "cut"
    keeps: Callable[[Any], tuple[KeptLayer, ...]] | None = None
    cache: Callable[[list[Any]], Cache] = _plain_cache
    gathers: bool = False
    refuses: Callable[[Any], str | None] = lambda config: None
    traps: tuple[str, ...] = ()
    ragged: bool = True
    mask: Callable[[Any, Span, torch.device], Any] | None = None
    layer: Callable[[KeptLayer], Any] | None = None
    whole_convs: tuple[int, ...] = ()
    fills: Callable[[Any], dict[str, int]] = lambda config: {}
