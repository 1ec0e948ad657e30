from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agentcache.kernels.gated_delta import (
    gated_delta,
    gated_delta_reference,
    gated_delta_update,
    gated_delta_update_reference,
)

HEADS, KEY_DIM, VALUE_DIM = 4, 16, 24
ROW = HEADS * KEY_DIM * VALUE_DIM
SIZES = [1, 2, 3, 31, 32, 33, 64, 150]

Inputs = dict[str, Tensor]

per_channel_or_head = pytest.mark.parametrize("per_channel", [False, True], ids=["head", "channel"])


def make_inputs(
    num_tokens: int, per_channel: bool, batch: int = 1, groups: int = HEADS, seed: int = 0
) -> Inputs:
    """Inputs as a mixer makes them: views of one convolved tensor, queries and keys normalised."""
    rng = torch.Generator().manual_seed(seed)
    lead = (batch, num_tokens)
    width = groups * KEY_DIM
    mixed = torch.randn(*lead, 2 * width + HEADS * VALUE_DIM, generator=rng)
    q, k, v = mixed.split([width, width, HEADS * VALUE_DIM], dim=-1)
    q, k = (F.normalize(x.unflatten(-1, (groups, KEY_DIM)), dim=-1) for x in (q, k))
    channels = [KEY_DIM] if per_channel else []
    return {
        "q": q * KEY_DIM**-0.5,
        "k": k,
        "v": v.unflatten(-1, (HEADS, VALUE_DIM)),
        "decay": -(torch.rand(*lead, HEADS, *channels, generator=rng) ** 4),
        "beta": torch.rand(*lead, HEADS, generator=rng),
    }


def make_state(batch: int = 1, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, KEY_DIM, VALUE_DIM, generator=rng)


