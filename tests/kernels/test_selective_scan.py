from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from agentcache.kernels.selective_scan import (
    selective_scan,
    selective_scan_reference,
    selective_state_update,
    selective_state_update_reference,
)

SIZES = [1, 2, 63, 64, 65, 500, 1000]
CHANNELS, STATE_DIM = 24, 16
ROW = CHANNELS * STATE_DIM


def make_inputs(num_tokens: int, batch: int = 1, groups: int = 1, seed: int = 0) -> dict[str, Any]:
    """Inputs as a mixer makes them: B and C are views of one projection, dt is still raw."""
    rng = torch.Generator().manual_seed(seed)
    projected = torch.randn(batch, num_tokens, 2 * groups * STATE_DIM + 3, generator=rng)
    _, B, C = projected.split([3, groups * STATE_DIM, groups * STATE_DIM], dim=-1)
    return {
        "x": torch.randn(batch, num_tokens, CHANNELS, generator=rng),
        "dt": torch.randn(batch, num_tokens, CHANNELS, generator=rng) - 3.0,
        "A": -16.0 * torch.rand(CHANNELS, STATE_DIM, generator=rng),
        "B": B.unflatten(-1, (groups, STATE_DIM)),
        "C": C.unflatten(-1, (groups, STATE_DIM)),
        "D": torch.randn(CHANNELS, generator=rng),
        "z": torch.randn(batch, num_tokens, CHANNELS, generator=rng),
        "dt_bias": torch.randn(CHANNELS, generator=rng),
        "dt_softplus": True,
    }


def make_state(batch: int = 1, seed: int = 1) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(batch, CHANNELS, STATE_DIM, generator=rng)


