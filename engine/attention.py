"""Our attention function for transformers' attention interface: history is read where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentcache.kernels.paged_attention import segment_attention

if TYPE_CHECKING:
    from agentcache.engine.cache_layers import ForwardContext

__all__ = ["ATTENTION_NAME", "register_attention"]

ATTENTION_NAME = "agentcache"


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    agentcache: ForwardContext,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the new tokens over each span's history and themselves.

    query [B, Hq, T, D]; key, value [B, Hkv, T, D] of the new tokens; returns [B, T, Hq, D].
    """
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    keys, values = agentcache.pools.kv[layer_idx]
    out = [
        segment_attention(
            query[b],
            [(keys[at : at + num], values[at : at + num]) for at, num in runs],
            key[b],
            value[b],
            scale=scaling,
        )
        for b, runs in enumerate(agentcache.history)
    ]
    return torch.stack(out), None


def register_attention() -> str:
    """Make the function known to transformers; returns the name to set on a model."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)
    return ATTENTION_NAME
