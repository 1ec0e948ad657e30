"""FLOPs and bytes against hand-worked numbers and the published formulas."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentcache.policy.cost import (
    FlopsModel,
    PublishedShape,
    attention_flops,
    checkpoint_bytes,
    kv_bytes,
    layer_flops,
    mlp_flops,
    prefill_flops,
    published_flops,
    state_flops,
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
    assert state_flops(layer, 5, 1) == per_token == 510
    assert state_flops(layer, 5, 7) == 7 * per_token


def test_a_window_limits_how_many_tokens_each_sees() -> None:
    layer = LayerKind("attention", num_heads=2, head_dim=3, num_kv_heads=1, window=3)
    # tokens 0 to 5 see 1, 2, 3, 3, 3, 3
    assert attention_flops(layer, 5, 0, 6) == 180 * 6 + 24 * 15
    assert attention_flops(layer, 5, 1, 4) == 180 * 3 + 24 * 8
    assert attention_flops(layer, 5, 4, 6) == 180 * 2 + 24 * 6
    assert attention_flops(replace(layer, window=9), 5, 0, 6) == 180 * 6 + 24 * 21


def test_attention_counts_gates_values_of_another_width_and_another_input() -> None:
    layer = LayerKind(
        "attention", 2, 3, num_kv_heads=1, value_dim=4, gate_dim=7, input_dim=10, query_rank=6
    )
    # width 5, input 10: queries 10x6 and 6x6, key 10x3, value 10x4, gate 10x7, output 8x5
    per_token = 2 * (60 + 36 + 30 + 40 + 70 + 40)
    assert layer_flops(layer, 5).products == per_token
    assert layer_flops(layer, 5).pair == 2 * 2 * (3 + 4)


def test_attention_to_the_kv_of_another_layer_projects_no_keys_and_keeps_none() -> None:
    layer = LayerKind("attention", num_heads=2, head_dim=3, num_kv_heads=0)
    assert attention_flops(layer, 5, 0, 1) == 2 * (30 + 30) + 24
    assert kv_bytes(replace(SHAPE, layers=(layer,)), 10) == 0


def test_latent_attention_counts_compression_and_one_expansion() -> None:
    layer = LayerKind(
        "attention", 2, 5, num_kv_heads=1, value_dim=3, query_rank=4, kv_rank=6, rope_dim=2
    )
    # width 7: queries 7x4 and 4x10, latent and key 7x8, expansion 6x(2x(3 + 3)), output 6x7
    assert layer_flops(layer, 7).products == 2 * (28 + 40 + 56 + 72 + 42)
    assert layer_flops(layer, 7).pair == 2 * 2 * (5 + 3)
    assert kv_bytes(replace(SHAPE, layers=(layer,)), 10) == 10 * (6 + 2) * 4


def test_mamba1_counts_its_projections_after_the_convolution() -> None:
    layer = LayerKind("mamba1", num_heads=6, head_dim=1, state_dim=4, conv_width=2, gate_rank=3)
    # width 5: input and gate 5x12, then 6x(3 + 4 + 4) and 3x6, output 6x5; 7 for a state's element
    per_token = 2 * (60 + 66 + 18 + 30) + 2 * 2 * 6 + 7 * 6 * 4 + 5 * 6
    assert state_flops(layer, 5, 3) == 3 * per_token


def test_a_gated_linear_recurrence_counts_two_gates_in_blocks() -> None:
    layer = LayerKind("mamba1", num_heads=6, head_dim=1, conv_width=4, gate_rank=3)
    # width 5: two inputs 5x6, output 6x5, gates of two 3x3 blocks each; 6 for a channel's state
    assert state_flops(layer, 5, 1) == 2 * (90 + 36) + 2 * 4 * 6 + 6 * 6 + 5 * 6
    # one number and three columns of the convolution for each channel
    assert checkpoint_bytes(replace(SHAPE, layers=(layer,))) == 4 * (6 + 3 * 6)


def test_a_gated_delta_rule_counts_decay_difference_write_and_read() -> None:
    layer = LayerKind("delta", num_heads=4, head_dim=3, state_dim=2, num_groups=2, conv_width=4)
    # width 5: q and k 5x4 each, v and output gate 5x12 each, step and decay 5x4 each, output 12x5
    per_token = 2 * (40 + 120 + 40 + 60) + 2 * 4 * (8 + 12) + 7 * 12 * 2 + 5 * 12
    assert state_flops(layer, 5, 1) == per_token
    assert checkpoint_bytes(replace(SHAPE, layers=(layer,))) == 4 * (12 * 2 + 3 * 20)


def test_a_delta_rule_with_decays_per_channel_counts_what_they_come_through() -> None:
    layer = LayerKind(
        "delta", 4, 3, state_dim=2, num_groups=4, conv_width=4, decay_dim=8, gate_rank=3
    )
    # q and k 5x8, v 5x12, step 5x4, output 12x5; decays 5x3 and 3x8, output gate 5x3 and 3x12
    matrices = 80 + 60 + 20 + 60 + 15 + 24 + 15 + 36
    assert layer_flops(layer, 5).products == 2 * matrices
    direct = replace(layer, gate_rank=0)
    assert layer_flops(direct, 5).products == 2 * (80 + 60 + 20 + 60 + 5 * 8 + 5 * 12)


def test_a_short_convolution_counts_its_projections_if_it_has_any() -> None:
    layer = LayerKind("conv", num_heads=5, head_dim=1, num_groups=3, conv_width=3)
    # width 5: 5x15 in, 5x5 out; three taps, and two gates
    assert state_flops(layer, 5, 2) == 2 * (2 * (75 + 25) + 2 * 3 * 5 + 2 * 5)
    assert state_flops(replace(layer, num_groups=0), 5, 2) == 2 * 2 * 3 * 5
    assert checkpoint_bytes(replace(SHAPE, layers=(layer,))) == 4 * 2 * 5


def test_experts_count_those_a_token_visits_and_the_router() -> None:
    # width 4: two chosen of 8 experts of width 6 and a shared one of width 10, and 4x8
    layer = LayerKind("none", 0, 0, mlp_dim=2 * 6 + 10, router_dim=8)
    assert mlp_flops(layer, 4, 3) == 2 * 3 * (3 * 4 * 22 + 4 * 8)
    assert mlp_flops(replace(layer, mlp_matrices=2), 4, 3) == 2 * 3 * (2 * 4 * 22 + 4 * 8)


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
    assert state_flops(layer, dim, num_tokens) == published + left_out
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


def test_a_checkpoint_holds_whole_windows_and_a_token_leaves_none_for_good() -> None:
    windowed = replace(SHAPE, layers=(*SHAPE.layers, replace(ATTENTION, window=5)))
    assert kv_bytes(windowed, 10) == kv_bytes(SHAPE, 10)
    assert checkpoint_bytes(windowed) == checkpoint_bytes(SHAPE) + 4 * 5 * (2 * 2 * 8)


def test_what_a_model_really_keeps_goes_before_the_formulas() -> None:
    known = replace(SHAPE, token_bytes=7, checkpoint_bytes=11)
    assert (kv_bytes(known, 3), checkpoint_bytes(known)) == (21, 11)


WINDOWS = replace(
    SHAPE,
    layers=(MAMBA, replace(ATTENTION, window=16), ATTENTION, replace(ATTENTION, window=200)),
)


@pytest.mark.parametrize("shape", [SHAPE, WINDOWS], ids=["full", "windows"])
def test_the_cost_of_a_prefix_in_closed_form_is_that_of_its_prefill(shape: ModelShape) -> None:
    lengths = [0, 1, 15, 16, 17, 199, 200, 201, 5000]
    expected = [prefill_flops(shape, 0, length, with_head=0) for length in lengths]
    model = FlopsModel.of(shape)
    assert [model.upto(length) for length in lengths] == expected
    assert model.upto(np.array(lengths, np.int32)).tolist() == expected
    assert model.between(17, 201) == prefill_flops(shape, 17, 201, with_head=0)


def test_the_cost_of_a_very_long_prefix_does_not_overflow() -> None:
    shape, length = PublishedShape().shape(), 50_000_000
    expected = prefill_flops(shape, 0, length, with_head=0)
    assert expected > 2**63
    model = FlopsModel.of(shape)
    assert model.upto(length) == pytest.approx(expected, rel=1e-12)
    assert model.upto(np.array([length], np.int32))[0] == pytest.approx(expected, rel=1e-12)


def test_the_published_model_costs_what_the_article_says() -> None:
    published = PublishedShape()
    # a token: 24 x (12 x 4096² + 16 x 4096 x 128 + 10 x 4096) + 4 x 8 x 4096² + 28 x 16 x 4096²
    per_token = 24 * 209_756_160 + 4 * 134_217_728 + 28 * 268_435_456
    assert per_token == 13_087_211_520
    expected = 1000 * per_token + 4 * 4 * 1000**2 * 4096
    assert published_flops(published, 1000) == expected == 13_152_747_520_000
    assert published.flops_model().upto(1000) == expected


def test_a_published_checkpoint_takes_26_8_mb_and_a_token_of_kv_64_kib() -> None:
    shape = PublishedShape().shape()
    # 24 x (2 x 4096 x 128 + four columns of 2 x 4096 + 2 x 128 channels in two bytes)
    assert checkpoint_bytes(shape) == 24 * (1_048_576 + 67_584) == 26_787_840
    assert kv_bytes(shape, 1) == 64 * 1024


def test_the_published_model_by_its_real_sizes_differs_by_mask_time_step_and_convolution() -> None:
    published, num_tokens = PublishedShape(), 1000
    masked = 4 * 4 * 4096 * num_tokens * (num_tokens - 1) // 2
    left_out = 24 * num_tokens * (2 * 4096 * 128 + 2 * 4 * (2 * 4096 + 2 * 128))
    real = prefill_flops(published.shape(), 0, num_tokens)
    assert real == published_flops(published, num_tokens) - masked + left_out


@pytest.mark.parametrize(("num_mlps", "expected"), [(1, 1), (5, 5), (8, 8)])
def test_a_published_shape_has_as_many_mlps_as_it_says(num_mlps: int, expected: int) -> None:
    shape = PublishedShape(64, 16, state_layers=4, attention_layers=1, mlp_layers=num_mlps).shape()
    assert sum(layer.mlp_dim > 0 for layer in shape.layers) == expected
    assert (len(shape.state_layers), len(shape.attention_layers)) == (4, 1)