def tokens(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The inputs of tokens start..stop."""
    cut = {name: inputs[name][:, start:stop] for name in ("x", "dt", "B", "C", "z")}
    return {**inputs, **cut}


def token(inputs: dict[str, Any], t: int) -> dict[str, Any]:
    """The inputs of one token, for the one-token form."""
    return {**inputs, **{name: inputs[name][:, t] for name in ("x", "dt", "B", "C", "z")}}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_tokens", SIZES)
def test_matches_the_token_loop(
    num_tokens: int, with_state: bool, groups: int, check_close: Any
) -> None:
    inputs = make_inputs(num_tokens, groups=groups)
    state = make_state() if with_state else None
    y, final_state = selective_scan_reference(**inputs, initial_state=state)
    result = selective_scan(**inputs, initial_state=state)
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    assert result.states == ()


def test_the_token_loop_follows_the_formula(check_close: Any) -> None:
    inputs, state = make_inputs(2), make_state().double()
    x, dt, A, B, C, z = (inputs[name].double() for name in ("x", "dt", "A", "B", "C", "z"))
    step = torch.log1p(torch.exp(dt + inputs["dt_bias"]))
    for t in range(2):
        for e in range(CHANNELS):
            for n in range(STATE_DIM):
                decay = torch.exp(step[0, t, e] * A[e, n])
                state[0, e, n] = decay * state[0, e, n] + step[0, t, e] * x[0, t, e] * B[0, t, 0, n]
    skipped = inputs["D"] * x[0, 1]
    expected = (state[0] @ C[0, 1, 0] + skipped) * z[0, 1] / (1 + torch.exp(-z[0, 1]))
    y, final_state = selective_scan_reference(**inputs, initial_state=make_state())
    check_close(y[0, 1], expected.float())
    check_close(final_state, state.float())


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 4096])
def test_chunk_size_does_not_change_the_result(chunk_size: int, check_close: Any) -> None:
    inputs = make_inputs(300)
    y, final_state = selective_scan_reference(**inputs, initial_state=make_state())
    result = selective_scan(**inputs, initial_state=make_state(), chunk_size=chunk_size)
    check_close(result.y, y)
    check_close(result.final_state, final_state)


def test_one_state_may_outgrow_the_cache(check_close: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    x, B = torch.randn(1, 9, 20000, generator=rng), torch.randn(1, 9, 1, 16, generator=rng)
    A = -torch.rand(20000, 16, generator=rng)
    y, final_state = selective_scan_reference(x, x.abs(), A, B, B)
    result = selective_scan(x, x.abs(), A, B, B)
    check_close(result.y, y)
    check_close(result.final_state, final_state)


def test_rows_of_a_batch_are_independent(check_close: Any) -> None:
    inputs = make_inputs(130, batch=3, groups=2)
    y, final_state = selective_scan_reference(**inputs, initial_state=make_state(3))
    result = selective_scan(**inputs, initial_state=make_state(3), state_positions=[40])
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    _, at_40 = selective_scan_reference(**tokens(inputs, 0, 40), initial_state=make_state(3))
    check_close(result.states[0], at_40)


def test_groups_equal_scans_of_their_channels(check_close: Any) -> None:
    inputs, state = make_inputs(70, groups=2), make_state()
    whole = selective_scan(**inputs, initial_state=state)
    width = CHANNELS // 2
    for g in range(2):
        channels = slice(g * width, (g + 1) * width)
        part = {name: inputs[name][..., channels] for name in ("x", "dt", "D", "z", "dt_bias")}
        part |= {name: inputs[name][:, :, g : g + 1] for name in ("B", "C")}
        result = selective_scan(
            **part, A=inputs["A"][channels], dt_softplus=True, initial_state=state[:, channels]
        )
        check_close(whole.y[..., channels], result.y)
        check_close(whole.final_state[:, channels], result.final_state)


def test_every_channel_may_have_its_own_group(check_close: Any) -> None:
    inputs = make_inputs(70, groups=CHANNELS)
    y, final_state = selective_scan_reference(**inputs)
    result = selective_scan(**inputs)
    check_close(result.y, y)
    check_close(result.final_state, final_state)


@pytest.mark.parametrize("name", ["D", "z", "dt_bias", "dt_softplus"])
def test_extras_are_optional_and_tell(name: str, check_close: Any) -> None:
    inputs = make_inputs(70)
    inputs |= {"dt": inputs["dt"].abs() * 0.1, "dt_bias": inputs["dt_bias"].abs()}
    full = selective_scan(**inputs)
    without = {other: inputs[other] for other in inputs if other != name}
    y, final_state = selective_scan_reference(**without)
    result = selective_scan(**without)
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    assert not torch.allclose(result.y, full.y)


@pytest.mark.parametrize(
    "log_decay", [-1e-6, -1e-2, -1.4, -3.0, -50.0, -95.0, -1e4], ids=lambda value: f"{value:g}"
)
def test_slow_and_fast_decay(log_decay: float, check_close: Any) -> None:
    inputs = make_inputs(300)
    inputs["A"] = torch.full((CHANNELS, STATE_DIM), log_decay)
    inputs |= {"dt": torch.ones_like(inputs["dt"]), "dt_bias": None, "dt_softplus": False}
    positions = [5, 100, 299]
    y, final_state = selective_scan_reference(**inputs, initial_state=make_state())
    result = selective_scan(**inputs, initial_state=make_state(), state_positions=positions)
    check_close(result.y, y)
    check_close(result.final_state, final_state)
    for position, state in zip(positions, result.states, strict=True):
        part = tokens(inputs, 0, position)
        _, expected = selective_scan_reference(**part, initial_state=make_state())
        check_close(state, expected)


@pytest.mark.parametrize("dt", [95.0, 1e30], ids=str)
def test_a_state_that_decays_at_once_leaves_no_denormals(dt: float) -> None:
    inputs = make_inputs(3)
    inputs |= {"dt": torch.full_like(inputs["dt"], dt), "x": torch.zeros_like(inputs["x"])}
    inputs |= {"A": torch.full_like(inputs["A"], -1.0), "dt_bias": None, "dt_softplus": False}
    state = torch.ones(1, CHANNELS, STATE_DIM)
    positions = [1]
    after = selective_scan(**inputs, initial_state=state, state_positions=positions).states[0]
    selective_state_update(state, **token(inputs, 0))
    for left in (after, state):
        assert bool((left >= torch.finfo(torch.float32).tiny).all())
        assert bool((left < 1e-29).all())


def test_fast_decay_does_not_blur_slow_decay_after_it(check_close: Any) -> None:
    inputs = make_inputs(96)
    inputs |= {"dt": torch.full_like(inputs["dt"], 1e-3), "dt_bias": None, "dt_softplus": False}
    inputs["A"] = torch.full_like(inputs["A"], -1.0)
    inputs["dt"][:, ::16] = 400.0
    # outputs of the tokens with slow decay alone: the large steps would outweigh them
    inputs["x"][:, ::16] = 0.0
    y, final_state = selective_scan_reference(**inputs)
    result = selective_scan(**inputs)
    check_close(result.y, y, 1e-6)
    check_close(result.final_state, final_state, 1e-6)


def test_tokens_with_no_step_leave_the_state_alone() -> None:
    inputs = make_inputs(100)
    inputs |= {"dt": inputs["dt"].abs() * 0.1, "dt_bias": None, "dt_softplus": False}
    inputs["dt"][:, 10:] = 0.0
    result = selective_scan(**inputs, initial_state=make_state(), state_positions=[10])
    assert torch.equal(result.final_state, result.states[0])


@pytest.mark.parametrize("num_tokens", [1, 20, 64, 90, 130, 500])
def test_states_inside_and_between_chunks(num_tokens: int, check_close: Any) -> None:
    inputs, state = make_inputs(num_tokens, groups=2), make_state()
    everywhere = {0, 1, 2, 31, 32, 33, 50, 63, 64, 96, 97, 128, 129, 480, 481, 499, num_tokens}
    positions = sorted(p for p in everywhere if p <= num_tokens)
    result = selective_scan(**inputs, initial_state=state, state_positions=positions, chunk_size=32)
    assert torch.equal(result.states[0], state)
    for position, captured in zip(positions[1:], result.states[1:], strict=True):
        part = tokens(inputs, 0, position)
        _, expected = selective_scan_reference(**part, initial_state=state)
        check_close(captured, expected)


def test_state_before_the_first_token_is_zero_by_default() -> None:
    assert not selective_scan(**make_inputs(5), state_positions=[0]).states[0].any()


def test_capturing_states_does_not_change_the_scan() -> None:
    inputs = make_inputs(200)
    plain = selective_scan(**inputs)
    capturing = selective_scan(**inputs, state_positions=[0, 17, 64, 64, 199, 200, 200])
    assert torch.equal(plain.y, capturing.y)
    assert torch.equal(plain.final_state, capturing.final_state)
    assert torch.equal(capturing.states[2], capturing.states[3])
    assert torch.equal(capturing.states[5], capturing.final_state)
    assert torch.equal(capturing.states[6], capturing.final_state)


@pytest.mark.parametrize("cuts", [[1], [64], [3, 4, 130], [100, 164, 165]], ids=str)
def test_split_runs_equal_one(cuts: list[int], check_close: Any) -> None:
    inputs = make_inputs(200)
    whole = selective_scan(**inputs, initial_state=make_state())
    state, ys = make_state(), []
    for start, stop in zip([0, *cuts], [*cuts, 200], strict=True):
        part = selective_scan(**tokens(inputs, start, stop), initial_state=state)
        state = part.final_state
        ys.append(part.y)
    check_close(torch.cat(ys, dim=1), whole.y)
    check_close(state, whole.final_state)


def test_inputs_may_have_any_strides(check_close: Any) -> None:
    inputs, state = make_inputs(70, batch=2), make_state(2)
    expected = selective_scan(**inputs, initial_state=state)
    channels_first = {
        name: inputs[name].transpose(1, -1).contiguous().transpose(1, -1)
        for name in ("x", "dt", "B", "C", "z")
    }
    channels_first["A"] = inputs["A"].t().contiguous().t()
    flipped = state.transpose(1, 2).contiguous().transpose(1, 2)
    result = selective_scan(**{**inputs, **channels_first}, initial_state=flipped)
    check_close(result.y, expected.y)
    check_close(result.final_state, expected.final_state)


def test_arguments_are_left_alone_and_results_share_memory_with_nothing() -> None:
    plain = {"D": None, "z": None, "dt_bias": None, "dt_softplus": False}
    inputs, state = {**make_inputs(40), **plain}, make_state()
    inputs["dt"] = inputs["dt"].abs()
    arguments = [inputs[name] for name in ("x", "dt", "A", "B", "C")] + [state]
    before = [tensor.clone() for tensor in arguments]
    result = selective_scan(**inputs, initial_state=state, state_positions=[0, 20, 40])
    assert all(map(torch.equal, arguments, before))
    results = [result.y, result.final_state, *result.states]
    storages = {tensor.untyped_storage().data_ptr() for tensor in [*results, inputs["dt"], state]}
    assert len(storages) == len(results) + 2
    for tensor in results:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_bfloat16_inputs_keep_states_in_float32(check_close: Any) -> None:
    inputs = make_inputs(100)
    low = {name: inputs[name].bfloat16() for name in ("x", "dt", "B", "C", "z")}
    # rounded inputs, exact arithmetic: what is lost afterwards would show
    exact = {name: tensor.float() for name, tensor in low.items()}
    y, final_state = selective_scan_reference(**{**inputs, **exact})
    result = selective_scan(**{**inputs, **low}, state_positions=[50])
    check_close(result.y, y.bfloat16())
    check_close(result.final_state, final_state)
    assert result.states[0].dtype == torch.float32


def test_weights_may_require_gradients() -> None:
    inputs = make_inputs(10)
    for name in ("A", "D", "dt_bias"):
        inputs[name].requires_grad_()
    assert not selective_scan(**inputs).y.requires_grad
    state = make_state()
    assert not selective_state_update(state, **token(inputs, 0)).requires_grad
    assert not state.requires_grad


@pytest.mark.parametrize("positions", [[-1], [11], [3, 2]], ids=str)
def test_rejects_positions_out_of_range_or_order(positions: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"state position -?\d+ is out of order or outside 0\.\.10"
    ):
        selective_scan(**make_inputs(10), state_positions=positions)


def test_rejects_an_empty_run_and_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        selective_scan(**make_inputs(0))
    with pytest.raises(ValueError, match="24 channels do not divide into 5 groups"):
        selective_scan(**make_inputs(5, groups=5))
    with pytest.raises(ValueError, match="24 channels do not divide into 5 groups"):
        selective_state_update(make_state(), **token(make_inputs(1, groups=5), 0))
    with pytest.raises(ValueError, match="chunk_size is 0"):
        selective_scan(**make_inputs(5), chunk_size=0)


@pytest.mark.parametrize("name", ["dt", "A", "B", "C", "D", "z", "dt_bias", "initial_state"])
def test_rejects_shapes_that_would_broadcast(name: str) -> None:
    inputs = {**make_inputs(5, batch=2), "initial_state": make_state(2)}
    inputs[name] = inputs[name][..., :1]
    if name == "A":  # its width is the state's
        inputs["A"] = inputs["A"].expand(CHANNELS, STATE_DIM)[:1]
    with pytest.raises(ValueError, match=rf"{name} has shape \(.*\b1\b.*\); .* take \("):
        selective_scan(**inputs)


@pytest.mark.parametrize("family", ["jamba", "falcon_mamba", "zamba"])
def test_equals_the_scan_of_transformers(family: str, check_close: Any) -> None:
    theirs: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    inputs = make_inputs(50, batch=2)
    x, dt, B, C, z = (
        inputs[name].flatten(2).transpose(1, 2) for name in ("x", "dt", "B", "C", "z")
    )
    y, state = theirs.mamba_selective_scan(
        x,
        dt,
        inputs["A"],
        B,
        C,
        D=inputs["D"],
        z=z,
        delta_bias=inputs["dt_bias"],
        delta_softplus=True,
        return_last_state=True,
    )
    result = selective_scan(**inputs)
    check_close(result.y, y.transpose(1, 2))
    check_close(result.final_state, state)
    one = token(make_inputs(1, batch=2, seed=5), 0)
    y = theirs.mamba_selective_state_update(
        state,
        one["x"],
        one["dt"],
        one["A"],
        one["B"][:, 0],
        one["C"][:, 0],
        one["D"],
        z=one["z"],
        dt_bias=one["dt_bias"],
        dt_softplus=True,
    )
    ours = result.final_state
    check_close(selective_state_update(ours, **one), y)
    check_close(ours, state)


@pytest.mark.parametrize("groups", [1, 3, CHANNELS])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_update_matches_the_formula(rows: int, groups: int, check_close: Any) -> None:
    one, state = token(make_inputs(1, rows, groups), 0), make_state(rows)
    before = state.clone()
    y, new_state = selective_state_update_reference(state, **one)
    assert torch.equal(state, before)
    check_close(selective_state_update(state, **one), y)
    check_close(state, new_state)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_update_moves_strided_rows_in_place_and_nothing_else(
    rows: int, groups: int, check_close: Any
) -> None:
    one = token(make_inputs(1, rows, groups), 0)
    memory = torch.randn(rows, ROW + 50, generator=torch.Generator().manual_seed(1))
    before = memory.clone()
    state = memory[:, 20 : 20 + ROW].view(rows, CHANNELS, STATE_DIM)
    y, new_state = selective_state_update_reference(state, **one)
    check_close(selective_state_update(state, **one), y)
    check_close(memory[:, 20 : 20 + ROW].reshape(new_state.shape), new_state)
    assert torch.equal(memory[:, :20], before[:, :20])
    assert torch.equal(memory[:, 20 + ROW :], before[:, 20 + ROW :])


def test_updates_in_a_row_equal_a_scan(check_close: Any) -> None:
    inputs, state = make_inputs(40, batch=2, groups=2), make_state(2)
    scan = selective_scan(**inputs, initial_state=state)
    ys = [selective_state_update(state, **token(inputs, t)) for t in range(40)]
    check_close(torch.stack(ys, 1), scan.y)
    check_close(state, scan.final_state)


@pytest.mark.parametrize("name", ["D", "z", "dt_bias", "dt_softplus"])
def test_extras_of_an_update_are_optional(name: str, check_close: Any) -> None:
    one, state = token(make_inputs(1, batch=2), 0), make_state(2)
    one |= {"dt": one["dt"].abs() * 0.1, "dt_bias": one["dt_bias"].abs()}
    del one[name]
    y, new_state = selective_state_update_reference(state, **one)
    check_close(selective_state_update(state, **one), y)
    check_close(state, new_state)


def test_update_keeps_a_float32_state_beside_bfloat16_inputs(check_close: Any) -> None:
    one, state = token(make_inputs(1, batch=2), 0), make_state(2)
    low = {name: one[name].bfloat16() for name in ("x", "dt", "B", "C", "z")}
    exact = {name: tensor.float() for name, tensor in low.items()}
    y, new_state = selective_state_update_reference(state, **{**one, **exact})
    check_close(selective_state_update(state, **{**one, **low}), y.bfloat16())
    check_close(state, new_state)
