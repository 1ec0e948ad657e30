"""Kimi Delta Attention over our rows: a gated delta rule in which each key channel decays alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.mixers.delta import HeadSizes, run_delta_rule
from agentcache.engine.mixers.replacing import replace_forward

if TYPE_CHECKING:
    from torch import nn

    from agentcache.engine.cache_layers import SlotStateLayer

__all__ = ["install_kda"]


def install_kda(model: nn.Module) -> None:
    """Replace the forward of a model's KDA mixers."""
    replace_forward(model, ("forget_gate", "conv1d"), kda_forward)


def kda_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Forward of transformers' KDA modules, bound to an instance as its `forward`.

    hidden_states [B, T, hidden]; B > 1 only with T = 1. Uses the module's own weights, sizes and
    forget gate; states live in `cache.layers[layer_idx]`.
    """
    mixer: Any = self
    layer: SlotStateLayer = cache.layers[mixer.layer_idx]
    x = hidden_states
    mixed = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], dim=-1)
    sizes = HeadSizes(mixer.num_heads, mixer.head_dim, mixer.head_dim)
    y = run_delta_rule(mixer, layer, mixed, sizes, mixer.forget_gate(x), mixer.b_proj(x).sigmoid())
    y = mixer.o_norm(y, _output_gate(mixer, x).view(y.shape))
    out: torch.Tensor = mixer.o_proj(y.flatten(2))
    return out


def _output_gate(mixer: Any, x: torch.Tensor) -> torch.Tensor:
    """[B, T, H * V]; kimi_linear's has a narrow middle."""
    gate: torch.Tensor = (
        mixer.g_proj(x) if hasattr(mixer, "g_proj") else mixer.g_b_proj(mixer.g_a_proj(x))
    )
    return gate
