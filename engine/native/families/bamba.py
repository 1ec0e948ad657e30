"""bamba: Mamba-2 and attention in turns, each before a gated MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentcache.engine.native.families.parts import assembled, attention, gated_mlp, mamba2, norm
from agentcache.engine.native.layers import Block, GatedNorm, Layer
from agentcache.engine.native.rope import Rope

if TYPE_CHECKING:
    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["bamba"]


def bamba(config: Any, weights: Weights) -> NativeModel:
    """By `BambaConfig`."""
    width, eps, model = config.hidden_size, config.rms_norm_eps, weights.at("model")
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    rope = Rope.of(config, head_dim)
    blocks = []
    for i, kind in enumerate(config.layers_block_type):
        layer = model.at("layers").at(i)
        mixer: Layer
        if kind == "full_attention":
            mixer = attention(config, layer.at("self_attn"), i, rope=rope)
        else:
            mixer = mamba2(
                config,
                layer.at("mamba"),
                i,
                heads=config.mamba_n_heads,
                head_dim=config.mamba_d_head,
                groups=config.mamba_n_groups,
                state_dim=config.mamba_d_state,
                norm=lambda weight: GatedNorm(weight, eps, groups=config.mamba_n_groups),
                taps=config.mamba_d_conv,
                limits=config.time_step_limit,
            )
        middle, act = config.intermediate_size, config.hidden_act
        mlp = gated_mlp(layer.at("feed_forward"), width, middle, act)
        blocks += [
            Block(norm(layer, "input_layernorm", width, eps), mixer),
            Block(norm(layer, "pre_ff_layernorm", width, eps), mlp),
        ]
    return assembled(
        config,
        weights,
        blocks,
        eps,
        last_norm="final_layernorm",
    )
