"""Mamba-1 mixers over our rows; the stock scan always begins at zeros, whatever came before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from agentcache.engine.mixers.replacing import replace_forward
from agentcache.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from agentcache.kernels.selective_scan import selective_scan, selective_state_update

if TYPE_CHECKING:
    from agentcache.engine.cache_layers import SlotStateLayer

__all__ = ["install_mamba1"]


def install_mamba1(model: nn.Module) -> None:
    """Replace the forward of a model's Mamba-1 mixers."""
    replace_forward(model, ("A_log", "ssm_state_size"), mamba1_forward)


def mamba1_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    cache: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Forward of transformers' Mamba-1 mixer modules, bound to an instance as its `forward`.

    hidden_states [B, T, hidden]; B > 1 only with T = 1. Uses the module's own weights and sizes;
    states live in `cache.layers[layer_idx]`.
    """
    mixer: Any = self
    layer: SlotStateLayer = cache.layers[mixer.layer_idx]
    projected = mixer.in_proj(hidden_states)
    x, gate = _in_turns(projected) if _has_heads(mixer) else projected.chunk(2, dim=-1)
    run = _step if hidden_states.shape[1] == 1 else _extend
    out: torch.Tensor = mixer.out_proj(run(mixer, layer, x, gate))
    return out


def _has_heads(mixer: Any) -> bool:
    """Whether projections are those of heads (zamba), each with weights of its own."""
    return hasattr(mixer, "n_mamba_heads")


def _in_turns(projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Channels and gates that stand in turns, [B, T, 2 * E], apart from each other."""
    x, gate = projected.unflatten(-1, (-1, 2)).unbind(-1)
    return x.contiguous(), gate


def _step(mixer: Any, layer: SlotStateLayer, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """One token for each of B sequences; states move on in place."""
    weight = mixer.conv1d.weight.squeeze(1)
    x = mixer.act(causal_conv1d_update(x[:, 0], layer.conv, weight, mixer.conv1d.bias))
    dt, b, c = _selected(mixer, x)
    state = layer.recurrent.view(len(x), -1, mixer.ssm_state_size)
    y = selective_state_update(state, x, dt, B=b, C=c, z=gate[:, 0], **_fixed(mixer))
    return y[:, None]


def _extend(mixer: Any, layer: SlotStateLayer, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Several tokens of one sequence, with the states at the planned positions set aside."""
    span = layer.context.spans[0]
    inside = [c for c in span.captures if c.length < span.stop]
    at = tuple(capture.length - span.start for capture in inside)
    weight = mixer.conv1d.weight.squeeze(1)
    conv = causal_conv1d(x, weight, mixer.conv1d.bias, layer.conv, state_positions=at)
    x = mixer.act(conv.y)
    dt, b, c = _selected(mixer, x)
    state = layer.recurrent
    scan = selective_scan(
        x,
        dt,
        B=b,
        C=c,
        z=gate,
        initial_state=state.view(1, -1, mixer.ssm_state_size),
        state_positions=at,
        **_fixed(mixer),
    )
    for capture, window, moved in zip(inside, conv.states, scan.states, strict=True):
        layer.capture("conv", capture.row, window[0])
        layer.capture("recurrent", capture.row, moved.view(state.shape)[0])
    layer.conv.copy_(conv.final_state)
    state.copy_(scan.final_state.view(state.shape))
    return scan.y


def _selected(mixer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the channels [..., E] choose of the recurrence: dt [..., E] before its bias and
    softplus, B and C [..., G, N]."""
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    if _has_heads(mixer):
        heads = x.unflatten(-1, (mixer.n_mamba_heads, -1))
        chosen = torch.einsum("...hp,hrp->...hr", heads, mixer.x_proj_weight)
        dt, b, c = chosen.split(sizes, dim=-1)
        return torch.einsum("...hr,hpr->...hp", dt, mixer.dt_proj_weight).flatten(-2), b, c
    dt, b, c = mixer.x_proj(x).split(sizes, dim=-1)
    dt, b, c = mixer.dt_layernorm(dt), mixer.b_layernorm(b), mixer.c_layernorm(c)
    return F.linear(dt, mixer.dt_proj.weight), b.unsqueeze(-2), c.unsqueeze(-2)


def _fixed(mixer: Any) -> dict[str, Any]:
    """What the recurrence has from the weights alone, per channel whatever heads there are."""
    bias = mixer.dt_proj_bias if _has_heads(mixer) else mixer.dt_proj.bias
    return {
        "A": -torch.exp(mixer.A_log.float()).view(-1, mixer.ssm_state_size),
        "D": mixer.D.flatten(),
        "dt_bias": bias.flatten(),
        "dt_softplus": True,
    }
