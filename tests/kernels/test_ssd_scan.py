from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentcache.kernels.ssd_scan import ssd_scan, ssd_scan_reference

SIZES = [1, 2, 63, 64, 65, 500, 1000]
HEADS, HEAD_DIM, STATE_DIM = 4, 8, 16


def make_inputs(num_tokens: int, batch: int = 1, groups: int = 1, seed: int = 0) -> dict[str, Any]:
    """Inputs as the mixer makes them: x, B and C are views of one convolved tensor."""
    rng = torch.Generator().manual_seed(seed)
    widths = [HEADS * HEAD_DIM, groups * STATE_DIM, groups * STATE_DIM]
    convolved = torch.randn(batch, num_tokens, sum(widths), generator=rng)
    x, B, C = convolved.split(widths, dim=-1)
    return {
        "x": x.unflatten(-1, (HEADS, HEAD_DIM)),
        "dt": torch.rand(batch, num_tokens, HEADS, generator=rng) * 0.2,
        "A": -torch.tensor([0.01, 0.3, 2.0, 16.0]),
        "B": B.unflatten(-1, (groups, STATE_DIM)),
        "C": C.unflatten(-1, (groups, STATE_DIM)),
        "D": torch.randn(HEADS, generator=rng),
    }


def make_state(batch: int = 1, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HEADS, HEAD_DIM, STATE_DIM, generator=rng)


