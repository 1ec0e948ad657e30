"""kimi_linear: Kimi Delta Attention and latent attention in turns, dense layers, then experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.native.delta import DeltaRule
from agentcache.engine.native.families.parts import activation, assembled, gated_mlp, norm
from agentcache.engine.native.kda import KDA
from agentcache.engine.native.layers import Block, GatedNorm, Layer
from agentcache.engine.native.linear import Linear, LinearStack
from agentcache.engine.native.mla import LatentAttention, LowRank
from agentcache.engine.native.moe import Experts, best_by_sigmoid
from agentcache.engine.native.recurrence import Convolution

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["kimi_linear"]

_LATENT_EPS = 1e-6
"""Of the norms of narrow middles; the config's is that of all others."""


def kimi_linear(config: Any, weights: Weights) -> NativeModel:
    """By `KimiLinearConfig`. It has no positions but what the delta rule makes of their order."""
    width, eps, model = config.hidden_size, config.rms_norm_eps, weights.at("model")
    blocks = []
    for i, (kind, mlp_kind) in enumerate(
        zip(config.layer_types, config.mlp_layer_types, strict=True)
    ):
        layer = model.at("layers").at(i)
        make = _kda if kind == "linear_attention" else _latent_attention
        mlp = (
            _experts(config, layer.at("mlp"))
            if mlp_kind == "sparse"
            else gated_mlp(layer.at("mlp"), width, config.intermediate_size, config.hidden_act)
        )
        blocks += [
            Block(
                norm(layer, "input_layernorm", width, eps), make(config, layer.at("self_attn"), i)
            ),
            Block(norm(layer, "post_attention_layernorm", width, eps), mlp),
        ]
    return assembled(config, weights, blocks, eps)


def _kda(config: Any, weights: Weights, layer_idx: int) -> Layer:
    heads, head_dim = config.linear_num_heads, config.linear_head_dim
    width, taps = heads * head_dim, config.linear_conv_kernel_dim
    sizes = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), width),
        "b_proj": heads,
        "forget_gate.f_a_proj": head_dim,
        "g_a_proj": head_dim,
    }
    gate = weights.at("forget_gate")
    rule = DeltaRule(
        layer_idx=layer_idx,
        conv=Convolution.of(weights.at("conv1d"), layer_idx, 3 * width, taps),
        act=activation(config.hidden_act),
        num_key_heads=heads,
        key_dim=head_dim,
        num_heads=heads,
        value_dim=head_dim,
        A=-gate.get("A_log", 1, 1, heads, 1).flatten().float().exp(),
        dt_bias=gate.get("dt_bias", width).float().unflatten(0, (heads, head_dim)),
    )
    gated = weights.get("o_norm.weight", head_dim)
    return KDA(
        project=Linear.joined(weights, sizes, config.hidden_size),
        decay=Linear.of(gate, "f_b_proj", width, head_dim),
        gate=Linear.of(weights, "g_b_proj", width, head_dim),
        rule=rule,
        norm=GatedNorm(
            gated.repeat(heads),
            config.rms_norm_eps,
            groups=heads,
            gate_after=True,
            act=torch.sigmoid,
        ),
        out=Linear.of(weights, "o_proj", config.hidden_size, width),
    )


def _latent_attention(config: Any, weights: Weights, layer_idx: int) -> Layer:
    width, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    key_dim, shared_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
    both_dims = key_dim + config.v_head_dim
    expand = weights.get("kv_b_proj.weight", heads * both_dims, rank)
    return LatentAttention(
        layer_idx=layer_idx,
        queries=_queries(config, weights, heads * (key_dim + shared_dim)),
        compress=Linear.of(weights, "kv_a_proj_with_mqa", rank + shared_dim, width),
        norm=norm(weights, "kv_a_layernorm", rank, _LATENT_EPS),
        expand=expand.unflatten(0, (heads, both_dims)),
        out=Linear.of(weights, "o_proj", width, heads * config.v_head_dim),
        shared_dim=shared_dim,
        key_dim=key_dim,
    )


def _queries(config: Any, weights: Weights, out: int) -> Callable[[Tensor], Tensor]:
    width, rank = config.hidden_size, config.q_lora_rank
    if rank is None:
        return Linear.of(weights, "q_proj", out, width)
    return LowRank(
        Linear.of(weights, "q_a_proj", rank, width),
        norm(weights, "q_a_layernorm", rank, _LATENT_EPS),
        Linear.of(weights, "q_b_proj", out, rank),
    )


def _experts(config: Any, weights: Weights) -> Experts:
    width, num, middle = config.hidden_size, config.num_local_experts, config.moe_intermediate_size
    router = weights.at("gate")
    return Experts(
        route=best_by_sigmoid(
            router.get("weight", num, width).float(),
            config.num_experts_per_tok,
            bias=router.get("e_score_correction_bias", num).float(),
            normed=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            least=1e-20,
            groups=(config.n_group, config.topk_group),
        ),
        up=LinearStack(weights.get("experts.gate_up_proj", num, 2 * middle, width)),
        down=LinearStack(weights.get("experts.down_proj", num, width, middle)),
        act=activation(config.hidden_act),
        shared=gated_mlp(
            weights.at("shared_experts"),
            width,
            middle * config.n_shared_experts,
            config.hidden_act,
        ),
    )
