"""Families whose stock code loses its state: their mixers are replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.families.base import Family, KeptLayer
from agentcache.engine.mixers.lightning import linear_layers
from agentcache.engine.mixers.rg_lru import recurrent_blocks
from agentcache.pools.layout import KVSpec, StateSpec

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

__all__ = ["FAMILIES"]


def _minimax_cache(layers: list[Any]) -> Cache:
    """The cache class that MiniMax asks for, with our layers in it."""
    # Not at the top: no other family has to wait for this module.
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    cache = MiniMaxCache()
    cache.layers = layers
    return cache


def _kept_by_minimax(model: Any) -> tuple[KeptLayer, ...]:
    """Full KV or a state [H, Dv, Dk]; the stock cache has states beside its layers."""
    config = model.config
    heads, width = config.num_attention_heads, model.model.layers[0].self_attn.head_dim
    linear = dict(linear_layers(model))

    def kept(layer_idx: int) -> KeptLayer:
        if layer_idx in linear:
            state = StateSpec(layer_idx, "recurrent", (heads, width, width), torch.float32)
            return KeptLayer(None, (state,))
        kv = KVSpec(layer_idx, config.num_key_value_heads, width, window=config.sliding_window)
        return KeptLayer(kv, ())

    return tuple(kept(i) for i in range(config.num_hidden_layers))


def _kept_by_recurrent_gemma(model: Any) -> tuple[KeptLayer, ...]:
    """A window of KV, or a convolution and a vector; the stock cache sees the KV alone."""
    config = model.config
    recurrent = dict(recurrent_blocks(model))

    def kept(layer_idx: int) -> KeptLayer:
        if layer_idx in recurrent:
            width = config.lru_width
            conv = StateSpec(layer_idx, "conv", (width, config.conv1d_width - 1), model.dtype)
            unit = StateSpec(layer_idx, "recurrent", (width,), torch.float32)
            return KeptLayer(None, (conv, unit))
        window, heads = config.attention_window_size, config.num_key_value_heads
        return KeptLayer(KVSpec(layer_idx, heads, config.head_dim, window=window), ())

    return tuple(kept(i) for i in range(config.num_hidden_layers))


FAMILIES = (
    Family(
        ("jamba", "zamba", "falcon_mamba"),
        mixer="mamba1",
        install="agentcache.engine.mixers.mamba1:install_mamba1",
        captures="mixer",
        traps=(
            "the stock scan begins at zeros, so only one token at a time continues a sequence",
            "freshly initialised, zamba hides that altogether and jamba nearly so",
            "zamba: heads with projections of their own; channels and gates stand in turns",
            "zamba: one attention module serves several layers",
        ),
    ),
    Family(
        ("minimax",),
        mixer="mamba2",  # to which its linear attention comes down
        install="agentcache.engine.mixers.lightning:install_lightning",
        captures="mixer",
        keeps=_kept_by_minimax,
        cache=_minimax_cache,
        traps=(
            "the model takes no cache but of its own class",
            "the stock code fails where the first layer is linear and several tokens go on",
            "stock states have the dtype of the weights; ours are float32",
        ),
    ),
    Family(
        ("recurrent_gemma",),
        mixer="mamba1",
        install="agentcache.engine.mixers.rg_lru:install_rg_lru",
        captures="mixer",
        keeps=_kept_by_recurrent_gemma,
        traps=(
            "the stock blocks keep their states on themselves, and forget the convolution's when "
            "several tokens go on",
            "position 0 resets the recurrence: positions have to be right",
            "only attention reaches the cache, and all of it is in windows",
        ),
    ),
)
