"""FLOPs and bytes against hand-worked numbers, the published formulas and a counted forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from agentcache.policy.cost import (
    attention_flops,
    checkpoint_bytes,
    kv_bytes,
    mamba2_flops,
    mlp_flops,
    prefill_flops,
)
from agentcache.types import LayerKind, ModelShape

ATTENTION = LayerKind("attention", num_heads=4, head_dim=8, num_kv_heads=2, mlp_dim=48)
MAMBA = LayerKind(
    "mamba2", num_heads=4, head_dim=16, state_dim=8, num_groups=1, conv_width=4, mlp_dim=48
)
SHAPE = ModelShape(
    hidden_dim=32, vocab_size=96, layers=(MAMBA, ATTENTION, MAMBA, ATTENTION), max_len=512
)


def published_shape(
    *, num_state: int = 0, num_attention: int = 0, state_dim: int = 128
) -> ModelShape:
    """Layers as the article counts their bytes: width 4096, fp16, no convolution state."""
    state = LayerKind("mamba2", num_heads=64, head_dim=64, state_dim=state_dim, conv_width=1)
    attention = LayerKind("attention", num_heads=32, head_dim=128, num_kv_heads=32)
    return ModelShape(
        hidden_dim=4096,
        vocab_size=1,
        layers=(state,) * num_state + (attention,) * num_attention,
        max_len=1 << 20,
        kv_itemsize=2,
        state_itemsize=2,
    )


def test_attention_counts_projections_and_every_visible_pair() -> None:
    layer = LayerKind("attention", num_heads=2, head_dim=3, num_kv_heads=1)
    # width 5: q 5x6, k and v 5x3 each, output 6x5 = 90 multiply-adds a token
    # tokens 2 and 3 see 3 and 4 keys: 7 pairs, 6 multiply-adds each for scores, again for values
    assert attention_flops(layer, 5, 2, 4) == 2 * 90 * 2 + 2 * (6 + 6) * 7


def test_mamba2_counts_projections_convolution_and_recurrence() -> None:
    layer = LayerKind("mamba2", num_heads=2, head_dim=3, state_dim=4, num_groups=1, conv_width=2)
    # width 5, inner 6, conv channels 6 + 2*4 = 14, in-projection 6 + 14 + 2 = 22 columns
    per_token = 2 * 5 * 22 + 2 * 6 * 5 + 2 * 2 * 14 + 6 * 6 * 4 + 5 * 6
    assert mamba2_flops(layer, 5, 1) == per_token == 510
    assert mamba2_flops(layer, 5, 7) == 7 * per_token


def test_mlp_counts_three_matrices() -> None:
    assert mlp_flops(replace(ATTENTION, mlp_dim=10), 4, 3) == 2 * 3 * 4 * 10 * 3


def test_head_counts_only_the_rows_asked_for_and_computed() -> None:
    per_row = 2 * 32 * 96
    bare = prefill_flops(SHAPE, 10, 14, with_head=0)
    assert prefill_flops(SHAPE, 10, 14) == bare + per_row
    assert prefill_flops(SHAPE, 10, 14, with_head=3) == bare + 3 * per_row
    assert prefill_flops(SHAPE, 10, 14, with_head=100) == bare + 4 * per_row
    assert prefill_flops(SHAPE, 10, 10) == 0


@pytest.mark.parametrize("cut", [0, 1, 63, 500, 1000])
def test_cost_of_prefix_and_remainder_add_up(cut: int) -> None:
    whole = prefill_flops(SHAPE, 0, 1000, with_head=0)
    parts = prefill_flops(SHAPE, 0, cut, with_head=0) + prefill_flops(SHAPE, cut, 1000, with_head=0)
    assert parts == whole


def test_large_counts_stay_exact_integers() -> None:
    last = prefill_flops(SHAPE, 10**9 - 1, 10**9, with_head=0)
    whole = prefill_flops(SHAPE, 0, 10**9, with_head=0)
    assert whole - prefill_flops(SHAPE, 0, 10**9 - 1, with_head=0) == last


def test_attention_agrees_with_the_published_formula_but_for_masked_pairs() -> None:
    num_tokens, dim = 1000, 4096
    (layer,) = published_shape(num_attention=1).layers
    published = 8 * num_tokens * dim**2 + 4 * num_tokens**2 * dim
    masked_pairs = num_tokens * (num_tokens - 1) // 2
    assert attention_flops(layer, dim, 0, num_tokens) == published - 4 * dim * masked_pairs


def test_state_layer_agrees_with_the_published_formula_but_for_time_step_and_convolution() -> None:
    num_tokens, dim, state_dim, num_heads = 1000, 4096, 128, 128
    layer = LayerKind("mamba2", num_heads, 64, state_dim=state_dim, num_groups=1, conv_width=4)
    published = num_tokens * (12 * dim**2 + 16 * dim * state_dim + 10 * dim)
    left_out = num_tokens * (2 * dim * num_heads + 2 * 4 * (2 * dim + 2 * state_dim))
    assert mamba2_flops(layer, dim, num_tokens) == published + left_out
    assert left_out < 0.006 * published


def test_gated_mlp_of_equal_size_agrees_with_the_published_formula() -> None:
    layer = replace(ATTENTION, mlp_dim=8 * 4098 // 3)
    assert mlp_flops(layer, 4098, 10) == 16 * 10 * 4098**2


@pytest.mark.parametrize("state_dim", [16, 64, 128])
def test_a_state_is_worth_half_its_size_in_tokens_of_kv(state_dim: int) -> None:
    state = published_shape(num_state=1, state_dim=state_dim)
    attention = published_shape(num_attention=1)
    assert checkpoint_bytes(state) == 2 * 4096 * state_dim == kv_bytes(attention, state_dim // 2)


def test_a_checkpoint_every_16_tokens_is_four_times_the_kv_it_covers() -> None:
    covered = kv_bytes(published_shape(num_attention=1), 16)
    assert checkpoint_bytes(published_shape(num_state=1)) == 4 * covered


def test_checkpoints_every_32_tokens_of_10k_hold_seven_and_a_half_gib() -> None:
    num_blocks = 10 * 1024 // 32
    assert num_blocks * checkpoint_bytes(published_shape(num_state=24)) == 7.5 * 2**30


def test_a_checkpoint_holds_the_convolution_state_too() -> None:
    # inner 64 x 8 states, and 3 columns of 64 + 16 channels, two layers, 4 bytes
    assert checkpoint_bytes(SHAPE) == 2 * 4 * (64 * 8 + 80 * 3)
    assert kv_bytes(SHAPE, 10) == 10 * 2 * 4 * (2 * 2 * 8)


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    """FLOPs that torch counts while SHAPE's model runs 7 tokens one by one, by part.

    One by one, because a pass over several tokens multiplies the masked half as well.
    """
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=0,
        shared_intermediate_size=48,
        layer_types=["linear_attention", "full_attention"] * 2,
        mamba_n_heads=4,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_d_conv=4,
        attn_implementation="eager",
    )
    model = GraniteMoeHybridForCausalLM(config).eval()
    cache = DynamicCache(config=config)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        for position in range(7):
            model(
                torch.tensor([[position]]),
                position_ids=torch.tensor([[position]]),
                cache=cache,
                use_cache=True,
            )
    parts = dict.fromkeys(["attention", "state projections", "mlp", "head"], 0)
    endings = {
        "self_attn": "attention",
        "mamba.in_proj": "state projections",
        "mamba.out_proj": "state projections",
        "shared_mlp": "mlp",
        "lm_head": "head",
    }
    for module, by_op in counter.get_flop_counts().items():
        for ending, part in endings.items():
            if module.endswith("." + ending):
                parts[part] += sum(by_op.values())
    return parts


def test_attention_equals_the_counted_forward(counted: dict[str, int]) -> None:
    assert counted["attention"] == 2 * attention_flops(ATTENTION, 32, 0, 7)


def test_mlp_and_head_equal_the_counted_forward(counted: dict[str, int]) -> None:
    assert counted["mlp"] == 4 * mlp_flops(MAMBA, 32, 7)
    head = prefill_flops(SHAPE, 0, 7, with_head=7) - prefill_flops(SHAPE, 0, 7, with_head=0)
    assert counted["head"] == head


def test_state_projections_equal_the_counted_forward(counted: dict[str, int]) -> None:
    # what torch does not see as products: convolution step, recurrence, elementwise
    uncounted = 7 * (2 * 4 * 80 + 6 * 64 * 8 + 5 * 64)
    assert counted["state projections"] == 2 * (mamba2_flops(MAMBA, 32, 7) - uncounted)
