"""granitemoehybrid: Mamba-2 and attention in turns, dense or with experts, four multipliers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F

from agentcache.engine.native.families.parts import assembled, attention, mamba2, norm
from agentcache.engine.native.layers import Block, GatedMLP, GatedNorm, Layer
from agentcache.engine.native.linear import Linear, LinearStack
from agentcache.engine.native.moe import Experts, softmax_of_best
from agentcache.engine.native.rope import Rope

if TYPE_CHECKING:
    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["granite_hybrid"]


def granite_hybrid(config: Any, weights: Weights) -> NativeModel:
    """By `GraniteMoeHybridConfig`."""
    width, eps, model = config.hidden_size, config.rms_norm_eps, weights.at("model")
    head_dim = width // config.num_attention_heads
    has_positions = config.position_embedding_type == "rope"
    rope = Rope.of(config, head_dim) if has_positions else None
    blocks = []
    for i, kind in enumerate(config.layers_block_type):
        layer = model.at("layers").at(i)
        mixer: Layer
        if kind in ("mamba", "linear_attention"):
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
        else:
            scale = config.attention_multiplier
            mixer = attention(config, layer.at("self_attn"), i, rope=rope, scale=scale)
        scale = config.residual_multiplier
        blocks += [
            Block(norm(layer, "input_layernorm", width, eps), mixer, scale=scale),
            Block(
                norm(layer, "post_attention_layernorm", width, eps),
                _feed_forward(config, layer),
                scale=scale,
            ),
        ]
    return assembled(
        config,
        weights,
        blocks,
        eps,
        embedding_scale=config.embedding_multiplier,
        logits_scale=1 / config.logits_scaling,
    )


def _feed_forward(config: Any, layer: Weights) -> Layer:
    """The dense part, and experts beside it where there are."""
    width, middle = config.hidden_size, config.shared_intermediate_size
    part = layer.at("shared_mlp")
    dense = GatedMLP(
        Linear.of(part, "input_linear", 2 * middle, width),
        Linear.of(part, "output_linear", width, middle),
    )
    if not config.num_local_experts:
        return dense
    sparse, num, middle = (
        layer.at("block_sparse_moe"),
        config.num_local_experts,
        config.intermediate_size,
    )
    router = sparse.get("router.weight", num, width)
    return Experts(
        route=softmax_of_best(router, config.num_experts_per_tok),
        up=LinearStack(sparse.get("experts.gate_up_proj", num, 2 * middle, width)),
        down=LinearStack(sparse.get("experts.down_proj", num, width, middle)),
        act=F.silu,
        shared=dense,
    )
