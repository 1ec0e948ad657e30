from __future__ import annotations

from typing import Any

import pytest
import torch

from agentcache.kernels.ssd_scan import ssd_scan
from agentcache.kernels.state_update import state_update, state_update_reference

HEADS, HEAD_DIM, STATE_DIM = 4, 8, 16
ROW = HEADS * HEAD_DIM * STATE_DIM


def make_inputs(rows: int, groups: int = 1, seed: int = 0) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, HEADS, HEAD_DIM, generator=rng),
        "dt": torch.rand(rows, HEADS, generator=rng),
        "A": -torch.tensor([1e-6, 0.3, 2.0, 200.0]),
        "B": torch.randn(rows, groups, STATE_DIM, generator=rng),
        "C": torch.randn(rows, groups, STATE_DIM, generator=rng),
        "D": torch.randn(HEADS, generator=rng),
    }


def make_rows(rows: int, row_stride: int = ROW) -> torch.Tensor:
    """Rows of random bytes, of which the state is a part in the middle."""
    rng = torch.Generator().manual_seed(1)
    return torch.randn(rows, row_stride, generator=rng)


@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_matches_the_formula(rows: int, groups: int, check_close: Any) -> None:
    inputs = make_inputs(rows, groups)
    state = make_rows(rows).view(rows, HEADS, HEAD_DIM, STATE_DIM)
    y, new_state = state_update_reference(state, **inputs)
    check_close(state_update(state, **inputs), y)
    check_close(state, new_state)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_updates_strided_rows_in_place_and_nothing_else(
    rows: int, groups: int, check_close: Any
) -> None:
    inputs = make_inputs(rows, groups)
    memory = make_rows(rows, ROW + 50)
    before = memory.clone()
    state = memory[:, 20 : 20 + ROW].view(rows, HEADS, HEAD_DIM, STATE_DIM)
    y, new_state = state_update_reference(state, **inputs)
    check_close(state_update(state, **inputs), y)
    check_close(memory[:, 20 : 20 + ROW].reshape(new_state.shape), new_state)
    assert torch.equal(memory[:, :20], before[:, :20])
    assert torch.equal(memory[:, 20 + ROW :], before[:, 20 + ROW :])


def test_steps_in_a_row_equal_a_scan(check_close: Any) -> None:
    steps = [make_inputs(1, seed=seed) for seed in range(40)]
    start = make_rows(1).view(1, HEADS, HEAD_DIM, STATE_DIM)
    state = start.clone()
    ys = [state_update(state, **{**step, "D": steps[0]["D"]}) for step in steps]
    run = {name: torch.stack([step[name] for step in steps], 1) for name in ("x", "dt", "B", "C")}
    scan = ssd_scan(**run, A=steps[0]["A"], D=steps[0]["D"], initial_state=start)
    check_close(torch.stack(ys, 1), scan.y)
    check_close(state, scan.final_state)


def test_bfloat16_inputs_keep_the_state_in_float32(check_close: Any) -> None:
    inputs = make_inputs(2)
    state = make_rows(2).view(2, HEADS, HEAD_DIM, STATE_DIM)
    y, new_state = state_update_reference(state, **inputs)
    low = {name: inputs[name].bfloat16() for name in ("x", "B", "C")}
    check_close(state_update(state, **{**inputs, **low}), y.bfloat16())
    check_close(state, new_state, 8e-3)


def test_weights_may_require_gradients() -> None:
    inputs = make_inputs(1)
    inputs["A"].requires_grad_()
    inputs["D"].requires_grad_()
    state = make_rows(1).view(1, HEADS, HEAD_DIM, STATE_DIM)
    assert not state_update(state, **inputs).requires_grad
    assert not state.requires_grad


def test_skip_weights_are_optional(check_close: Any) -> None:
    inputs = {**make_inputs(2), "D": None}
    state = make_rows(2).view(2, HEADS, HEAD_DIM, STATE_DIM)
    y, _ = state_update_reference(state, **inputs)
    check_close(state_update(state, **inputs), y)