def tokens(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The inputs of tokens start..stop."""
    return {name: x[:, start:stop] for name, x in inputs.items()}


def token(inputs: Inputs, t: int) -> Inputs:
    """The inputs of one token, for the one-token form."""
    return {name: x[:, t] for name, x in inputs.items()}


@per_channel_or_head
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_matches_the_token_loop(
    num_tokens: int, with_state: bool, groups: int, per_channel: bool, check_close: Any
) -> None:
    inputs = make_inputs(num_tokens, per_channel, groups=groups)
    state = make_state() if with_state else None
    y, final_state = gated_delta_reference(**inputs, initial_state=state)
    result = gated_delta(**inputs, initial_state=state)
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    assert result.states == ()


@per_channel_or_head
def test_the_token_loop_follows_the_formula(per_channel: bool, check_close: Any) -> None:
    inputs, state = make_inputs(2, per_channel), make_state().double()
    q, k, v, decay, beta = (x.double() for x in inputs.values())
    rates = decay if per_channel else decay.unsqueeze(-1).expand(*decay.shape, KEY_DIM)
    for t in range(2):
        for h in range(HEADS):
            decayed = torch.diag(rates[0, t, h].exp()) @ state[0, h]
            seen = decayed.T @ k[0, t, h]
            state[0, h] = decayed + beta[0, t, h] * torch.outer(k[0, t, h], v[0, t, h] - seen)
    y, final_state = gated_delta_reference(**inputs, initial_state=make_state())
    check_close(y[0, 1], torch.einsum("hkv,hk->hv", state[0], q[0, 1]).float())
    check_close(final_state, state.float())


@per_channel_or_head
def test_grouped_keys_serve_neighbouring_heads(per_channel: bool, check_close: Any) -> None:
    inputs = make_inputs(40, per_channel, groups=2)
    repeated = {name: inputs[name].repeat_interleave(2, dim=2) for name in ("q", "k")}
    result, expected = gated_delta(**inputs), gated_delta(**{**inputs, **repeated})
    check_close(result.y, expected.y)
    check_close(result.final_state, expected.final_state)


@per_channel_or_head
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, 4096])
def test_chunk_size_does_not_change_the_result(
    chunk_size: int, per_channel: bool, check_close: Any
) -> None:
    inputs = make_inputs(150, per_channel)
    y, final_state = gated_delta_reference(**inputs, initial_state=make_state())
    result = gated_delta(**inputs, initial_state=make_state(), chunk_size=chunk_size)
    check_close(result.y, y)
    check_close(result.final_state, final_state)


@per_channel_or_head
def test_a_long_scan_is_prepared_in_parts(per_channel: bool, check_close: Any) -> None:
    """Keys of the sequence take more than is prepared at a time."""
    inputs = make_inputs(3000, per_channel, groups=HEADS)
    wide = {name: inputs[name].repeat(1, 1, 1, 6) for name in ("q", "k")}
    inputs |= {name: F.normalize(x, dim=-1) for name, x in wide.items()}
    if per_channel:
        inputs["decay"] = inputs["decay"].repeat(1, 1, 1, 6)
    inputs["v"] = inputs["v"][..., :2]
    positions = [1365, 2000]
    result = gated_delta(**inputs, state_positions=positions)
    y, final_state = gated_delta_reference(**inputs)
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    for position, state in zip(positions, result.states, strict=True):
        check_close(state, gated_delta(**tokens(inputs, 0, position)).final_state)


@per_channel_or_head
def test_rows_of_a_batch_are_independent(per_channel: bool, check_close: Any) -> None:
    inputs = make_inputs(70, per_channel, batch=3, groups=2)
    y, final_state = gated_delta_reference(**inputs, initial_state=make_state(3))
    result = gated_delta(**inputs, initial_state=make_state(3), state_positions=[40])
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    _, at_40 = gated_delta_reference(**tokens(inputs, 0, 40), initial_state=make_state(3))
    check_close(result.states[0], at_40)


@per_channel_or_head
@pytest.mark.parametrize("last", [3, 67, 75], ids=["few", "chunks and few", "chunks"])
def test_states_at_any_positions(last: int, per_channel: bool, check_close: Any) -> None:
    inputs, state = make_inputs(last, per_channel, groups=2), make_state()
    inside = (0, 1, 2, 31, 32, 32, 33, 63, 64, 65, 66, 74)
    positions = [*(p for p in inside if p < last), last]
    before = state.clone()
    result = gated_delta(**inputs, initial_state=state, state_positions=positions)
    assert torch.equal(state, before)
    assert torch.equal(result.states[0], before)
    assert torch.equal(result.states[-1], result.final_state)
    for position, captured in list(zip(positions, result.states, strict=True))[1:]:
        part = tokens(inputs, 0, position)
        check_close(captured, gated_delta_reference(**part, initial_state=state)[1])
    memory = {x.untyped_storage().data_ptr() for x in (state, result.final_state, *result.states)}
    assert len(memory) == len(positions) + 2


@per_channel_or_head
@pytest.mark.parametrize("cut", [1, 32, 50])
def test_two_scans_in_a_row_equal_one(cut: int, per_channel: bool, check_close: Any) -> None:
    inputs = make_inputs(100, per_channel)
    whole = gated_delta(**inputs, initial_state=make_state())
    first = gated_delta(**tokens(inputs, 0, cut), initial_state=make_state())
    second = gated_delta(**tokens(inputs, cut, 100), initial_state=first.final_state)
    check_close(torch.cat([first.y, second.y], dim=1), whole.y)
    check_close(second.final_state, whole.final_state)


@per_channel_or_head
@pytest.mark.parametrize(
    "log_decay", [0.0, -1e-6, -1e-2, -3.0, -50.0, -95.0, -1e4], ids=lambda value: f"{value:g}"
)
def test_slow_and_fast_decay(log_decay: float, per_channel: bool, check_close: Any) -> None:
    inputs, state, positions = make_inputs(100, per_channel), make_state(), [5, 70]
    inputs["decay"] = torch.full_like(inputs["decay"], log_decay)
    y, final_state = gated_delta_reference(**inputs, initial_state=state)
    result = gated_delta(**inputs, initial_state=state, state_positions=positions)
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    for position, captured in zip(positions, result.states, strict=True):
        part = tokens(inputs, 0, position)
        check_close(captured, gated_delta_reference(**part, initial_state=state)[1])


def test_channels_that_forget_at_once_stand_beside_others_that_never_do(check_close: Any) -> None:
    inputs = make_inputs(100, per_channel=True)
    inputs["decay"] = torch.zeros_like(inputs["decay"])
    inputs["decay"][..., ::2] = -60.0
    inputs["decay"][:, 40:60, :, 1] = -1e5
    y, final_state = gated_delta_reference(**inputs, initial_state=make_state())
    result = gated_delta(**inputs, initial_state=make_state())
    check_close(result.y, y)
    check_close(result.final_state, final_state)


@per_channel_or_head
def test_fast_decay_does_not_blur_slow_decay_after_it(per_channel: bool, check_close: Any) -> None:
    inputs = make_inputs(96, per_channel)
    inputs["decay"] = torch.full_like(inputs["decay"], -1e-3)
    inputs["decay"][:, ::16] = -4e5
    y, final_state = gated_delta_reference(**inputs)
    result = gated_delta(**inputs)
    check_close(result.y, y, 1e-6)
    check_close(result.final_state, final_state, 1e-6)


@per_channel_or_head
def test_a_state_that_decays_at_once_leaves_no_denormals(per_channel: bool) -> None:
    inputs = make_inputs(3, per_channel)
    inputs |= {"decay": torch.full_like(inputs["decay"], -95.0)}
    inputs |= {"beta": torch.zeros_like(inputs["beta"])}
    state = torch.ones(1, HEADS, KEY_DIM, VALUE_DIM)
    after = gated_delta(**inputs, initial_state=state, state_positions=[1]).states[0]
    gated_delta_update(state, **token(inputs, 0))
    for left in (after, state):
        assert bool((left >= torch.finfo(torch.float32).tiny).all())
        assert bool((left < 1e-29).all())


@per_channel_or_head
def test_the_same_key_again_overwrites_its_value(per_channel: bool, check_close: Any) -> None:
    """Keys that are all alike make the triangular system as full as it gets."""
    inputs = make_inputs(64, per_channel)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"])
    inputs |= {"beta": torch.ones_like(inputs["beta"]), "q": inputs["k"]}
    inputs["decay"] = torch.full_like(inputs["decay"], -0.5)
    check_close(gated_delta(**inputs, initial_state=make_state()).y, inputs["v"])


@per_channel_or_head
def test_updates_may_overshoot(per_channel: bool, check_close: Any) -> None:
    """Strengths up to two turn what lies along a key over, as some models allow."""
    inputs = make_inputs(150, per_channel)
    inputs["beta"] = inputs["beta"] + 1.0
    y, final_state = gated_delta_reference(**inputs, initial_state=make_state())
    result = gated_delta(**inputs, initial_state=make_state())
    check_close(result.y, y)
    check_close(result.final_state, final_state)


@per_channel_or_head
def test_bfloat16_inputs_are_computed_in_float32(per_channel: bool, check_close: Any) -> None:
    inputs = {name: x.bfloat16() for name, x in make_inputs(70, per_channel).items()}
    exact = {name: x.float() for name, x in inputs.items()}
    result, expected = gated_delta(**inputs), gated_delta(**exact)
    assert torch.equal(result.y, expected.y.bfloat16())
    assert torch.equal(result.final_state, expected.final_state)
    state, one = make_state(), token(inputs, 0)
    y, new_state = gated_delta_update_reference(state, **token(exact, 0))
    check_close(gated_delta_update(state, **one), y.bfloat16())
    check_close(state, new_state)


@pytest.mark.parametrize("num_tokens", [2, 100])
def test_agrees_with_transformers_per_head(num_tokens: int, check_close: Any) -> None:
    theirs = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs, state = make_inputs(num_tokens, per_channel=False, groups=2), make_state()
    q, k, v, decay, beta = inputs.values()
    y, final_state = theirs.torch_chunk_gated_delta_rule(
        q * KEY_DIM**0.5, k, v, decay, beta, initial_state=state, output_final_state=True
    )
    result = gated_delta(**inputs, initial_state=state)
    check_close(result.y, y)
    check_close(result.final_state, final_state)


@pytest.mark.parametrize("num_tokens", [2, 70])
def test_agrees_with_transformers_per_channel(num_tokens: int, check_close: Any) -> None:
    theirs = importlib.import_module("transformers.models.kimi_linear.modeling_kimi_linear")
    inputs, state = make_inputs(num_tokens, per_channel=True), make_state()
    q, k, v, decay, beta = inputs.values()
    y, final_state = theirs.chunk_kimi_delta_attention(
        q * KEY_DIM**0.5, k, v, decay, beta, initial_state=state, output_final_state=True
    )
    result = gated_delta(**inputs, initial_state=state)
    check_close(result.y, y)
    check_close(result.final_state, final_state)


@per_channel_or_head
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_update_matches_the_formula(
    rows: int, groups: int, per_channel: bool, check_close: Any
) -> None:
    one, state = token(make_inputs(1, per_channel, rows, groups), 0), make_state(rows)
    before = state.clone()
    y, new_state = gated_delta_update_reference(state, **one)
    assert torch.equal(state, before)
    check_close(gated_delta_update(state, **one), y)
    check_close(state, new_state)


@per_channel_or_head
@pytest.mark.parametrize("rows", [1, 3])
def test_update_moves_strided_rows_in_place_and_nothing_else(
    rows: int, per_channel: bool, check_close: Any
) -> None:
    one = token(make_inputs(1, per_channel, rows), 0)
    memory = torch.randn(rows, ROW + 50, generator=torch.Generator().manual_seed(1))
    before = memory.clone()
    state = memory[:, 20 : 20 + ROW].view(rows, HEADS, KEY_DIM, VALUE_DIM)
    y, new_state = gated_delta_update_reference(state, **one)
    check_close(gated_delta_update(state, **one), y)
    check_close(memory[:, 20 : 20 + ROW].reshape(new_state.shape), new_state)
    assert torch.equal(memory[:, :20], before[:, :20])
    assert torch.equal(memory[:, 20 + ROW :], before[:, 20 + ROW :])


@per_channel_or_head
def test_updates_in_a_row_equal_a_scan(per_channel: bool, check_close: Any) -> None:
    inputs, state = make_inputs(40, per_channel, batch=2, groups=2), make_state(2)
    scan = gated_delta(**inputs, initial_state=state)
    ys = [gated_delta_update(state, **token(inputs, t)) for t in range(40)]
    check_close(torch.stack(ys, 1), scan.y)
    check_close(state, scan.final_state)


@pytest.mark.parametrize("name", ["q", "k", "decay", "beta", "initial_state"])
def test_shapes_that_would_broadcast_are_refused(name: str) -> None:
    inputs = {**make_inputs(5, per_channel=False), "initial_state": make_state()}
    inputs[name] = inputs[name][:, :1]
    with pytest.raises(ValueError, match="has shape"):
        gated_delta(**inputs)


def test_heads_that_no_group_serves_are_refused() -> None:
    inputs = make_inputs(5, per_channel=False, groups=3)
    with pytest.raises(ValueError, match="4 heads do not divide into 3 groups"):
        gated_delta(**inputs)


@pytest.mark.parametrize("positions", [[-1], [6], [4, 3]])
def test_positions_out_of_order_or_range_are_refused(positions: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        gated_delta(**make_inputs(5, per_channel=False), state_positions=positions)


def test_no_tokens_and_no_chunks_are_refused() -> None:
    inputs = make_inputs(5, per_channel=False)
    with pytest.raises(ValueError, match="0 tokens"):
        gated_delta(**tokens(inputs, 0, 0))
    with pytest.raises(ValueError, match="chunk_size"):
        gated_delta(**inputs, chunk_size=0)
