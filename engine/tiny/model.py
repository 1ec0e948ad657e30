"""The architecture of `tiny-agent`, and the weights that its training begins with."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

__all__ = ["agent_config", "new_agent"]

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
