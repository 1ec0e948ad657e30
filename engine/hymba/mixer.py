"""The heads of a Hymba layer: attention and Mamba, side by side on one projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentcache.kernels.causal_conv1d import ConvResult, causal_conv1d
from agentcache.kernels.selective_scan import SelectiveScanResult, selective_scan

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

    from agentcache.engine.hymba.config import HymbaConfig

__all__ = ["Before", "HymbaMixer", "HymbaRMSNorm", "Shared"]


@dataclass(frozen=True, slots=True)
class Before:
    """What one layer finds before the first token of any text.

    keys [M, Hkv, D], values [M, Hkv, Dv] of the M meta tokens; conv [E, K - 1], recurrent [E, N]
    the states after them.
    """

    keys: Tensor
    values: Tensor
    conv: Tensor
    recurrent: Tensor


@dataclass(frozen=True, slots=True)
class Shared:
    """What all layers of one pass share.

    turns: cosines and sines [B, 1, T, D / 2] each, or None without rotary positions. masks: by
    window, which keys [meta + text] a token sees, [1, 1, T, keys]; empty where attention knows by
    itself. kv: what layers have computed for later ones to share, by layer. kwargs: meant for
    attention.
    """

    cache: Cache | None
    turns: tuple[Tensor, Tensor] | None
    masks: dict[int | None, Tensor]
    kv: dict[int, tuple[Tensor, Tensor]]
    kwargs: dict[str, Any]


class HymbaRMSNorm(nn.Module):
    """Root mean square norm in float32, scaled by a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        scaled: Tensor = self.weight * normed.to(x.dtype)
        return scaled