def tokens(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The inputs of tokens start..stop."""
    cut = {name: inputs[name][:, start:stop] for name in ("x", "dt", "B", "C")}
    return {**inputs, **cut}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_matches_the_token_loop(
    num_tokens: int, with_state: bool, groups: int, check_close: Any
) -> None:
    inputs = make_inputs(num_tokens, groups=groups)
    state = make_state() if with_state else None
    y, final_state = ssd_scan_reference(**inputs, initial_state=state)
    result = ssd_scan(**inputs, initial_state=state)
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    assert result.states == ()


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 4096])
def test_chunk_size_does_not_change_the_result(chunk_size: int, check_close: Any) -> None:
    inputs = make_inputs(300)
    y, final_state = ssd_scan_reference(**inputs, initial_state=make_state())
    result = ssd_scan(**inputs, initial_state=make_state(), chunk_size=chunk_size)
    check_close(result.y, y)
    check_close(result.final_state, final_state)


def test_rows_of_a_batch_are_independent(check_close: Any) -> None:
    inputs = make_inputs(130, batch=3, groups=2)
    y, final_state = ssd_scan_reference(**inputs, initial_state=make_state(3))
    result = ssd_scan(**inputs, initial_state=make_state(3), state_positions=[40])
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    _, at_40 = ssd_scan_reference(**tokens(inputs, 0, 40), initial_state=make_state(3))
    check_close(result.states[0], at_40)


def test_every_head_may_have_its_own_group(check_close: Any) -> None:
    inputs = make_inputs(70, groups=HEADS)
    y, final_state = ssd_scan_reference(**inputs)
    result = ssd_scan(**inputs)
    check_close(result.y, y)
    check_close(result.final_state, final_state)


def test_skip_weights_are_optional(check_close: Any) -> None:
    inputs = {**make_inputs(70), "D": None}
    y, _ = ssd_scan_reference(**inputs)
    check_close(ssd_scan(**inputs).y, y)


@pytest.mark.parametrize(
    "log_decay", [-1e-6, -1e-2, -1.4, -3.0, -50.0, -1e4], ids=lambda value: f"{value:g}"
)
def test_slow_and_fast_decay(log_decay: float, check_close: Any) -> None:
    inputs = make_inputs(300)
    inputs["A"] = torch.full((HEADS,), log_decay)
    inputs["dt"] = torch.ones_like(inputs["dt"])
    y, final_state = ssd_scan_reference(**inputs, initial_state=make_state())
    result = ssd_scan(**inputs, initial_state=make_state(), state_positions=[5, 100, 299])
    check_close(result.y, y, 5e-6)
    check_close(result.final_state, final_state, 5e-6)
    for position, state in zip([5, 100, 299], result.states, strict=True):
        part = tokens(inputs, 0, position)
        _, expected = ssd_scan_reference(**part, initial_state=make_state())
        check_close(state, expected, 5e-6)


def test_fast_decay_does_not_blur_slow_decay_after_it(check_close: Any) -> None:
    inputs = make_inputs(96)
    inputs["A"] = torch.full((HEADS,), -1.0)
    inputs["dt"] = torch.full_like(inputs["dt"], 1e-3)
    inputs["dt"][:, ::16] = 400.0
    # outputs of the tokens with slow decay alone: the large steps would outweigh them
    inputs["x"] = inputs["x"].clone()
    inputs["x"][:, ::16] = 0.0
    y, final_state = ssd_scan_reference(**inputs)
    result = ssd_scan(**inputs)
    check_close(result.y, y, 1e-6)
    check_close(result.final_state, final_state, 1e-6)


def test_tokens_with_no_step_leave_the_state_alone(check_close: Any) -> None:
    inputs = make_inputs(100)
    inputs["dt"][:, 10:] = 0.0
    result = ssd_scan(**inputs, initial_state=make_state(), state_positions=[10])
    check_close(result.final_state, result.states[0])


@pytest.mark.parametrize("num_tokens", [1, 20, 64, 90, 130, 500])
def test_states_inside_and_between_chunks(num_tokens: int, check_close: Any) -> None:
    inputs, state = make_inputs(num_tokens, groups=2), make_state()
    everywhere = {0, 1, 2, 31, 32, 33, 50, 63, 64, 96, 97, 128, 129, 480, 481, 499, num_tokens}
    positions = sorted(p for p in everywhere if p <= num_tokens)
    result = ssd_scan(**inputs, initial_state=state, state_positions=positions)
    assert torch.equal(result.states[0], state)
    for position, captured in zip(positions[1:], result.states[1:], strict=True):
        part = tokens(inputs, 0, position)
        _, expected = ssd_scan_reference(**part, initial_state=state)
        check_close(captured, expected)


def test_capturing_states_does_not_change_the_scan() -> None:
    inputs = make_inputs(200)
    plain = ssd_scan(**inputs)
    capturing = ssd_scan(**inputs, state_positions=[0, 17, 64, 64, 199, 200])
    assert torch.equal(plain.y, capturing.y)
    assert torch.equal(plain.final_state, capturing.final_state)
    assert torch.equal(capturing.states[2], capturing.states[3])
    assert torch.equal(capturing.states[5], capturing.final_state)


@pytest.mark.parametrize("cuts", [[1], [64], [3, 4, 130], [100, 164, 165]], ids=str)
def test_split_runs_equal_one(cuts: list[int], check_close: Any) -> None:
    inputs = make_inputs(200)
    whole = ssd_scan(**inputs, initial_state=make_state())
    state, ys = make_state(), []
    for start, stop in zip([0, *cuts], [*cuts, 200], strict=True):
        part = ssd_scan(**tokens(inputs, start, stop), initial_state=state)
        state = part.final_state
        ys.append(part.y)
    check_close(torch.cat(ys, dim=1), whole.y)
    check_close(state, whole.final_state)


def test_results_share_memory_with_nothing() -> None:
    inputs, state = make_inputs(40), make_state()
    before = state.clone()
    result = ssd_scan(**inputs, initial_state=state, state_positions=[0, 20, 40])
    assert torch.equal(state, before)
    tensors = [state, result.final_state, *result.states]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(storages) == len(tensors)
    for tensor in (result.final_state, *result.states):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_bfloat16_inputs_keep_states_in_float32(check_close: Any) -> None:
    inputs = make_inputs(100)
    y, final_state = ssd_scan_reference(**inputs)
    low = {name: inputs[name].bfloat16() for name in ("x", "B", "C")}
    result = ssd_scan(**{**inputs, **low}, state_positions=[50])
    check_close(result.y, y.bfloat16())
    check_close(result.final_state, final_state, 8e-3)
    assert result.states[0].dtype == torch.float32


def test_weights_may_require_gradients() -> None:
    inputs = make_inputs(10)
    inputs["A"].requires_grad_()
    inputs["D"].requires_grad_()
    assert not ssd_scan(**inputs).y.requires_grad


@pytest.mark.parametrize("positions", [[-1], [11], [3, 2]], ids=str)
def test_rejects_positions_out_of_range_or_order(positions: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"state position -?\d+ is out of order or outside 0\.\.10"
    ):
        ssd_scan(**make_inputs(10), state_positions=positions)


def test_rejects_an_empty_run_and_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        ssd_scan(**make_inputs(0))
    with pytest.raises(ValueError, match="4 heads do not divide into 3 groups"):
        ssd_scan(**make_inputs(5, groups=3))
    with pytest.raises(ValueError, match="chunk_size is 0"):
        ssd_scan(**make_inputs(5), chunk_size=0)
