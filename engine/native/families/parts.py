"""Parts that several families have under the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from agentcache.engine.native.attention import Attention
from agentcache.engine.native.layers import GatedMLP, GatedNorm, RMSNorm
from agentcache.engine.native.linear import Linear
from agentcache.engine.native.mamba2 import Mamba2
from agentcache.engine.native.model import NativeModel
from agentcache.engine.native.recurrence import Convolution
from agentcache.kernels.row_gates import gelu_tanh, relu_squared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from agentcache.engine.native.layers import Block
    from agentcache.engine.native.weights import Weights

__all__ = ["activation", "assembled", "attention", "gated_mlp", "mamba2", "norm"]


_COMPILED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu2": relu_squared,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
}
"""By functions for which there are compiled kernels."""


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """An activation by transformers' name."""
    known = _COMPILED.get(name)
    if known is None:
        from transformers.activations import ACT2FN  # brings transformers' modeling code

        known = ACT2FN[name]
    return known


def norm(weights: Weights, name: str, width: int, eps: float, offset: float = 0.0) -> RMSNorm:
    """An RMS norm by its name."""
    return RMSNorm(weights.at(name).get("weight", width), eps, offset=offset)


def attention(
    config: Any,
    weights: Weights,
    layer_idx: int,
    *,
    norms: float | None = None,
    out: str = "o_proj",
    **more: Any,
) -> Attention:
    """With `q_proj`, `k_proj`, `v_proj` and `o_proj`, or another name of the last.

    norms: of queries and keys head by head, if there are: what stands before their weights. more:
    what `Attention` takes besides.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {"q_proj": heads * width, "k_proj": kv_heads * width, "v_proj": kv_heads * width}
    if more.get("gated"):
        sizes["q_proj"] *= 2
    if norms is not None:
        for name in ("q_norm", "k_norm"):
            more[name] = norm(weights, name, width, config.rms_norm_eps, norms)
    return Attention(
        layer_idx=layer_idx,
        qkv=Linear.joined(weights, sizes, config.hidden_size),
        out=Linear.of(weights, out, config.hidden_size, heads * width),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        scale=more.pop("scale", width**-0.5),
        **more,
    )


def gated_mlp(weights: Weights, width: int, middle: int, act: str = "silu") -> GatedMLP:
    """With `gate_proj`, `up_proj` and `down_proj`."""
    up = Linear.joined(weights, {"gate_proj": middle, "up_proj": middle}, width)
    return GatedMLP(up, Linear.of(weights, "down_proj", width, middle), activation(act))


def mamba2(
    config: Any,
    weights: Weights,
    layer_idx: int,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_dim: int,
    norm: Callable[[Tensor], GatedNorm] | None,
    limits: tuple[float, float] = (0.0, float("inf")),
    taps: int = 4,
) -> Mamba2:
    """With `in_proj`, `conv1d`, `dt_bias`, `A_log`, `D`, `norm` and `out_proj`.

    norm: makes the gated norm of its weight; None where the output is only gated.
    """
    width = heads * head_dim
    channels = width + 2 * groups * state_dim
    return Mamba2(
        layer_idx=layer_idx,
        project=Linear.of(weights, "in_proj", width + channels + heads, config.hidden_size),
        conv=Convolution.of(weights.at("conv1d"), layer_idx, channels, taps, activation="silu"),
        dt_bias=weights.get("dt_bias", heads).float(),
        dt_limits=limits,
        A=-weights.get("A_log", heads).float().exp(),
        D=weights.get("D", heads).float(),
        norm=None if norm is None else norm(weights.at("norm").get("weight", width)),
        out=Linear.of(weights, "out_proj", config.hidden_size, width),
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_dim=state_dim,
    )


def assembled(
    config: Any,
    weights: Weights,
    blocks: Iterable[Block],
    eps: float,
    *,
    embedding: str = "embed_tokens",
    last_norm: str = "norm",
    offset: float = 0.0,
    **more: Any,
) -> NativeModel:
    """The whole model around its blocks: embedding, last norm and head, under `model.`.

    eps, offset: of the norm. more: what `NativeModel` takes besides.
    """
    model, width = weights.at("model"), config.hidden_size
    rows, head = _ends(weights, model.get(f"{embedding}.weight", config.vocab_size, width))
    return NativeModel(
        embedding=rows,
        blocks=tuple(blocks),
        norm=norm(model, last_norm, width, eps, offset),
        head=head,
        **more,
    )


def _ends(weights: Weights, embedding: Tensor) -> tuple[Linear, Linear]:
    """Embedding and head, one object where their weights are the same."""
    weight = weights.get("lm_head.weight", *embedding.shape)
    bias = weights.maybe("lm_head.bias", len(embedding))
    if weight.data_ptr() == embedding.data_ptr() or torch.equal(weight, embedding):
        both = Linear(embedding, bias, looked_up=True)
        return both, both
    return Linear(embedding, looked_up=True), Linear(weight, bias)
