"""jamba: Mamba-1 and attention without positions in turns; MLPs, some of them with experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentcache.engine.native.families.parts import (
    activation,
    assembled,
    attention,
    gated_mlp,
    norm,
)
from agentcache.engine.native.layers import Block, Layer
from agentcache.engine.native.linear import Linear, LinearStack
from agentcache.engine.native.mamba1 import Mamba1
from agentcache.engine.native.moe import Experts, best_of_softmax
from agentcache.engine.native.recurrence import Convolution

if TYPE_CHECKING:
    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["jamba"]


def jamba(config: Any, weights: Weights) -> NativeModel:
    """By `JambaConfig`."""
    width, eps, model = config.hidden_size, config.rms_norm_eps, weights.at("model")
    blocks = []
    for i, kind in enumerate(config.layers_block_type):
        layer = model.at("layers").at(i)
        mixer: Layer
        if kind == "attention":
            mixer = attention(config, layer.at("self_attn"), i)
        else:
            mixer = _mamba(config, layer.at("mamba"), i)
        feed_forward = _feed_forward(config, layer.at("feed_forward"), config.layers_num_experts[i])
        blocks += [
            Block(norm(layer, "input_layernorm", width, eps), mixer),
            Block(norm(layer, "pre_ff_layernorm", width, eps), feed_forward),
        ]
    return assembled(
        config,
        weights,
        blocks,
        eps,
        last_norm="final_layernorm",
    )


def _mamba(config: Any, weights: Weights, layer_idx: int) -> Mamba1:
    width, rank, state_dim = config.hidden_size, config.mamba_dt_rank, config.mamba_d_state
    channels, eps = config.mamba_expand * width, config.rms_norm_eps
    dt_proj = weights.at("dt_proj")
    return Mamba1(
        layer_idx=layer_idx,
        project=Linear.of(weights, "in_proj", 2 * channels, width),
        conv=Convolution.of(
            weights.at("conv1d"), layer_idx, channels, config.mamba_d_conv, activation="silu"
        ),
        select=Linear.of(weights, "x_proj", rank + 2 * state_dim, channels),
        dt_norm=norm(weights, "dt_layernorm", rank, eps),
        b_norm=norm(weights, "b_layernorm", state_dim, eps),
        c_norm=norm(weights, "c_layernorm", state_dim, eps),
        dt_project=Linear(dt_proj.get("weight", channels, rank)),
        dt_bias=dt_proj.get("bias", channels).float(),
        A=-weights.get("A_log", channels, state_dim).float().exp(),
        D=weights.get("D", channels).float(),
        out=Linear.of(weights, "out_proj", width, channels),
    )


def _feed_forward(config: Any, weights: Weights, num: int) -> Layer:
    """An MLP, or so many of them as experts."""
    width, middle = config.hidden_size, config.intermediate_size
    if num <= 1:
        return gated_mlp(weights, width, middle, config.hidden_act)
    router = weights.at("router").get("weight", num, width)
    experts = weights.at("experts")
    return Experts(
        route=best_of_softmax(router, config.num_experts_per_tok),
        up=LinearStack(experts.get("gate_up_proj", num, 2 * middle, width)),
        down=LinearStack(experts.get("down_proj", num, width, middle)),
        act=activation(config.hidden_act),
    )
