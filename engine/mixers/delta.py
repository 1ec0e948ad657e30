"""Gated DeltaNet mixers over our rows: states handed out at any position of the pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from agentcache.engine.mixers.replacing import replace_forward
from agentcache.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from agentcache.kernels.gated_delta import gated_delta, gated_delta_update

if TYPE_CHECKING:
    from torch import nn

    from agentcache.engine.cache_layers import SlotStateLayer

__all__ = ["HeadSizes", "install_delta", "run_delta_rule"]

_NORM_EPS = 1e-6


class HeadSizes(NamedTuple):
    """Heads of keys (and of queries), width of each, and width of a head of values."""

    num_key_heads: int
    key_dim: int
    value_dim: int


def install_delta(model: nn.Module) -> None:
    """Replace the forward of a model's Gated DeltaNet mixers."""
    replace_forward(model, ("A_log", "num_v_heads"), delta_forward)


def delta_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Forward of transformers' Gated DeltaNet modules, bound to an instance as its `forward`.

    hidden_states [B, T, hidden]; B > 1 only with T = 1. Uses the module's own weights and sizes;
    states live in `cache.layers[layer_idx]`.
    """
    mixer: Any = self
    layer: SlotStateLayer = cache.layers[mixer.layer_idx]
    mixed, gate, b, a = _project(mixer, hidden_states)
    beta = b.sigmoid()
    if getattr(mixer, "allow_neg_eigval", False):
        beta = beta * 2.0
    decay = -mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias.float())
    sizes = HeadSizes(mixer.num_k_heads, mixer.head_k_dim, mixer.head_v_dim)
    y = run_delta_rule(mixer, layer, mixed, sizes, decay, beta)
    gate = gate.reshape(-1, mixer.head_v_dim)
    norm, out_proj = (
        (mixer.norm, mixer.out_proj) if hasattr(mixer, "norm") else (mixer.o_norm, mixer.o_proj)
    )
    out: torch.Tensor = out_proj(norm(y.flatten(0, 2), gate).view(*y.shape[:2], -1))
    return out


def _project(mixer: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convolution channels (queries, keys, values) together, output gates, and what the strength
    and the decay of an update are made of, [B, T, H] each."""
    if hasattr(mixer, "in_proj_qkvz"):
        q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
            mixer.in_proj_qkvz(x), mixer.in_proj_ba(x)
        )
        return torch.cat([part.flatten(2) for part in (q, k, v)], dim=-1), z, b, a
    if hasattr(mixer, "in_proj_qkv"):
        return mixer.in_proj_qkv(x), mixer.in_proj_z(x), mixer.in_proj_b(x), mixer.in_proj_a(x)
    mixed = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], dim=-1)
    return mixed, mixer.g_proj(x), mixer.b_proj(x), mixer.a_proj(x)


def run_delta_rule(
    mixer: Any,
    layer: SlotStateLayer,
    mixed: torch.Tensor,
    sizes: HeadSizes,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Convolve channels [B, T, C] and apply the rule, with the states of `layer`; [B, T, H, V].

    decay [B, T, H] or [B, T, H, K] and beta [B, T, H] as in `gated_delta`.
    """
    run = _step if mixed.shape[1] == 1 else _extend
    # Some models keep the convolution in float32 beside weights of half the width.
    y = run(mixer, layer, mixed.to(mixer.conv1d.weight.dtype), sizes, decay, beta)
    return y.to(mixed.dtype)


def _split(
    mixer: Any, convolved: torch.Tensor, sizes: HeadSizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolved channels [..., C] as normalised queries and keys [..., G, K], float32, and values
    [..., H, V]."""
    width = sizes.num_key_heads * sizes.key_dim
    x = ACT2FN[mixer.activation](convolved)
    q, k, v = x.split([width, width, x.shape[-1] - 2 * width], dim=-1)
    q, k = (_normalised(part.float().unflatten(-1, sizes[:2])) for part in (q, k))
    return q * sizes.key_dim**-0.5, k, v.unflatten(-1, (-1, sizes.value_dim))


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) + _NORM_EPS)


def _step(
    mixer: Any,
    layer: SlotStateLayer,
    mixed: torch.Tensor,
    sizes: HeadSizes,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """One token for each of B sequences; states move on in place."""
    weight = mixer.conv1d.weight.squeeze(1)
    convolved = causal_conv1d_update(mixed[:, 0], layer.conv, weight, mixer.conv1d.bias)
    q, k, v = _split(mixer, convolved, sizes)
    return gated_delta_update(layer.recurrent, q, k, v, decay[:, 0], beta[:, 0]).unsqueeze(1)


def _extend(
    mixer: Any,
    layer: SlotStateLayer,
    mixed: torch.Tensor,
    sizes: HeadSizes,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Several tokens of one sequence, with the states at the planned positions set aside."""
    span = layer.context.spans[0]
    inside = [c for c in span.captures if c.length < span.stop]
    at = tuple(capture.length - span.start for capture in inside)
    weight = mixer.conv1d.weight.squeeze(1)
    conv = causal_conv1d(mixed, weight, mixer.conv1d.bias, layer.conv, state_positions=at)
    q, k, v = _split(mixer, conv.y, sizes)
    scan = gated_delta(q, k, v, decay, beta, initial_state=layer.recurrent, state_positions=at)
    for capture, window, state in zip(inside, conv.states, scan.states, strict=True):
        layer.capture("conv", capture.row, window[0])
        layer.capture("recurrent", capture.row, state[0])
    layer.conv.copy_(conv.final_state)
    layer.recurrent.copy_(scan.final_state)
    return scan.y
