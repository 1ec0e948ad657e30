from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentcache.kernels.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_reference,
    causal_conv1d_update,
)

SIZES = [1, 2, 3, 4, 63, 64, 65, 500, 1000]
CHANNELS = 20
# the fewest channels with which 1000 tokens take the library's convolution
MANY_CHANNELS = 160


def make(
    num_tokens: int, channels: int = CHANNELS, width: int = 4, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x as a strided slice of a wider projection, weight, bias, state."""
    rng = torch.Generator().manual_seed(0)
    projected = torch.randn(batch, num_tokens, channels + 7, generator=rng)
    weight = torch.randn(channels, width, generator=rng)
    bias = torch.randn(channels, generator=rng)
    state = torch.randn(batch, channels, width - 1, generator=rng)
    return projected[..., 3 : 3 + channels], weight, bias, state


@pytest.mark.parametrize("channels", [CHANNELS, MANY_CHANNELS])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_matches_the_token_loop(
    num_tokens: int, with_state: bool, channels: int, check_close: Any
) -> None:
    x, weight, bias, state = make(num_tokens, channels)
    initial_state = state if with_state else None
    y, final_state = causal_conv1d_reference(x, weight, bias, initial_state, activation="silu")
    result = causal_conv1d(x, weight, bias, initial_state, activation="silu")
    check_close(result.y, y)
    assert torch.equal(result.final_state, final_state)
    assert result.states == ()


@pytest.mark.parametrize("num_tokens", [5, 1000])
def test_bias_and_activation_are_optional(num_tokens: int, check_close: Any) -> None:
    x, weight, _, state = make(num_tokens, MANY_CHANNELS)
    y, _ = causal_conv1d_reference(x, weight, None, state)
    check_close(causal_conv1d(x, weight, None, state).y, y)


@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_other_widths(num_tokens: int, width: int, check_close: Any) -> None:
    x, weight, bias, state = make(num_tokens, width=width)
    y, final_state = causal_conv1d_reference(x, weight, bias, state)
    result = causal_conv1d(x, weight, bias, state, state_positions=[1])
    check_close(result.y, y)
    assert torch.equal(result.final_state, final_state)
    assert result.states[0].shape == state.shape


def test_rows_of_a_batch_are_independent(check_close: Any) -> None:
    x, weight, bias, state = make(30, batch=3)
    y, final_state = causal_conv1d_reference(x, weight, bias, state)
    result = causal_conv1d(x, weight, bias, state)
    check_close(result.y, y)
    assert torch.equal(result.final_state, final_state)


@pytest.mark.parametrize("num_tokens", [1, 2, 50])
def test_states_at_every_position(num_tokens: int) -> None:
    x, weight, bias, state = make(num_tokens)
    positions = range(num_tokens + 1)
    result = causal_conv1d(x, weight, bias, state, state_positions=positions)
    assert torch.equal(result.states[0], state)
    for position in positions[1:]:
        _, expected = causal_conv1d_reference(x[:, :position], weight, bias, state)
        assert torch.equal(result.states[position], expected)


def test_state_before_the_first_token_is_zero_by_default() -> None:
    x, weight, bias, _ = make(5)
    result = causal_conv1d(x, weight, bias, None, state_positions=[0, 1])
    assert not result.states[0].any()
    assert torch.equal(result.states[1][..., -1], x[:, 0])
    assert not result.states[1][..., :-1].any()


@pytest.mark.parametrize("cuts", [[1], [2, 3], [10, 11, 40]], ids=str)
def test_split_runs_equal_one(cuts: list[int], check_close: Any) -> None:
    x, weight, bias, state = make(60)
    whole = causal_conv1d(x, weight, bias, state, activation="silu")
    ys = []
    for start, stop in zip([0, *cuts], [*cuts, 60], strict=True):
        part = causal_conv1d(x[:, start:stop], weight, bias, state, activation="silu")
        state = part.final_state
        ys.append(part.y)
    check_close(torch.cat(ys, dim=1), whole.y)
    assert torch.equal(state, whole.final_state)


def test_results_share_memory_with_nothing() -> None:
    x, weight, bias, state = make(6, width=2)
    result = causal_conv1d(x, weight, bias, state, state_positions=[0, 3, 6])
    tensors = [x, state, result.final_state, *result.states]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    for tensor in (result.final_state, *result.states):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_bfloat16_inputs_are_convolved_in_float32(check_close: Any) -> None:
    x, weight, bias, state = make(50)
    y, final_state = causal_conv1d_reference(x.bfloat16(), weight, bias, state, activation="silu")
    result = causal_conv1d(x.bfloat16(), weight.bfloat16(), bias, state, activation="silu")
    check_close(result.y, y)
    assert torch.equal(result.final_state, final_state)
    without_state = causal_conv1d(x.bfloat16(), weight, bias, None)
    assert without_state.final_state.dtype == torch.bfloat16


@pytest.mark.parametrize("position", [-1, 6])
def test_rejects_positions_out_of_range(position: int) -> None:
    x, weight, bias, state = make(5)
    with pytest.raises(ValueError, match=r"outside 0\.\.5"):
        causal_conv1d(x, weight, bias, state, state_positions=[position])


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_update_equals_one_more_token(rows: int, width: int, check_close: Any) -> None:
    x, weight, bias, state = make(12, batch=rows, width=width)
    whole = causal_conv1d(x, weight, bias, state, activation="silu")
    ys = [causal_conv1d_update(x[:, t], state, weight, bias, activation="silu") for t in range(12)]
    check_close(torch.stack(ys, dim=1), whole.y)
    assert torch.equal(state, whole.final_state)


def test_update_moves_strided_rows_in_place_and_nothing_else(check_close: Any) -> None:
    x, weight, _, state = make(1, batch=3)
    memory = torch.full((3, state[0].numel() + 30), 7.0)
    view = memory[:, 10 : 10 + state[0].numel()].view(state.shape)
    view.copy_(state)
    y, final_state = causal_conv1d_reference(x, weight, None, state)
    check_close(causal_conv1d_update(x[:, 0], view, weight, None), y[:, 0])
    assert torch.equal(view, final_state)
    assert bool((memory[:, :10] == 7.0).all())
    assert bool((memory[:, -20:] == 7.0).all())


def test_update_keeps_a_float32_state_beside_bfloat16_inputs(check_close: Any) -> None:
    x, weight, bias, state = make(1, batch=2)
    x = x.bfloat16()
    y, final_state = causal_conv1d_reference(x, weight, bias, state)
    check_close(causal_conv1d_update(x[:, 0], state, weight, bias), y[:, 0])
    assert torch.equal(state, final_state)


def test_weights_may_require_gradients() -> None:
    x, weight, bias, state = make(3)
    weight.requires_grad_()
    bias.requires_grad_()
    assert not causal_conv1d(x, weight, bias, state).y.requires_grad
    assert not causal_conv1d_update(x[:, 0], state, weight, bias).requires_grad
