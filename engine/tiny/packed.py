"""A forward pass for training: dialogues one behind the other in one row, none aware of another.

transformers' own pass wants every dialogue in a row of its own, padded to the longest, and spends
two thirds of its time in small operations. Here one row of always as many tokens holds them all, so
nothing is padded, and one compilation (`torch.compile`) fuses what is small. The model is
transformers' and so are its results, dialogue by dialogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["CHUNK", "Places", "hidden_of", "packed_scan"]

CHUNK = 32
"""Tokens of a scan's chunk; a packed row has a multiple of them."""
_NEVER = -1e9  # of a decay's logarithm


@dataclass(frozen=True, slots=True)
class Places:
    """Where each token of a packed row belongs.

    number: [tokens], of its dialogue, from 0 and rising. age: [tokens], how many of its dialogue
    stand before it. spans: start and end of each dialogue.
    """

    number: Tensor
    age: Tensor
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Places:
        """Of dialogues of these many tokens."""
        counts = torch.tensor(lengths)
        ends = counts.cumsum(0)
        number = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        age = torch.arange(len(number)) - (ends - counts)[number]
        spans = tuple(zip((ends - counts).tolist(), ends.tolist(), strict=True))
        return cls(number, age, spans)


def hidden_of(model: Any, ids: Tensor, places: Places, *, compiled: bool = False) -> Tensor:
    """What the model's head reads at each token. ids: [tokens], a multiple of `CHUNK`.

    Returns [tokens, width]. compiled: by `torch.compile`, which needs a C++ compiler, and a minute
    for every new number of tokens.
    """
    mamba, mlp = _compiled() if compiled else (_mamba_layer, _mlp)
    hidden = model.model.embed_tokens(ids) * model.config.embedding_multiplier
    for layer in model.model.layers:
        if layer.mamba is not None:
            hidden = mamba(layer, hidden, places.number, places.age)
        else:
            hidden = mlp(layer, hidden, _attention(layer.self_attn, _normed(layer, hidden), places))
    normed: Tensor = model.model.norm(hidden)
    return normed


@cache
def _compiled() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return torch.compile(_mamba_layer, dynamic=False), torch.compile(_mlp, dynamic=False)


def _normed(layer: Any, hidden: Tensor) -> Tensor:
    normed: Tensor = layer.input_layernorm(hidden)
    return normed


def _mamba_layer(layer: Any, hidden: Tensor, number: Tensor, age: Tensor) -> Tensor:
    return _mlp(layer, hidden, _mixer(layer.mamba, _normed(layer, hidden), number, age))


def _mlp(layer: Any, hidden: Tensor, mixed: Tensor) -> Tensor:
    """The second half of a layer. mixed: what its first half adds."""
    scale: float = layer.residual_multiplier
    hidden = hidden + mixed * scale
    gate, up = layer.shared_mlp.input_linear(layer.post_attention_layernorm(hidden)).chunk(2, -1)
    out: Tensor = layer.shared_mlp.output_linear(F.silu(gate) * up)
    return hidden + out * scale


def _attention(attention: Any, hidden: Tensor, places: Places) -> Tensor:
    """Causal, without positions, and within each dialogue."""

    def heads(projection: Any) -> Tensor:
        row: Tensor = projection(hidden)
        return row.view(len(hidden), -1, attention.head_dim).transpose(0, 1)

    q, k, v = (heads(part) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    seen = []
    for start, end in places.spans:
        one, two, three = (row[None, :, start:end] for row in (q, k, v))
        scale = attention.scaling
        seen.append(F.scaled_dot_product_attention(one, two, three, is_causal=True, scale=scale)[0])
    out: Tensor = attention.o_proj(torch.cat(seen, 1).transpose(0, 1).reshape(len(hidden), -1))
    return out


def _mixer(mixer: Any, hidden: Tensor, number: Tensor, age: Tensor) -> Tensor:
    """Mamba-2's mixer."""
    tokens, width, size = len(hidden), mixer.intermediate_size, mixer.ssm_state_size
    gate, mixed, dt = mixer.in_proj(hidden).split([width, mixer.conv_dim, mixer.num_heads], -1)
    mixed = F.silu(_convolution(mixed, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, age))
    x, B, C = mixed.split([width, size, size], -1)
    x = x.reshape(tokens, mixer.num_heads, mixer.head_dim)
    dt = F.softplus(dt + mixer.dt_bias)
    y = packed_scan(x, dt, -mixer.A_log.exp(), B, C, number) + mixer.D[:, None] * x
    y = y.reshape(tokens, width) * F.silu(gate)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + mixer.norm.variance_epsilon)
    out: Tensor = mixer.out_proj(mixer.norm.weight * y)
    return out


def _convolution(x: Tensor, weight: Tensor, bias: Tensor, age: Tensor) -> Tensor:
    """Causal, of each channel by itself. x: [tokens, channels], weight: [channels, taps]."""
    taps = weight.shape[1]
    y = x * weight[:, -1] + bias
    for back in range(1, taps):
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)]
        y = y + torch.where((age >= back)[:, None], earlier, 0.0) * weight[:, taps - 1 - back]
    return y


def packed_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, number: Tensor) -> Tensor:
    """Mamba-2's scan, from a state of zeros at the first token of every dialogue.

    x: [tokens, heads, head dim], dt: [tokens, heads] after bias and softplus, A: [heads],
    B, C: [tokens, state size], number: [tokens], the dialogue of each. Returns the shape of x. The
    chunked form of Mamba-2 (arXiv:2405.21060, section 6), in which nothing decays to another
    dialogue.
    """
    tokens, heads, head_dim = x.shape
    chunks = tokens // CHUNK
    inputs = (x * dt[..., None]).view(chunks, CHUNK, heads, head_dim).transpose(1, 2)
    keys, queries = B.reshape(chunks, CHUNK, -1), C.reshape(chunks, CHUNK, -1)
    decay = (dt * A).view(chunks, CHUNK, heads).transpose(1, 2).cumsum(-1)  # [chunks, heads, CHUNK]
    who = number.view(chunks, CHUNK)
    last = who[:, -1]

    seen = (who[:, :, None] == who[:, None, :]).tril()[:, None]
    within = torch.where(seen, decay[..., :, None] - decay[..., None, :], _NEVER).exp()
    y = (within * (queries @ keys.transpose(1, 2))[:, None]) @ inputs

    left = torch.where((who == last[:, None])[:, None], decay[..., -1:] - decay, _NEVER).exp()
    written = (inputs * left[..., None]).transpose(2, 3).reshape(chunks, heads * head_dim, CHUNK)
    written = (written @ keys).view(chunks, heads, -1).transpose(0, 1)
    total = decay[..., -1].cumsum(0).T  # [heads, chunks], from the row's beginning to a chunk's end
    before = F.pad(total, (1, -1))
    ours = (last.roll(1)[:, None] == last[None, :]).tril(-1)  # [chunk, earlier chunk]
    kept = torch.where(ours, before[:, :, None] - total[:, None, :], _NEVER).exp()
    states = (kept @ written).view(heads, chunks, head_dim, -1).transpose(0, 1)

    reach = torch.where((who == last.roll(1)[:, None])[:, None], decay, _NEVER).exp()
    y = y + (queries[:, None] @ states.transpose(2, 3)) * reach[..., None]
    return y.transpose(1, 2).reshape(tokens, heads, head_dim)
