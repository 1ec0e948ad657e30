"""Attention alone: llama, qwen3, gemma3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentcache.engine.native.families.parts import assembled, attention, gated_mlp, norm
from agentcache.engine.native.layers import Block
from agentcache.engine.native.rope import Rope
from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["gemma3", "llama", "qwen3"]


def llama(config: Any, weights: Weights) -> NativeModel:
    """By `LlamaConfig`."""
    return _transformer(config, weights, norms=None)


def qwen3(config: Any, weights: Weights) -> NativeModel:
    """By `Qwen3Config`: queries and keys are normed head by head."""
    return _transformer(config, weights, norms=0.0)


def _transformer(config: Any, weights: Weights, *, norms: float | None) -> NativeModel:
    width, eps, model = config.hidden_size, config.rms_norm_eps, weights.at("model")
    rope = Rope.of(config, config.head_dim)
    blocks = []
    for i in range(config.num_hidden_layers):
        layer = model.at("layers").at(i)
        mixer = attention(config, layer.at("self_attn"), i, rope=rope, norms=norms)
        mlp = gated_mlp(layer.at("mlp"), width, config.intermediate_size, config.hidden_act)
        blocks += [
            Block(norm(layer, "input_layernorm", width, eps), mixer),
            Block(norm(layer, "post_attention_layernorm", width, eps), mlp),
        ]
    return assembled(config, weights, blocks, eps)


def gemma3(config: Any, weights: Weights) -> NativeModel:
    """By `Gemma3TextConfig`: windows and full layers in turns, norms on both sides of a part."""
    width, eps, model = config.hidden_size, config.rms_norm_eps, weights.at("model")
    ropes = {kind: Rope.of(config, config.head_dim, kind) for kind in set(config.layer_types)}
    blocks = []
    for i, kind in enumerate(config.layer_types):
        layer = model.at("layers").at(i)
        is_windowed = kind == "sliding_attention"
        mixer = attention(
            config,
            layer.at("self_attn"),
            i,
            rope=ropes[kind],
            norms=1.0,
            scale=config.query_pre_attn_scalar**-0.5,
            window=config.sliding_window if is_windowed else None,
            kind=Kind.SWA.value if is_windowed else Kind.FULL.value,
        )
        mlp = gated_mlp(layer.at("mlp"), width, config.intermediate_size, config.hidden_activation)
        for inner, before, after in (
            (mixer, "input_layernorm", "post_attention_layernorm"),
            (mlp, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ):
            norms = (norm(layer, name, width, eps, 1.0) for name in (before, after))
            blocks.append(Block(next(norms), inner, next(norms)))
    return assembled(
        config,
        weights,
        blocks,
        eps,
        offset=1.0,
        embedding_scale=width**0.5,
        soft_cap=config.final_logit_softcapping,
    )
