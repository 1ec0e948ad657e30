"""Hymba: attention and Mamba-1 heads in every layer, behind constant meta tokens."""

from __future__ import annotations

from typing import Any

import torch

from agentcache.engine.families.base import Family, KeptLayer
from agentcache.engine.hymba import HymbaConfig
from agentcache.pools.layout import KVSpec, StateSpec

__all__ = ["FAMILIES"]


def _keeps(model: Any) -> tuple[KeptLayer, ...]:
    """KV where a layer computes it, and the states of its Mamba heads."""
    layers = range(model.config.num_hidden_layers)
    return tuple(_layer(model.config, layer_idx, model.dtype) for layer_idx in layers)


def _layer(config: HymbaConfig, layer_idx: int, dtype: torch.dtype) -> KeptLayer:
    kv = None
    if config.producer_of(layer_idx) == layer_idx:
        kv = KVSpec(
            layer_idx,
            config.num_key_value_heads,
            config.head_dim,
            config.value_dim,
            config.window_of(layer_idx),
        )
    conv, recurrent = config.mamba_d_conv - 1, config.mamba_d_state
    return KeptLayer(
        kv,
        (
            StateSpec(layer_idx, "conv", (config.inner_size, conv), dtype),
            StateSpec(layer_idx, "recurrent", (config.inner_size, recurrent), torch.float32),
        ),
    )


FAMILIES = (
    Family(
        (HymbaConfig.model_type,),
        mixer="mamba1",
        install="agentcache.engine.hymba.takeover:install_hymba",
        captures="mixer",
        keeps=_keeps,
        refuses=lambda config: config.unsupported,
        traps=(
            "meta tokens are no part of the sequence: a state at position 0 is that after them",
            "windowed layers see the meta tokens too, whatever their window",
            "a window of 1024 is 1024 tokens before one's own",
            "the last layers of a group have no KV: they attend to that of the first",
            "values are wider than keys",
        ),
    ),
)
