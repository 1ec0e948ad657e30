"""falcon_h1: Mamba-2 and attention beside each other in every layer, with many multipliers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentcache.engine.native.families.parts import (
    activation,
    assembled,
    attention,
    mamba2,
    norm,
)
from agentcache.engine.native.layers import Block, GatedMLP, GatedNorm, Parallel
from agentcache.engine.native.linear import Linear
from agentcache.engine.native.rope import Rope

if TYPE_CHECKING:
    from agentcache.engine.native.attention import Attention
    from agentcache.engine.native.mamba2 import Mamba2
    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["falcon_h1"]


def falcon_h1(config: Any, weights: Weights) -> NativeModel:
    """By `FalconH1Config`."""
    width, eps, model = config.hidden_size, config.rms_norm_eps, weights.at("model")
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    rope = Rope.of(config, head_dim)
    ssm_factors = (config.ssm_in_multiplier, config.ssm_out_multiplier)
    attention_factors = (config.attention_in_multiplier, config.attention_out_multiplier)
    blocks = []
    for i in range(config.num_hidden_layers):
        layer = model.at("layers").at(i)
        mixers = Parallel(
            (
                (_mamba(config, layer.at("mamba"), i), *ssm_factors),
                (_attention(config, layer.at("self_attn"), i, rope), *attention_factors),
            )
        )
        mlp = _mlp(config, layer.at("feed_forward"))
        blocks += [
            Block(norm(layer, "input_layernorm", width, eps), mixers),
            Block(
                norm(layer, "pre_ff_layernorm", width, eps), mlp, scale=config.mlp_multipliers[1]
            ),
        ]
    return assembled(
        config,
        weights,
        blocks,
        eps,
        last_norm="final_layernorm",
        embedding_scale=config.embedding_multiplier,
        logits_scale=config.lm_head_multiplier,
    )


def _mamba(config: Any, weights: Weights, layer_idx: int) -> Mamba2:
    """With a factor each on gate, x, B, C and time steps."""
    heads, head_dim, groups = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups
    gate_after = config.mamba_norm_before_gate
    mixer = mamba2(
        config,
        weights,
        layer_idx,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=config.mamba_d_state,
        norm=(
            lambda weight: GatedNorm(
                weight, config.rms_norm_eps, groups=groups, gate_after=gate_after
            )
        )
        if config.mamba_rms_norm
        else None,
        taps=config.mamba_d_conv,
        limits=config.time_step_limit,
    )
    width, states = heads * head_dim, groups * config.mamba_d_state
    sizes = (width, width, states, states, heads)
    factors = zip(sizes, config.ssm_multipliers, strict=True)
    return replace(mixer, project=mixer.project.scaled(*factors))


def _attention(config: Any, weights: Weights, layer_idx: int, rope: Rope) -> Attention:
    """With a factor on keys, those of the cache too."""
    mixer = attention(config, weights, layer_idx, rope=rope)
    queries, keys = (num * mixer.head_dim for num in (mixer.num_heads, mixer.num_kv_heads))
    qkv = mixer.qkv.scaled((queries, 1.0), (keys, config.key_multiplier), (keys, 1.0))
    return replace(mixer, qkv=qkv)


def _mlp(config: Any, weights: Weights) -> GatedMLP:
    """With a factor on gates."""
    width, middle = config.hidden_size, config.intermediate_size
    up = Linear.joined(weights, {"gate_proj": middle, "up_proj": middle}, width)
    up = up.scaled((middle, config.mlp_multipliers[0]), (middle, 1.0))
    down = Linear.of(weights, "down_proj", width, middle)
    return GatedMLP(up, down, activation(config.hidden_act))
