"""What a loaded model keeps, read off a short run of it as it is.

Shapes, widths and dtypes are those the modeling code itself hands to its cache, so no formula of
them is written down twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from agentcache.engine.admission import admit, code_of_others
from agentcache.engine.families.base import KeptLayer
from agentcache.engine.layer_kinds import layer_kinds
from agentcache.engine.sidecar_layers import parts_of, waiting_of
from agentcache.errors import UnsupportedModel
from agentcache.pools.layout import KVLayout, KVSpec, StateLayout, StateSpec
from agentcache.types import ModelShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.engine.admission import Admission
    from agentcache.engine.families import Family
    from agentcache.types import IntArray

__all__ = [
    "Description",
    "KeptLayer",
    "describe",
    "layouts",
    "remember",
    "sample_ids",
    "text_config",
]


@dataclass(frozen=True, slots=True)
class Description:
    """A model's family, sizes, and what each of its cache layers keeps.

    doubt: why the model is not proven, if only the flag admits it. sample: the logits of
    `sample_ids` by the model's own code, of a model in doubt without a cache, [T, vocab] float32;
    None where nothing had to be run.
    """

    family: Family
    shape: ModelShape
    kv: KVLayout
    state: StateLayout
    layers: tuple[KeptLayer, ...]
    doubt: str | None = None
    sample: torch.Tensor | None = None


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model."""
    return config.get_text_config(decoder=True)


def describe(model: Any, *, unproven: bool = False) -> Description:
    """Describe a model before or after the engine has taken it over.

    unproven: also one that is not proven. Raises UnsupportedModel.
    """
    admission = admit(text_config(model.config), unproven=unproven)
    known: Description | None = vars(model).get(_NAME)
    if known is None:
        model.eval()
        known = remember(model, _describe(model, admission))
    return known


def remember(model: Any, description: Description) -> Description:
    """Keep a description with its model, which cannot run as it was once it is taken over."""
    vars(model)[_NAME] = description
    return description


_NAME = "agentcache_description"
_SAMPLE_LEN = 16


def sample_ids(vocab_size: int) -> IntArray:
    """The few tokens a model is run on to see what it keeps."""
    return np.arange(_SAMPLE_LEN, dtype=np.int32) % np.int32(vocab_size)


def _describe(model: Any, admission: Admission) -> Description:
    config, family = text_config(model.config), admission.family
    sample = None
    with code_of_others(config.model_type, admission.doubt):
        if family.keeps is None:
            layers, sample = _seen(model, family)
        else:
            layers = family.keeps(model)
        if admission.doubt is not None and model.device.type != "meta":
            sample = _own_logits(model)  # built without memory it is only described
    if admission.doubt is not None:
        _check_kept(config.model_type, family, layers)
    kv, state = layouts(layers, model.dtype)
    shape = ModelShape(
        hidden_dim=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=layer_kinds(model, config, family.mixer, layers),
        max_len=getattr(config, "max_position_embeddings", None) or _ANY_LEN,
        kv_itemsize=model.dtype.itemsize,
        token_bytes=_token_bytes(kv),
        checkpoint_bytes=sum(spec.num_bytes for spec in state.specs) + _window_bytes(kv),
    )
    return Description(family, shape, kv, state, layers, admission.doubt, sample)


def layouts(layers: tuple[KeptLayer, ...], dtype: torch.dtype) -> tuple[KVLayout, StateLayout]:
    """How what all layers keep lies in memory; dtype: of KV."""
    kv = KVLayout(
        tuple(layer.kv for layer in layers if layer.kv is not None),
        dtype,
        tuple(dict.fromkeys(part.spec for layer in layers for part in layer.parts)),
    )
    return kv, StateLayout(tuple(spec for layer in layers for spec in layer.states))


_ANY_LEN = 2**31 - 1


