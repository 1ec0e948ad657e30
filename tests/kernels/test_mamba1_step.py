from __future__ import annotations

from typing import Any

import pytest
import torch
from testkit.rows import DTYPES, generator, needs_compiled
from torch import Tensor

from agentcache.kernels.mamba1_step import mamba1_step, mamba1_step_reference
from agentcache.kernels.selective_scan import selective_scan

POOL = 33
UNUSED = 5  # numbers between the states of two rows
SIZES = [(16, 16), (35, 16), (1, 8), (50, 20), (64, 33)]
LARGE = [(2080, 16), (1500, 24)]
"""So much work that threads share it."""
ROWS = ("x", "dt", "b", "c", "gate", "rows")


def make_memory(sizes: tuple[int, int]) -> Tensor:
    rng = generator(1)
    return torch.randn(POOL, sizes[0] * sizes[1] + UNUSED, generator=rng)


def state_in(memory: Tensor, sizes: tuple[int, int]) -> Tensor:
    """States in the rows of a pool that hold more."""
    return memory[:, 2 : 2 + sizes[0] * sizes[1]].unflatten(1, sizes)


def make_weights(sizes: tuple[int, int]) -> dict[str, Any]:
    channels, state_dim = sizes
    rng = generator(2)
    return {
        "dt_bias": torch.randn(channels, generator=rng),
        "A": -torch.logspace(-4, 1, channels * state_dim).view(sizes),
        "D": torch.randn(channels, generator=rng),
    }


def make_inputs(
    sizes: tuple[int, int], num_rows: int = 3, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """gate: the second half of something wider."""
    channels, state_dim = sizes
    rng = generator(0)
    x, dt, wide, *bc = (
        torch.randn(num_rows, width, generator=rng).to(dtype)
        for width in (channels, channels, 2 * channels, state_dim, state_dim)
    )
    return {
        "x": x,
        "dt": dt,
        "b": bc[0],
        "c": bc[1],
        "gate": wide[:, channels:],
        "rows": torch.randperm(POOL, generator=rng)[:num_rows],
        **make_weights(sizes),
    }


def check_step(sizes: tuple[int, int], inputs: dict[str, Any], check_close: Any) -> None:
    """Outputs and the states moved on are the reference's, and nothing else has changed."""
    memory, expected, before = make_memory(sizes), make_memory(sizes), make_memory(sizes)
    wanted = mamba1_step_reference(state=state_in(expected, sizes), **inputs)
    check_close(mamba1_step(state=state_in(memory, sizes), **inputs), wanted)
    check_close(memory, expected)
    rows = inputs["rows"]
    state_in(before, sizes)[rows] = state_in(memory, sizes)[rows]
    assert torch.equal(memory, before)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_the_reference_and_leaves_the_rest_of_the_pool(
    sizes: tuple[int, int], dtype: torch.dtype, check_close: Any
) -> None:
    for num_rows in (1, 2, 7, 32):
        check_step(sizes, make_inputs(sizes, num_rows, dtype), check_close)


@pytest.mark.usefixtures("form")
def test_time_steps_of_all_sizes(check_close: Any) -> None:
    inputs = make_inputs((16, 16), 5)
    inputs["dt"][:] = torch.tensor([-100.0, -1.0, 19.0, 25.0]).repeat(4)
    check_step((16, 16), inputs, check_close)


@pytest.mark.usefixtures("form")
def test_steps_in_a_row_equal_a_scan(check_close: Any) -> None:
    sizes, at = (35, 16), torch.tensor([4])
    state, weights = state_in(make_memory(sizes), sizes), make_weights(sizes)
    start, inputs = state.clone(), make_inputs(sizes, 20)
    tokens = [inputs[name] for name in ROWS[:-1]]
    steps = [
        mamba1_step(*(each[t : t + 1] for each in tokens), state, at, **weights) for t in range(20)
    ]
    x, dt, b, c, gate = (each[None] for each in tokens)
    scan = selective_scan(
        x,
        dt,
        B=b[:, :, None],
        C=c[:, :, None],
        z=gate,
        initial_state=start[at],
        dt_softplus=True,
        **weights,
    )
    check_close(torch.cat(steps), scan.y[0])
    check_close(state[at], scan.final_state)


@needs_compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, *LARGE], ids=str)
def test_a_row_steps_the_same_alone_and_among_others(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs, alone = make_inputs(sizes, 5, dtype), make_memory(sizes)
    expected = []
    for row in range(5):
        one = {name: inputs[name][row : row + 1] for name in ROWS}
        expected.append(mamba1_step(state=state_in(alone, sizes), **inputs | one))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        memory = make_memory(sizes)
        assert torch.equal(
            mamba1_step(state=state_in(memory, sizes), **inputs), torch.cat(expected)
        )
        assert torch.equal(memory, alone)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("part", ["x", "dt", "b", "c", "gate", "state"])
def test_nan_is_seen_in_the_outputs_of_its_row_only(part: str) -> None:
    sizes = (35, 16)
    state, inputs = state_in(make_memory(sizes), sizes), make_inputs(sizes)
    if part == "state":
        state[inputs["rows"][1], 3, 5] = torch.nan
    else:
        inputs[part][1, 3] = torch.nan
    bad = mamba1_step(state=state, **inputs).isnan()
    assert bool(bad[1].any())
    assert bool(bad[1].all()) == (part in ("b", "c"))
    assert not bool(bad[[0, 2]].any())


@pytest.mark.parametrize("what", ["x", "gate", "state"])
def test_other_types_and_layouts_take_the_reference(what: str, check_close: Any) -> None:
    sizes = (35, 16)
    state, expected = (state_in(make_memory(sizes), sizes) for _ in range(2))
    inputs = make_inputs(sizes)
    if what == "x":
        inputs["x"] = inputs["x"].t().contiguous().t()
    elif what == "gate":
        inputs["gate"] = inputs["gate"].bfloat16()
    else:
        state = state.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = mamba1_step_reference(state=expected, **inputs)
    check_close(mamba1_step(state=state, **inputs), wanted)
    check_close(state, expected)