class HymbaMixer(nn.Module):
    """The heads of one layer.

    Rows of `in_proj` are queries, keys, values, Mamba inputs and Mamba gates; a layer that attends
    to another's keys and values has none of its own.
    """

    def __init__(self, config: HymbaConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.producer = config.producer_of(layer_idx)
        self.window = config.window_of(layer_idx)
        self.is_causal = True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        inner, state, rank = config.inner_size, config.mamba_d_state, config.time_step_rank
        own_kv = [
            config.num_key_value_heads * config.head_dim,
            config.num_key_value_heads * config.value_dim,
        ]
        self.kv_sizes = own_kv if self.producer == layer_idx else [0, 0]
        self.sizes = [config.hidden_size, *self.kv_sizes, inner, inner]
        bias, eps = config.mamba_proj_bias, config.rms_norm_eps
        self.in_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=bias)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=bias)
        self.attention_norm = HymbaRMSNorm(inner, eps)
        self.scan_norm = HymbaRMSNorm(inner, eps)
        self.conv1d = nn.Conv1d(
            inner, inner, config.mamba_d_conv, groups=inner, bias=config.mamba_conv_bias
        )
        self.x_sizes = [rank, state, state]
        self.x_proj = nn.Linear(inner, sum(self.x_sizes), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.dt_layernorm = HymbaRMSNorm(rank, eps)
        self.b_layernorm = HymbaRMSNorm(state, eps)
        self.c_layernorm = HymbaRMSNorm(state, eps)
        self.A_log = nn.Parameter(torch.empty(inner, state))
        self.D = nn.Parameter(torch.ones(inner))

    def forward(self, hidden: Tensor, before: Before, shared: Shared) -> Tensor:
        q, k, v, x, gate = self.in_proj(hidden).split(self.sizes, dim=-1)
        attended = self.attend(q, k, v, before, shared)
        remembered = self.remember(x, gate, before, shared.cache)
        both = (self.attention_norm(attended) + self.scan_norm(remembered)) / 2
        out: Tensor = self.out_proj(both)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, before: Before, shared: Shared) -> Tensor:
        """Attention of the new tokens to meta tokens, history and themselves, [B, T, E]."""
        num_kv = self.config.num_key_value_heads
        q = _turn(_heads(q, self.config.num_attention_heads), shared.turns)
        if self.producer == self.layer_idx:
            k, v = _turn(_heads(k, num_kv), shared.turns), _heads(v, num_kv)
            if shared.cache is not None:
                k, v = shared.cache.update(k, v, self.layer_idx)
            shared.kv[self.layer_idx] = k, v
        k, v = shared.kv[self.producer]
        mask = shared.masks.get(self.window)
        kwargs = shared.kwargs
        if mask is None:  # history is read in place, and cannot be joined
            kwargs = {**kwargs, "prefix": (before.keys, before.values)}
        else:
            k, v = _join(before.keys, k), _join(before.values, v)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _eager_attention
        )
        out, _ = attention(self, q, k, v, mask, scaling=self.scaling, dropout=0.0, **kwargs)
        joined: Tensor = out.flatten(2)
        return joined

    def remember(self, x: Tensor, gate: Tensor, before: Before, cache: Cache | None) -> Tensor:
        """Outputs of the Mamba heads, [B, T, E], with states in a cache of transformers or none."""
        held: Any = None if cache is None else cache.layers[self.layer_idx]
        kernel = self.config.mamba_d_conv
        goes_on = held is not None and held.has_previous_state[0]
        if goes_on:
            conv, recurrent = held.conv_states[0][..., 1 - kernel :], held.recurrent_states[0]
        else:
            conv, recurrent = (t.expand(len(x), -1, -1) for t in (before.conv, before.recurrent))
        scan = self.scan(x, gate, conv, recurrent)[1]
        if cache is not None:
            new = x.transpose(1, 2)
            new = new if goes_on else torch.cat([conv, new], dim=-1)
            cache.update_conv_state(new, self.layer_idx, conv_kernel_size=kernel)
            cache.update_recurrent_state(scan.final_state, self.layer_idx)
        return scan.y

    def scan(
        self, x: Tensor, gate: Tensor, conv: Tensor, recurrent: Tensor, at: tuple[int, ...] = ()
    ) -> tuple[ConvResult, SelectiveScanResult]:
        """Convolution and recurrence over x, gate [B, T, E] from states [B, E, ...] on.

        at: counts of tokens after which both states are handed out.
        """
        convolved = causal_conv1d(
            x,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            conv,
            activation="silu",
            state_positions=at,
        )
        dt, b, c = self.selected(convolved.y)
        scanned = selective_scan(
            convolved.y,
            dt,
            B=b,
            C=c,
            z=gate,
            initial_state=recurrent,
            state_positions=at,
            **self.fixed(),
        )
        return convolved, scanned

    def selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What convolved channels [..., E] choose: dt [..., E] before bias and softplus, B and C
        [..., 1, N]."""
        dt, b, c = self.x_proj(x).split(self.x_sizes, dim=-1)
        dt = F.linear(self.dt_layernorm(dt), self.dt_proj.weight)
        return dt, self.b_layernorm(b).unsqueeze(-2), self.c_layernorm(c).unsqueeze(-2)

    def fixed(self) -> dict[str, Any]:
        """What the recurrence has from the weights alone."""
        return {
            "A": -torch.exp(self.A_log.float()),
            "D": self.D,
            "dt_bias": self.dt_proj.bias,
            "dt_softplus": True,
        }


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, heads * D] as [B, heads, T, D]."""
    heads: Tensor = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return heads


def _turn(x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotary positions: pairs are an element of the first half and its like in the second."""
    if turns is None:
        return x
    cos, sin = turns
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _join(meta: Tensor, text: Tensor) -> Tensor:
    """Keys or values of meta tokens [M, H, D] in front of those of texts [B, H, T, D]."""
    return torch.cat([meta.transpose(0, 1).expand(len(text), -1, -1, -1), text], dim=2)


def _eager_attention(
    module: HymbaMixer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as it is written down; mask [1, 1, T, keys] is true where a key is seen."""
    key, value = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).float().masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1).to(query.dtype) @ value).transpose(1, 2), None
