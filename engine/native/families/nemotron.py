"""nemotron_h: layers of one part each, Mamba-2, attention without positions, an MLP or experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentcache.engine.native.families.parts import activation, assembled, attention, mamba2, norm
from agentcache.engine.native.layers import Block, GatedNorm, Layer, PlainMLP
from agentcache.engine.native.linear import Linear, LinearStack
from agentcache.engine.native.moe import Experts, best_by_sigmoid

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["nemotron_h"]


def nemotron_h(config: Any, weights: Weights) -> NativeModel:
    """By `NemotronHConfig`."""
    width, eps, model = config.hidden_size, config.layer_norm_epsilon, weights.at("model")
    blocks = []
    for i, kind in enumerate(config.layers_block_type):
        layer = model.at("layers").at(i)
        part = _PARTS[kind](config, layer.at("mixer"), i)
        blocks.append(Block(norm(layer, "norm", width, eps), part))
    return assembled(
        config,
        weights,
        blocks,
        eps,
        embedding="embeddings",
        last_norm="norm_f",
    )


def _mamba(config: Any, weights: Weights, layer_idx: int) -> Layer:
    eps, groups = config.layer_norm_epsilon, config.n_groups
    return mamba2(
        config,
        weights,
        layer_idx,
        heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        groups=groups,
        state_dim=config.ssm_state_size,
        norm=lambda weight: GatedNorm(weight, eps, groups=groups),
        taps=config.conv_kernel,
        limits=(config.time_step_min, float("inf")),
    )


def _mlp(config: Any, weights: Weights, middle: int) -> PlainMLP:
    width, act = config.hidden_size, activation(config.mlp_hidden_act)
    up = Linear.of(weights, "up_proj", middle, width)
    return PlainMLP(up, Linear.of(weights, "down_proj", width, middle), act)


def _experts(config: Any, weights: Weights) -> Experts:
    """Experts without gates, in a narrower width where there is one, and a shared MLP."""
    width, latent = config.hidden_size, config.moe_latent_size
    num, middle = config.n_routed_experts, config.moe_intermediate_size
    gate, experts = weights.at("gate"), weights.at("experts")
    inner = latent or width
    return Experts(
        route=best_by_sigmoid(
            gate.get("weight", num, width).float(),
            config.num_experts_per_tok,
            bias=gate.get("e_score_correction_bias", num).float(),
            groups=(config.n_group, config.topk_group),
            normed=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        ),
        up=LinearStack(experts.get("up_proj", num, middle, inner)),
        down=LinearStack(experts.get("down_proj", num, inner, middle)),
        act=activation(config.mlp_hidden_act),
        gated=False,
        shared=_mlp(
            config, weights.at("shared_experts"), config.moe_shared_expert_intermediate_size
        ),
        enter=Linear.of(weights, "fc1_latent_proj", latent, width) if latent else None,
        leave=Linear.of(weights, "fc2_latent_proj", width, latent) if latent else None,
    )


_PARTS: dict[str, Callable[[Any, Weights, int], Layer]] = {
    "linear_attention": _mamba,
    "full_attention": attention,
    "mlp": lambda config, weights, _: _mlp(config, weights, config.intermediate_size),
    "moe": lambda config, weights, _: _experts(config, weights),
}
