"""qwen3_next, qwen3_5, qwen3_5_moe: the gated delta rule and gated attention in turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.native.delta import DeltaRule, GatedDelta
from agentcache.engine.native.families.parts import (
    activation,
    assembled,
    attention,
    gated_mlp,
    norm,
)
from agentcache.engine.native.layers import Block, GatedNorm, Layer
from agentcache.engine.native.linear import Linear, LinearStack
from agentcache.engine.native.moe import Experts, Opened, best_of_softmax, softmax_of_best
from agentcache.engine.native.recurrence import Convolution
from agentcache.engine.native.rope import Rope

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["qwen3_5", "qwen3_5_moe", "qwen3_next"]


def qwen3_next(config: Any, weights: Weights) -> NativeModel:
    """By `Qwen3NextConfig`."""
    step = config.decoder_sparse_step
    sparse = set(range(step - 1, config.num_hidden_layers, step)) if config.num_experts else set()
    sparse -= set(config.mlp_only_layers)
    return _model(config, weights, _by_group, sparse, normed=config.norm_topk_prob)


def qwen3_5(config: Any, weights: Weights) -> NativeModel:
    """By `Qwen3_5TextConfig`; its three axes of positions are one and the same for text."""
    return _model(config, weights, _one_by_one, ())


def qwen3_5_moe(config: Any, weights: Weights) -> NativeModel:
    """By `Qwen3_5MoeTextConfig`."""
    return _model(config, weights, _one_by_one, range(config.num_hidden_layers))


def _model(
    config: Any,
    weights: Weights,
    project: Callable[[Any, Weights], Linear],
    sparse: Container[int],
    *,
    normed: bool = True,
) -> NativeModel:
    """project: the in-projection of the delta rule. sparse: layers with experts; normed: their
    weights add up to one."""
    width, eps, model = config.hidden_size, config.rms_norm_eps, weights.at("model")
    rope = Rope.of(config, config.head_dim)
    blocks = []
    for i, kind in enumerate(config.layer_types):
        layer = model.at("layers").at(i)
        mixer: Layer
        if kind == "linear_attention":
            mixer = _delta(config, layer.at("linear_attn"), i, project)
        else:
            mixer = attention(config, layer.at("self_attn"), i, rope=rope, norms=1.0, gated=True)
        part, act = layer.at("mlp"), config.hidden_act
        mlp = (
            _experts(config, part, normed)
            if i in sparse
            else gated_mlp(part, width, config.intermediate_size, act)
        )
        blocks += [
            Block(norm(layer, "input_layernorm", width, eps, 1.0), mixer),
            Block(norm(layer, "post_attention_layernorm", width, eps, 1.0), mlp),
        ]
    return assembled(
        config,
        weights,
        blocks,
        eps,
        offset=1.0,
    )


def _delta(
    config: Any, weights: Weights, layer_idx: int, project: Callable[[Any, Weights], Linear]
) -> GatedDelta:
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    channels, taps = 2 * keys * key_dim + heads * value_dim, config.linear_conv_kernel_dim
    rule = DeltaRule(
        layer_idx=layer_idx,
        conv=Convolution.of(weights.at("conv1d"), layer_idx, channels, taps),
        act=activation(config.hidden_act),
        num_key_heads=keys,
        key_dim=key_dim,
        num_heads=heads,
        value_dim=value_dim,
        A=-weights.get("A_log", heads).float().exp(),
        dt_bias=weights.get("dt_bias", heads).float(),
    )
    gated = weights.at("norm").get("weight", value_dim)
    return GatedDelta(
        project=project(config, weights),
        rule=rule,
        norm=GatedNorm(gated.repeat(heads), config.rms_norm_eps, groups=heads, gate_after=True),
        out=Linear.of(weights, "out_proj", config.hidden_size, heads * value_dim),
    )


def _one_by_one(config: Any, weights: Weights) -> Linear:
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    sizes = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    named = {f"in_proj_{name}": size for name, size in sizes.items()}
    return Linear.joined(weights, named, config.hidden_size)


def _by_group(config: Any, weights: Weights) -> Linear:
    """In the checkpoint each head of keys has its own queries, keys, values and gates together, and
    so have strengths and decays."""
    width, groups = config.hidden_size, config.linear_num_key_heads
    heads, keys = config.linear_num_value_heads // groups, config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    parts: list[torch.Tensor] = []
    for name, sizes in (("qkvz", [keys, keys, values, values]), ("ba", [heads, heads])):
        weight = weights.at(f"in_proj_{name}").get("weight", groups * sum(sizes), width)
        parts += weight.unflatten(0, (groups, -1)).split(sizes, 1)
    return Linear(torch.cat([part.flatten(0, 1) for part in parts]))


def _experts(config: Any, weights: Weights, normed: bool) -> Experts:
    width, num, middle = config.hidden_size, config.num_experts, config.moe_intermediate_size
    route = softmax_of_best if normed else best_of_softmax
    shared = gated_mlp(
        weights.at("shared_expert"),
        width,
        config.shared_expert_intermediate_size,
        config.hidden_act,
    )
    return Experts(
        route=route(weights.get("gate.weight", num, width), config.num_experts_per_tok),
        up=LinearStack(weights.get("experts.gate_up_proj", num, 2 * middle, width)),
        down=LinearStack(weights.get("experts.down_proj", num, width, middle)),
        act=activation(config.hidden_act),
        shared=Opened(shared, Linear.of(weights, "shared_expert_gate", 1, width)),
    )
