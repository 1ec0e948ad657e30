"""MiniMax's lightning attention over our rows: linear attention whose decay each head has fixed.

That is the recurrence of Mamba-2 with steps of one, where keys and queries stand for B and C.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from agentcache.kernels.ssd_scan import ssd_scan
from agentcache.kernels.state_update import state_update

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from agentcache.engine.cache_layers import SlotStateLayer

__all__ = ["install_lightning", "linear_layers"]


def install_lightning(model: nn.Module) -> None:
    """Replace the forward of a model's lightning attention, on the instances alone."""
    for _, module in linear_layers(model):
        vars(module)["forward"] = MethodType(lightning_forward, module)


def linear_layers(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Index and mixer of each layer with lightning attention."""
    module: Any
    for module in model.modules():
        if hasattr(module, "slope_rate"):
            yield module.layer_idx, module


def lightning_forward(
    self: nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: Any = None,
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Forward of transformers' lightning attention, bound to an instance as its `forward`.

    hidden_states [B, T, hidden]; B > 1 only with T = 1. Uses the module's own weights and sizes;
    states live in `cache.layers[layer_idx]`.
    """
    mixer: Any = self
    layer: SlotStateLayer = cache.layers[mixer.layer_idx]
    mixed = mixer.act_fn(mixer.qkv_proj(hidden_states))
    heads = mixed.unflatten(-1, (mixer.num_attention_heads, 3 * mixer.head_dim))
    query, key, value = heads.chunk(3, dim=-1)
    run = _step if hidden_states.shape[1] == 1 else _extend
    y = run(layer, query, key, value, -mixer.slope_rate.float().flatten())
    y = mixer.norm(y.flatten(2)) * mixer.output_gate(hidden_states).sigmoid()
    return mixer.out_proj(y), None


def _step(
    layer: SlotStateLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rate: torch.Tensor,
) -> torch.Tensor:
    """One token for each of B sequences, [B, 1, H, D]; states move on in place."""
    steps = rate.new_ones(len(query), len(rate))
    return state_update(layer.recurrent, value[:, 0], steps, rate, key[:, 0], query[:, 0])[:, None]


def _extend(
    layer: SlotStateLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rate: torch.Tensor,
) -> torch.Tensor:
    """Several tokens of one sequence, with the states at the planned positions set aside."""
    span = layer.context.spans[0]
    inside = [c for c in span.captures if c.length < span.stop]
    scan = ssd_scan(
        value,
        rate.new_ones(value.shape[:-1]),
        rate,
        key,
        query,
        initial_state=layer.recurrent,
        state_positions=[capture.length - span.start for capture in inside],
    )
    for capture, state in zip(inside, scan.states, strict=True):
        layer.capture("recurrent", capture.row, state[0])
    layer.recurrent.copy_(scan.final_state)
    return scan.y
