"""A loaded Hymba model over our rows: meta tokens read once, states handed out at any position."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentcache.engine.hymba.model import HymbaForCausalLM
from agentcache.kernels.causal_conv1d import causal_conv1d_update
from agentcache.kernels.selective_scan import selective_state_update

if TYPE_CHECKING:
    from torch import nn

    from agentcache.engine.cache_layers import SlotStateLayer
    from agentcache.engine.hymba.mixer import Before, HymbaMixer

__all__ = ["install_hymba"]


def install_hymba(model: nn.Module) -> None:
    """Fix what the meta tokens leave behind and let the model's mixers keep their states in rows.

    From here on the weights must not change.
    """
    assert isinstance(model, HymbaForCausalLM)
    with torch.inference_mode():
        model.model.before = model.model.read_meta_tokens()
    for mixer in model.model.mixers:
        vars(mixer)["remember"] = MethodType(remember_in_rows, mixer)


def remember_in_rows(
    self: HymbaMixer, x: Tensor, gate: Tensor, before: Before, cache: Any
) -> Tensor:
    """`HymbaMixer.remember` with states in `cache.layers[layer_idx]`.

    x, gate [B, T, E]; B > 1 only with T = 1. At position 0 a row's content does not count: what the
    meta tokens left behind takes its place.
    """
    layer: SlotStateLayer = cache.layers[self.layer_idx]
    for b, span in enumerate(layer.context.spans):
        if span.start == 0:
            layer.conv[b] = before.conv
            layer.recurrent[b] = before.recurrent
    return (_step if x.shape[1] == 1 else _extend)(self, layer, x, gate)


def _step(mixer: HymbaMixer, layer: SlotStateLayer, x: Tensor, gate: Tensor) -> Tensor:
    """One token for each of B sequences; states move on in place."""
    weight = mixer.conv1d.weight.squeeze(1)
    x = causal_conv1d_update(x[:, 0], layer.conv, weight, mixer.conv1d.bias, activation="silu")
    dt, b, c = mixer.selected(x)
    y = selective_state_update(layer.recurrent, x, dt, B=b, C=c, z=gate[:, 0], **mixer.fixed())
    return y[:, None]


def _extend(mixer: HymbaMixer, layer: SlotStateLayer, x: Tensor, gate: Tensor) -> Tensor:
    """Several tokens of one sequence, with the states at the planned positions set aside."""
    span = layer.context.spans[0]
    inside = [capture for capture in span.captures if capture.length < span.stop]
    at = tuple(capture.length - span.start for capture in inside)
    conv, scan = mixer.scan(x, gate, layer.conv, layer.recurrent, at)
    for capture, window, state in zip(inside, conv.states, scan.states, strict=True):
        layer.capture("conv", capture.row, window[0])
        layer.capture("recurrent", capture.row, state[0])
    layer.conv.copy_(conv.final_state)
    layer.recurrent.copy_(scan.final_state)
    return scan.y
