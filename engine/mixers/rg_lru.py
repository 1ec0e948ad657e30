"""Recurrent blocks of RecurrentGemma over our rows; the stock ones keep their states themselves."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

from agentcache.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from agentcache.kernels.rg_lru import rg_lru

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from agentcache.engine.cache_layers import SlotStateLayer

__all__ = ["install_rg_lru", "recurrent_blocks"]


def install_rg_lru(model: nn.Module) -> None:
    """Replace the forward of a model's recurrent blocks, and the loop over tokens in their units,
    on the instances alone. What a stock pass has left on them is dropped."""
    for layer_idx, block in recurrent_blocks(model):
        forward = MethodType(rg_block_forward, block)
        unit: Any = block.rg_lru
        vars(block).update(forward=forward, layer_idx=layer_idx, conv1d_state=None)
        vars(unit).update(_rnn_scan=_scan, recurrent_states=None)


def recurrent_blocks(model: Any) -> Iterator[tuple[int, Any]]:
    """Index and block of each layer that has one."""
    for layer_idx, layer in enumerate(model.model.layers):
        if hasattr(layer.temporal_block, "rg_lru"):
            yield layer_idx, layer.temporal_block


def rg_block_forward(
    self: nn.Module,
    input_states: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    use_cache: bool = True,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Forward of transformers' recurrent block, bound to an instance as its `forward`.

    input_states [B, T, hidden]; B > 1 only with T = 1. Uses the module's own weights and gates;
    states live in `cache.layers[layer_idx]`.
    """
    block: Any = self
    layer: SlotStateLayer = cache.layers[block.layer_idx]
    branch = block.act_fn(block.linear_y(input_states))
    y = _run(block, layer, block.linear_x(input_states), position_ids)
    return block.linear_out(y * branch), None


def _run(
    block: Any, layer: SlotStateLayer, x: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor:
    """Convolution and unit over x [B, T, W]; states move on, those planned inside are set aside."""
    span, num_tokens = layer.context.spans[0], x.shape[1]
    inside = [c for c in span.captures if c.length < span.stop]
    at = [capture.length - span.start for capture in inside]
    weight, bias = block.conv_1d.weight.squeeze(1), block.conv_1d.bias
    if num_tokens == 1:
        x = causal_conv1d_update(x[:, 0], layer.conv, weight, bias)[:, None]
    else:
        conv = causal_conv1d(x, weight, bias, layer.conv, state_positions=at)
        x = conv.y
        for capture, window in zip(inside, conv.states, strict=True):
            layer.capture("conv", capture.row, window[0])
        layer.conv.copy_(conv.final_state)
    y, states = _unit(block.rg_lru, layer.recurrent, x, position_ids)
    for capture, position in zip(inside, at, strict=True):
        layer.capture("recurrent", capture.row, states[0, position - 1])
    layer.recurrent.copy_(states[:, -1])
    return y


def _unit(
    unit: Any, state: torch.Tensor, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, T, W] and the states after all tokens, of a unit that is left without any."""
    unit.recurrent_states = state
    try:
        y = unit(x, position_ids)
        states = unit.recurrent_states
    finally:
        unit.recurrent_states = None
    assert states.shape == x.shape, "the unit has scanned by another loop than ours"
    return y, states


def _scan(
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loop of a unit, which computes the gates and keeps what is returned second."""
    states = rg_lru(hidden_states, recurrent_gate * ~reset, recurrent_states)
    return states.to(hidden_states.dtype), states
