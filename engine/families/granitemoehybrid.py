"""granitemoehybrid (Granite 4 hybrids): Mamba-2 layers, a few attention layers, dense or MoE MLPs.

Traps: the stock one-token path changes states in place, so rows are private copies; recurrent
states stay float32 whatever the weights are.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)

from agentcache.engine.families.base import Family
from agentcache.engine.mixers.mamba2 import mamba2_forward
from agentcache.pools.layout import KVSpec, StateSpec
from agentcache.types import LayerKind, ModelShape

__all__ = ["GRANITE_MOE_HYBRID"]


def _is_state(kind: str) -> bool:
    return kind == "linear_attention"


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _layer(config: Any, kind: str) -> LayerKind:
    active = config.num_experts_per_tok if config.num_local_experts else 0
    mlp = config.shared_intermediate_size + active * config.intermediate_size
    if _is_state(kind):
        return LayerKind(
            mixer="mamba2",
            num_heads=config.mamba_n_heads,
            head_dim=config.mamba_d_head,
            state_dim=config.mamba_d_state,
            num_groups=config.mamba_n_groups,
            conv_width=config.mamba_d_conv,
            mlp_dim=mlp,
        )
    return LayerKind(
        mixer="attention",
        num_heads=config.num_attention_heads,
        head_dim=_head_dim(config),
        num_kv_heads=config.num_key_value_heads,
        mlp_dim=mlp,
    )


def _shape(config: Any, dtype: torch.dtype) -> ModelShape:
    return ModelShape(
        hidden_dim=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=tuple(_layer(config, kind) for kind in config.layers_block_type),
        max_len=config.max_position_embeddings,
        kv_itemsize=dtype.itemsize,
        state_itemsize=torch.float32.itemsize,
    )


def _kv_specs(config: Any) -> tuple[KVSpec, ...]:
    return tuple(
        KVSpec(i, config.num_key_value_heads, _head_dim(config))
        for i, kind in enumerate(config.layers_block_type)
        if not _is_state(kind)
    )


def _state_specs(config: Any, dtype: torch.dtype) -> tuple[StateSpec, ...]:
    inner = int(config.mamba_expand * config.hidden_size)
    conv_dim = inner + 2 * config.mamba_n_groups * config.mamba_d_state
    recurrent = (config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state)
    out: list[StateSpec] = []
    for i, kind in enumerate(config.layers_block_type):
        if _is_state(kind):
            out.append(StateSpec(i, "conv", (conv_dim, config.mamba_d_conv - 1), dtype))
            out.append(StateSpec(i, "recurrent", recurrent, torch.float32))
    return tuple(out)


def _install(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, GraniteMoeHybridMambaLayer):
            # On the instance alone: other models in the process keep the stock forward.
            vars(module)["forward"] = MethodType(mamba2_forward, module)


GRANITE_MOE_HYBRID = Family(
    model_type="granitemoehybrid",
    shape=_shape,
    kv_specs=_kv_specs,
    state_specs=_state_specs,
    install=_install,
)
