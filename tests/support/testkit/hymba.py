"""A tiny Hymba, and what it computes, written down plainly: one token after the other, no cache."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agentcache.engine.hymba import HymbaConfig
from agentcache.engine.hymba.model import HymbaForCausalLM

__all__ = ["SETTINGS", "hymba_reference", "tiny_hymba"]

SETTINGS: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 16,
    "global_attn_idx": [0, 3],
    "kv_reuse_group": [[1, 2]],
    "num_memory_tokens": 8,
    "max_position_embeddings": 4096,
    "orig_max_position_embeddings": 1024,
    "rope_type": "ntk",
}


@torch.no_grad()
def tiny_hymba(seed: int = 0, **changes: Any) -> HymbaForCausalLM:
    """Random weights as strong as their inputs; states forget after 8 to 16K tokens."""
    model = HymbaForCausalLM(HymbaConfig(**{**SETTINGS, **changes}))
    rng = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            rates = 2 / (8 * 2048 ** torch.linspace(0, 1, len(weight)))
            weight.copy_(rates.log()[:, None] + torch.rand(weight.shape, generator=rng))
        elif weight.dim() == 1:
            mean = 0.0 if name.endswith("bias") else 1.0
            weight.normal_(mean, 0.2, generator=rng)
        else:
            scale = 1.0 if "tokens" in name else weight[0].numel() ** -0.5
            weight.normal_(0, scale, generator=rng)
    return model.eval()


@torch.no_grad()
def hymba_reference(model: HymbaForCausalLM, ids: list[int]) -> Tensor:
    """Logits [T, vocab] of one sequence, in float64 from the model's config and weights alone."""
    config: Any = model.config
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    meta = weights.get("model.meta_tokens", torch.empty(0, config.hidden_size))
    hidden = torch.cat([meta.double(), weights["model.embed_tokens.weight"][ids]])
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for i in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"model.layers.{i}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        mixed = _mix(config, i, layer, _norm(hidden, layer["input_layernorm.weight"]), kept)
        hidden = hidden + mixed
        hidden = hidden + _mlp(layer, _norm(hidden, layer["post_mixer_layernorm.weight"]))
    hidden = _norm(hidden[len(meta) :], weights["model.norm.weight"])
    return hidden @ weights["lm_head.weight"].T


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _mlp(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    up = x @ layer["mlp.up_proj.weight"].T
    if "mlp.gate_proj.weight" in layer:
        up = F.silu(x @ layer["mlp.gate_proj.weight"].T) * up
    else:
        up = up.clamp(min=0) ** 2
    return up @ layer["mlp.down_proj.weight"].T


def _mix(
    config: Any,
    layer_idx: int,
    layer: dict[str, Tensor],
    x: Tensor,
    kept: dict[int, tuple[Tensor, Tensor]],
) -> Tensor:
    w = {name.removeprefix("mixer."): weight for name, weight in layer.items()}
    hidden, inner = config.hidden_size, config.mamba_expand * config.hidden_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    group = next((g for g in config.kv_reuse_group or [] if layer_idx in g), [layer_idx])
    kv = [hidden // heads * kv_heads, inner // heads * kv_heads]
    if group[0] != layer_idx:
        kv = [0, 0]
    projected = x @ w["in_proj.weight"].T
    q, k, v, mamba, gate = projected.split([hidden, *kv, inner, inner], dim=-1)
    q = _rotate(config, q.unflatten(-1, (heads, -1)))
    if group[0] == layer_idx:
        kept[layer_idx] = (
            _rotate(config, k.unflatten(-1, (kv_heads, -1))),
            v.unflatten(-1, (kv_heads, -1)),
        )
    windowed = config.sliding_window is not None and layer_idx not in config.global_attn_idx
    attended = _attend(
        q, *kept[group[0]], config.num_memory_tokens, config.sliding_window if windowed else None
    )
    scanned = _scan(config, w, mamba, gate)
    both = _norm(attended, w["attention_norm.weight"]) + _norm(scanned, w["scan_norm.weight"])
    return both / 2 @ w["out_proj.weight"].T


def _rotate(config: Any, x: Tensor) -> Tensor:
    """[T, heads, D] at positions 0 to T - 1, meta tokens first."""
    if not config.rope:
        return x
    width = x.shape[-1]
    base = config.rope_theta
    if config.rope_type == "ntk":
        grown = config.max_position_embeddings / config.orig_max_position_embeddings
        base = base * (2 * grown - 1) ** (width / (width - 2))
    out = torch.empty_like(x)
    for t in range(len(x)):
        for pair in range(width // 2):
            angle = t * base ** (-2 * pair / width)
            a, b = x[t, :, pair], x[t, :, pair + width // 2]
            out[t, :, pair] = a * math.cos(angle) - b * math.sin(angle)
            out[t, :, pair + width // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, num_meta: int, window: int | None) -> Tensor:
    """Each token by itself: meta tokens, and text back to `window` tokens before its own."""
    out = []
    for t in range(len(q)):
        first = num_meta if window is None else max(num_meta, t - window)
        seen = [*range(min(num_meta, t + 1)), *range(first, t + 1)]
        heads = []
        for head in range(q.shape[1]):
            kv_head = head * k.shape[1] // q.shape[1]
            scores = k[seen, kv_head] @ q[t, head] / math.sqrt(q.shape[-1])
            heads.append(scores.softmax(0) @ v[seen, kv_head])
        out.append(torch.cat(heads))
    return torch.stack(out)


def _scan(config: Any, w: dict[str, Tensor], x: Tensor, gate: Tensor) -> Tensor:
    """Convolution and recurrence, token by token from nothing on."""
    taps = w["conv1d.weight"][:, 0]
    width, rank, states = taps.shape[1], w["dt_proj.weight"].shape[1], config.mamba_d_state
    padded = torch.cat([x.new_zeros(width - 1, x.shape[1]), x])
    h = x.new_zeros(x.shape[1], states)
    out = []
    for t in range(len(x)):
        u = F.silu((padded[t : t + width].T * taps).sum(-1) + w["conv1d.bias"])
        dt, b, c = (w["x_proj.weight"] @ u).split([rank, states, states])
        dt = w["dt_proj.weight"] @ _norm(dt, w["dt_layernorm.weight"]) + w["dt_proj.bias"]
        dt = torch.log1p(dt.exp())
        b, c = _norm(b, w["b_layernorm.weight"]), _norm(c, w["c_layernorm.weight"])
        h = torch.exp(-dt[:, None] * w["A_log"].exp()) * h + (dt * u)[:, None] * b
        out.append((h @ c + w["D"] * u) * F.silu(gate[t]))
    return torch.stack(out)
