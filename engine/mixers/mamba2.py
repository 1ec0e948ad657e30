"""Mamba-2 mixer over our rows: states handed out at any position of the pass, none recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from agentcache.engine.mixers.replacing import replace_forward
from agentcache.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from agentcache.kernels.ssd_scan import ssd_scan
from agentcache.kernels.state_update import state_update

if TYPE_CHECKING:
    from agentcache.engine.cache_layers import SlotStateLayer

__all__ = ["install_mamba2"]


def install_mamba2(model: nn.Module) -> None:
    """Replace the forward of a model's Mamba-2 mixers."""
    replace_forward(model, ("A_log", "ssm_state_size"), mamba2_forward)


def mamba2_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Forward of transformers' Mamba-2 mixer modules, bound to an instance as its `forward`.

    hidden_states [B, T, hidden]; B > 1 only with T = 1. Uses the module's own weights and sizes;
    states live in `cache.layers[layer_idx]`.
    """
    mixer: Any = self
    layer: SlotStateLayer = cache.layers[mixer.layer_idx]
    gate, mixed, dt = _project(mixer, hidden_states).split(
        [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1
    )
    low, high = mixer.time_step_limit
    dt = F.softplus(dt.float() + mixer.dt_bias.float()).clamp(low, high)
    if hidden_states.shape[1] == 1:
        y = _step(mixer, layer, mixed, dt)
    else:
        y = _extend(mixer, layer, mixed, dt)
    y = y.to(hidden_states.dtype)
    gates_in_norm = getattr(mixer, "mamba_rms_norm", True)
    y = mixer.norm(y, gate) if gates_in_norm else y * F.silu(gate)
    out: torch.Tensor = mixer.out_proj(y)
    return out


def _project(mixer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Gate, convolution channels and time steps together; falcon_h1 has factors on either side."""
    before = getattr(mixer, "ssm_in_multiplier", None)
    after = getattr(mixer, "mup_vector", None)
    projected: torch.Tensor = mixer.in_proj(
        hidden_states if before is None else hidden_states * before
    )
    return projected if after is None else projected * after


def _split(mixer: Any, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convolved channels [..., C] as x [..., H, P], B and C [..., G, N]."""
    width = mixer.n_groups * mixer.ssm_state_size
    x, b, c = torch.split(mixed, [mixer.intermediate_size, width, width], dim=-1)
    lead, groups = mixed.shape[:-1], (mixer.n_groups, mixer.ssm_state_size)
    heads = (mixer.num_heads, mixer.head_dim)
    return x.reshape(*lead, *heads), b.reshape(*lead, *groups), c.reshape(*lead, *groups)


def _step(mixer: Any, layer: SlotStateLayer, mixed: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    """One token for each of B sequences; states move on in place."""
    weight = mixer.conv1d.weight.squeeze(1)
    convolved = causal_conv1d_update(
        mixed[:, 0], layer.conv, weight, mixer.conv1d.bias, activation=mixer.activation
    )
    x, b, c = _split(mixer, convolved)
    a = -torch.exp(mixer.A_log.float())
    y = state_update(layer.recurrent, x, dt[:, 0], a, b, c, D=mixer.D)
    return y.flatten(1).unsqueeze(1)


def _extend(
    mixer: Any,
    layer: SlotStateLayer,
    mixed: torch.Tensor,
    dt: torch.Tensor,
) -> torch.Tensor:
    """Several tokens of one sequence, with the states at the planned positions set aside."""
    span = layer.context.spans[0]
    inside = [c for c in span.captures if c.length < span.stop]
    at = tuple(capture.length - span.start for capture in inside)
    weight = mixer.conv1d.weight.squeeze(1)
    conv = causal_conv1d(
        mixed,
        weight,
        mixer.conv1d.bias,
        layer.conv,
        activation=mixer.activation,
        state_positions=at,
    )
    x, b, c = _split(mixer, conv.y)
    scan = ssd_scan(
        x,
        dt,
        -torch.exp(mixer.A_log.float()),
        b,
        c,
        D=mixer.D,
        initial_state=layer.recurrent,
        state_positions=at,
    )
    for capture, window, state in zip(inside, conv.states, scan.states, strict=True):
        layer.capture("conv", capture.row, window[0])
        layer.capture("recurrent", capture.row, state[0])
    layer.conv.copy_(conv.final_state)
    layer.recurrent.copy_(scan.final_state)
    return scan.y.flatten(2)
