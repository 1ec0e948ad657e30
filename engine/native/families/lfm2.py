"""lfm2, lfm2_moe: short convolutions and attention in turns, dense or with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentcache.engine.native.families.parts import assembled, attention, norm
from agentcache.engine.native.layers import Block, GatedMLP, Layer
from agentcache.engine.native.linear import Linear, LinearStack
from agentcache.engine.native.moe import Experts, best_by_sigmoid
from agentcache.engine.native.recurrence import Convolution
from agentcache.engine.native.rope import Rope
from agentcache.engine.native.short_conv import ShortConv

if TYPE_CHECKING:
    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["lfm2", "lfm2_moe"]


def lfm2(config: Any, weights: Weights) -> NativeModel:
    """By `Lfm2Config`: its intermediate size is adjusted if the config says so."""
    middle = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        middle = int(2 * middle / 3)
        if config.block_ffn_dim_multiplier is not None:
            unit = config.block_multiple_of
            middle = -(-int(config.block_ffn_dim_multiplier * middle) // unit) * unit
    return _model(config, weights, num_dense=config.num_hidden_layers, middle=middle)


def lfm2_moe(config: Any, weights: Weights) -> NativeModel:
    """By `Lfm2MoeConfig`: the first layers are dense, the others have experts."""
    num_dense, middle = config.num_dense_layers, config.intermediate_size
    return _model(config, weights, num_dense=num_dense, middle=middle)


def _model(config: Any, weights: Weights, *, num_dense: int, middle: int) -> NativeModel:
    width, eps, model = config.hidden_size, config.norm_eps, weights.at("model")
    head_dim = getattr(config, "head_dim", None) or width // config.num_attention_heads
    rope = Rope.of(config, head_dim)
    blocks = []
    for i, kind in enumerate(config.layer_types):
        layer = model.at("layers").at(i)
        mixer: Layer
        if kind == "conv":
            mixer = _short_conv(config, layer.at("conv"), i)
        else:
            part = layer.at("self_attn")
            q_norm, k_norm = (norm(part, f"{x}_layernorm", head_dim, eps) for x in "qk")
            mixer = attention(
                config, part, i, out="out_proj", rope=rope, q_norm=q_norm, k_norm=k_norm
            )
        part = layer.at("feed_forward")
        is_dense = i < num_dense
        feed_forward = _dense(part, width, middle) if is_dense else _experts(config, part)
        blocks += [
            Block(norm(layer, "operator_norm", width, eps), mixer),
            Block(norm(layer, "ffn_norm", width, eps), feed_forward),
        ]
    return assembled(
        config,
        weights,
        blocks,
        eps,
        last_norm="embedding_norm",
    )


def _short_conv(config: Any, weights: Weights, layer_idx: int) -> ShortConv:
    width = config.hidden_size
    return ShortConv(
        project=Linear.of(weights, "in_proj", 3 * width, width),
        conv=Convolution.of(weights.at("conv"), layer_idx, width, config.conv_L_cache),
        out=Linear.of(weights, "out_proj", width, width),
    )


def _dense(weights: Weights, width: int, middle: int) -> Layer:
    up = Linear.joined(weights, {"w1": middle, "w3": middle}, width)
    return GatedMLP(up, Linear.of(weights, "w2", width, middle))


def _experts(config: Any, weights: Weights) -> Layer:
    width, middle, num = config.hidden_size, config.moe_intermediate_size, config.num_experts
    return Experts(
        route=best_by_sigmoid(
            weights.get("gate.weight", num, width),
            config.num_experts_per_tok,
            bias=weights.get("expert_bias", num) if config.use_expert_bias else None,
            normed=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            least=1e-6,
        ),
        up=LinearStack(weights.get("experts.gate_up_proj", num, 2 * middle, width)),
        down=LinearStack(weights.get("experts.down_proj", num, width, middle)),
    )