def _token_bytes(kv: KVLayout) -> int:
    """Bytes that every token of a history leaves, whatever comes after it; what lies beside the
    pages included, where one entry for several tokens is shared out among them."""
    elements = sum(group.token_elements for group in kv.groups if group.window is None)
    beside = (-(-prod(s.shape) * s.dtype.itemsize // s.tokens) for s in kv.sidecars)
    return elements * kv.dtype.itemsize + sum(beside)


def _window_bytes(kv: KVLayout) -> int:
    """Bytes of the windows that one boundary needs."""
    return kv.dtype.itemsize * sum(
        group.window * group.token_elements for group in kv.groups if group.window is not None
    )


def _check_kept(model_type: str, family: Family, layers: tuple[KeptLayer, ...]) -> None:
    """Raise UnsupportedModel for an unproven model whose cache could not be kept at all."""
    if not any(layer.kv is not None or layer.states for layer in layers):
        raise UnsupportedModel(
            f"this {model_type} model cannot work: it hands nothing to the cache it is given, so "
            "no state of it can be kept; take a model whose code uses transformers' cache classes"
        )
    beside = {part.name for layer in layers for part in layer.parts}
    if beside and family.layer is None:
        raise UnsupportedModel(
            f"this {model_type} model cannot work: it keeps {', '.join(sorted(beside))} beside its "
            "KV, which needs a cache layer made for it; take another model"
        )


def _own_logits(model: Any) -> torch.Tensor:
    """The model's logits of the sample, [T, vocab] float32, without a cache."""
    with torch.inference_mode():
        out: torch.Tensor = model(input_ids=_sample(model), use_cache=False).logits
    return out[0].float()


def _sample(model: Any) -> torch.Tensor:
    ids = sample_ids(text_config(model.config).vocab_size)
    return torch.from_numpy(ids).long().to(model.device)[None]


def _seen(model: Any, family: Family) -> tuple[tuple[KeptLayer, ...], torch.Tensor]:
    """What a run of the model hands to a stock cache, and the logits, [T, vocab] float32."""
    config = text_config(model.config)
    cache = _Recording(config)
    with torch.inference_mode():
        logits = model(input_ids=_sample(model), cache=cache, use_cache=True).logits[0].float()
    cache.named = {place for place in cache.named if place[1] not in family.whole_convs}
    parts, fills = parts_of(cache.layers), family.fills(config)
    layers = (_kept(cache, i) for i in range(len(cache.layers)))
    kept = tuple(
        KeptLayer(
            layer.kv,
            tuple(replace(spec, fill=fills.get(spec.name, 0)) for spec in layer.states),
            parts.get(i, ()),
        )
        for i, layer in enumerate(layers)
    )
    return kept, logits


class _Recording(DynamicCache):
    """The stock cache, which also notes for which convolutions a kernel's width was named."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.named: set[tuple[int, int]] = set()

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        if kwargs.get("conv_kernel_size") is not None:
            self.named.add((layer_idx, state_idx))
        done: torch.Tensor = super().update_conv_state(
            conv_states, layer_idx, state_idx=state_idx, **kwargs
        )
        return done


def _kept(cache: _Recording, layer_idx: int) -> KeptLayer:
    layer: Any = cache.layers[layer_idx]
    kv = None
    if getattr(layer, "keys", None) is not None:
        _, num_heads, _, width = layer.keys.shape
        value_width = 0 if layer.values is layer.keys else layer.values.shape[-1]
        window = layer.sliding_window if layer.is_sliding else None
        kv = KVSpec(
            layer_idx, num_heads, width, None if value_width == width else value_width, window
        )
    states = list(waiting_of(layer_idx, layer))
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for idx in range(layer.number_of_states):
            states += _states(cache, layer_idx, idx)
    return KeptLayer(kv, tuple(states))


def _states(cache: _Recording, layer_idx: int, idx: int) -> Iterator[StateSpec]:
    layer: Any = cache.layers[layer_idx]
    suffix = str(idx) if idx else ""
    conv, recurrent = layer.conv_states[idx], layer.recurrent_states[idx]
    if conv is not None:
        # Of the inputs under a kernel of K taps the last K - 1 are needed for what follows.
        width = conv.shape[-1] - ((layer_idx, idx) in cache.named)
        yield StateSpec(layer_idx, f"conv{suffix}", (*conv.shape[1:-1], width), conv.dtype)
    if recurrent is not None:
        shape = tuple(recurrent.shape[1:])
        yield StateSpec(layer_idx, f"recurrent{suffix}", shape, recurrent.dtype)
