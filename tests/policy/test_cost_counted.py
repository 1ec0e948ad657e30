"""FLOPs against those that torch counts while tiny models of each kind run.

Torch counts products of matrices and convolutions. What is compared is `LayerFlops.products` with
the products of a model's weights, and `LayerFlops.pair` with what its attention multiplies besides.
The rest (convolution, recurrence, activations) depends on how a scan is written: the reference ones
multiply whole chunks. It is checked by hand in `test_cost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from agentcache.engine.describe import describe
from agentcache.engine.families.tiny import build
from agentcache.policy.cost import layer_flops, prefill_flops

if TYPE_CHECKING:
    from agentcache.types import ModelShape

NUM_TOKENS = 24


@dataclass(frozen=True)
class Counted:
    """FLOPs per token of the matrices of layers, of those of the head, and all of attention's own
    in one pass over `NUM_TOKENS` tokens, which multiplies what the mask then hides."""

    products: int
    head: int
    attention: int


def counted(model: Any) -> Counted:
    model.requires_grad_(False)
    model.set_experts_implementation("eager")  # torch does not count the grouped one
    ids = torch.arange(NUM_TOKENS)[None] + 5
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(input_ids=ids, use_cache=False)
    flops = {name: sum(by_op.values()) for name, by_op in counter.get_flop_counts().items()}
    root = type(model).__name__
    products = head = attention = 0
    for name, module in model.named_modules():
        own = flops.get(f"{root}.{name}", 0)
        children = sum(flops.get(f"{root}.{name}.{each}", 0) for each, _ in module.named_children())
        is_matrix = any(weight.dim() > 1 for weight in module.parameters(recurse=False))
        if hasattr(module, "A_log"):
            continue  # a scan's own products
        if name == "lm_head":
            head = own
        elif name.endswith("attn") and not hasattr(module, "conv1d"):
            attention += own - children
        elif is_matrix and not isinstance(module, nn.Conv1d):
            products += own - children
    return Counted(products // NUM_TOKENS, head // NUM_TOKENS, attention)


@cache
def described_and_counted(name: str) -> tuple[ModelShape, Counted]:
    model = build(name)
    return describe(model).shape, counted(model)


def products(shape: ModelShape) -> int:
    return sum(layer_flops(layer, shape.hidden_dim).products for layer in shape.layers)


@pytest.mark.parametrize(
    "name",
    [
        "granitemoehybrid",
        "granitemoehybrid_moe",
        "falcon_h1",
        "nemotron_h",  # experts and MLPs of two matrices, some layers with neither
        "mamba2",
        "qwen3_next",
        "olmo_hybrid",
        "kimi_linear",
        "bailing_hybrid",
        "lfm2_moe",
        "gemma3",
        "gpt_oss",
        "mimo_v2_flash",
        "llama",
    ],
)
def test_products_equal_the_counted_forward(name: str) -> None:
    shape, found = described_and_counted(name)
    assert products(shape) == found.products
    assert 2 * shape.hidden_dim * shape.vocab_size == found.head


@pytest.mark.parametrize("name", ["jamba", "falcon_mamba"])
def test_products_of_mamba1_equal_the_counted_forward_but_for_time_steps(name: str) -> None:
    """Those the stock code projects inside the mixer, where its scan's products are too."""
    shape, found = described_and_counted(name)
    time_steps = sum(
        2 * layer.num_heads * layer.gate_rank for layer in shape.layers if layer.mixer == "mamba1"
    )
    assert time_steps > 0
    assert products(shape) == found.products + time_steps


@pytest.mark.parametrize("name", ["zamba2", "inkling", "zaya", "gemma4", "minimax", "deepseek_v4"])
def test_products_of_unusual_layers_come_within_six_percent(name: str) -> None:
    """Adapters, routers of several layers, inputs per layer, and hyper-connections are left out."""
    shape, found = described_and_counted(name)
    assert products(shape) == pytest.approx(found.products, rel=0.06)


@pytest.mark.parametrize("name", ["granitemoehybrid", "qwen3_next", "kimi_linear", "mimo_v2_flash"])
def test_a_pair_equals_the_counted_attention_of_all_pairs(name: str) -> None:
    shape, found = described_and_counted(name)
    pair = sum(layer_flops(layer, shape.hidden_dim).pair for layer in shape.layers)
    assert pair * NUM_TOKENS**2 == found.attention


@pytest.mark.parametrize("name", ["gemma3", "gemma4_shared"])
def test_a_whole_pass_token_by_token_equals_the_counted_one(name: str) -> None:
    """Token by token no masked pair is multiplied, and windows of 4 tokens stay as long."""
    model = build(name, sliding_window=4)
    shape = describe(model).shape
    found = _counted_stepwise(model, num_tokens=7)
    inputs_per_layer = {"gemma4_shared": 2 * (64 * 48 + 6 * 2 * 64 * 8)}.get(name, 0)
    expected = prefill_flops(shape, 0, 7, with_head=7) + 7 * inputs_per_layer
    assert found == expected


def _counted_stepwise(model: Any, num_tokens: int) -> int:
    past = DynamicCache(config=model.config)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        for position in range(num_tokens):
            at = torch.tensor([[position]])
            model(input_ids=at + 5, position_ids=at, cache=past, use_cache=True)
    return counter.get_total_flops()


def test_latent_attention_with_experts_equals_the_counted_forward() -> None:
    config = DeepseekV3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        attn_implementation="eager",
    )
    model = DeepseekV3ForCausalLM(config).eval()
    shape = describe(model, unproven=True).shape
    found = counted(model)
    assert [(layer.mlp_dim, layer.router_dim) for layer in shape.layers] == [(96, 0), (96, 8)]
    assert shape.kv_bytes_per_token == 2 * (16 + 8) * 4
    assert products(shape) == found.products
    pair = sum(layer_flops(layer, 64).pair for layer in shape.layers)
    assert pair * NUM_TOKENS**2 == found.attention
