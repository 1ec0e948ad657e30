"""The architecture of `tiny-agent`, and a scan that trains it in a third less time."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import transformers.models.granitemoehybrid.modeling_granitemoehybrid as modeling
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["agent_config", "differentiable_scan", "new_agent", "swapped_scan"]

_HEAD_DIM = 32
_SHORTEST_MEMORY = 4.0
_LONGEST_MEMORY = 4096.0
# Of every embedding, whose other parts deviate by 0.02.
_COMMON_PART = 0.125


def agent_config() -> GraniteMoeHybridConfig:
    """2.7M parameters: six Mamba-2 layers, two attention layers, no positions but the states'."""
    width = 160
    return GraniteMoeHybridConfig(
        vocab_size=1536,
        hidden_size=width,
        num_hidden_layers=8,
        layer_types=[
            "full_attention" if layer in (2, 5) else "linear_attention" for layer in range(8)
        ],
        intermediate_size=2 * width,
        shared_intermediate_size=2 * width,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_attention_heads=5,
        num_key_value_heads=5,
        attention_multiplier=_HEAD_DIM**-0.5,
        position_embedding_type="nope",
        max_position_embeddings=32768,
        mamba_n_heads=2 * width // _HEAD_DIM,
        mamba_d_head=_HEAD_DIM,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_expand=2,
        mamba_d_conv=4,
        mamba_chunk_size=64,
        tie_word_embeddings=True,
        embedding_multiplier=8.0,
        logits_scaling=0.5,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=3,
    )


def new_agent(seed: int) -> GraniteMoeHybridForCausalLM:
    """Weights to begin with.

    The heads of a Mamba-2 layer forget after 4 to 4,096 tokens. All embeddings have a part in
    common, which holds the mixers' gates open: at first a gate is else noise that the present token
    multiplies all with that came before it, and learning to copy takes many times as long.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GraniteMoeHybridForCausalLM(agent_config())
    config: Any = model.config
    steps = torch.full((config.mamba_n_heads,), 0.03)
    memories = torch.logspace(
        math.log10(_SHORTEST_MEMORY), math.log10(_LONGEST_MEMORY), config.mamba_n_heads
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(-(memories * steps).log())
            elif name.endswith("dt_bias"):
                parameter.copy_(steps.expm1().log())
            elif name.endswith("embed_tokens.weight"):
                parameter[:, 0] = _COMMON_PART
            elif name.endswith("mamba.in_proj.weight"):
                gates = parameter[: config.mamba_n_heads * config.mamba_d_head]
                gates[:, 1:].mul_(0.5)
                gates[:, 0] = 1.0
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(3.0)
    return model


def differentiable_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    chunk_size: int = 32,
) -> Tensor:
    """Mamba-2's scan from a state of zeros, for one group, in whole-tensor operations.

    x: [batch, tokens, heads, head dim], dt: [batch, tokens, heads] before bias and softplus,
    A, D, dt_bias: [heads], B, C: [batch, tokens, 1, state size]. Returns the shape of x. The
    chunked form of Mamba-2 (arXiv:2405.21060, section 6).
    """
    batch, length, heads, head_dim = x.shape
    pad = -length % chunk_size
    chunks = (length + pad) // chunk_size
    dt = F.softplus(dt + dt_bias)

    def chunked(tokens: Tensor) -> Tensor:
        width = tokens.shape[2:]
        padding = (0, 0) * len(width) + (0, pad)
        return F.pad(tokens, padding).view(batch, chunks, chunk_size, *width)

    inputs = chunked(x * dt[..., None]).transpose(2, 3)
    keys, queries = chunked(B[:, :, 0]), chunked(C[:, :, 0])
    decay = chunked(dt * A).transpose(2, 3).cumsum(-1)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool).triu_(1)
    within = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -1e9).exp()
    scores = queries @ keys.transpose(-1, -2)
    y = (within * scores[:, :, None]) @ inputs

    written = inputs * (decay[..., -1:] - decay).exp()[..., None]
    written = written.transpose(-1, -2).reshape(batch, chunks, heads * head_dim, chunk_size) @ keys
    written = written.view(batch, chunks, heads, head_dim, -1)
    kept = decay[..., -1].exp()[..., None, None]
    state, states = torch.zeros_like(written[:, 0]), []
    for chunk in range(chunks):
        states.append(state)
        state = torch.addcmul(written[:, chunk], state, kept[:, chunk])
    carried = queries[:, :, None] @ torch.stack(states, 1).transpose(-1, -2)
    y = y + carried * decay.exp()[..., None]
    y = y.transpose(2, 3).reshape(batch, chunks * chunk_size, heads, head_dim)[:, :length]
    return y + D[:, None] * x


@contextmanager
def swapped_scan() -> Iterator[None]:
    """Have transformers' mixer call `differentiable_scan` while its model is trained."""

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **more: Any) -> Any:
        y = differentiable_scan(x, dt, A, B, C, D=more["D"], dt_bias=more["dt_bias"])
        return (y, None) if more.get("return_final_states") else y

    before = modeling.mamba2_chunk_scan
    modeling.mamba2_chunk_scan = scan
    try:
        yield
    finally:
        modeling.mamba2_chunk_scan = before
