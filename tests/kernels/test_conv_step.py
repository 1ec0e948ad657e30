from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from testkit.rows import DTYPES, generator, needs_compiled
from torch import Tensor

from agentcache.kernels.causal_conv1d import causal_conv1d
from agentcache.kernels.conv_step import conv_step, conv_step_reference
from agentcache.kernels.row_gates import gelu_tanh

POOL = 40
UNUSED = 3  # numbers between rows of the pool
ACTS = [None, F.silu, gelu_tanh]


def make_memory(channels: int, num_taps: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = generator(1)
    return torch.randn(POOL, channels * (num_taps - 1) + UNUSED, generator=rng).to(dtype)


def conv_in(memory: Tensor, channels: int, num_taps: int) -> Tensor:
    """States in the rows of a pool that hold more."""
    held = num_taps - 1
    return memory[:, 1 : 1 + channels * held].unflatten(1, (channels, held))


def make_inputs(
    channels: int, num_taps: int, num_rows: int = 3, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """x: columns of something wider."""
    rng = generator(0)
    return {
        "x": torch.randn(num_rows, channels + 7, generator=rng).to(dtype)[:, 3 : 3 + channels],
        "rows": torch.randperm(POOL, generator=rng)[:num_rows],
        "taps": torch.randn(channels, num_taps, generator=rng),
        "bias": torch.randn(channels, generator=rng),
        "act": F.silu,
    }


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("held_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_taps", [2, 3, 4, 5])
@pytest.mark.parametrize("channels", [1, 16, 35, 200])
def test_matches_the_reference_and_leaves_the_rest_of_the_pool(
    channels: int,
    num_taps: int,
    dtype: torch.dtype,
    held_dtype: torch.dtype,
    check_close: Any,
) -> None:
    for num_rows in (1, 2, 7, 32):
        inputs = make_inputs(channels, num_taps, num_rows, dtype)
        memory = make_memory(channels, num_taps, held_dtype)
        expected = memory.clone()
        wanted = conv_step_reference(conv=conv_in(expected, channels, num_taps), **inputs)
        y = conv_step(conv=conv_in(memory, channels, num_taps), **inputs)
        check_close(y, wanted)
        assert torch.equal(memory, expected)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("act", ACTS, ids=["none", "silu", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_bias_and_activation_are_optional(has_bias: bool, act: Any, check_close: Any) -> None:
    """Against the formula in float64."""
    inputs = make_inputs(50, 4) | {"act": act}
    inputs["bias"] = inputs["bias"] if has_bias else None
    conv = conv_in(make_memory(50, 4), 50, 4)
    window = torch.cat([conv[inputs["rows"]], inputs["x"][..., None]], -1).double()
    wide = (window * inputs["taps"].double()).sum(-1)
    wide = wide + inputs["bias"].double() if has_bias else wide
    check_close(conv_step(conv=conv, **inputs), (wide if act is None else act(wide)).float())


@pytest.mark.usefixtures("form")
def test_steps_in_a_row_equal_a_convolution(check_close: Any) -> None:
    inputs, at = make_inputs(50, 4, 20), torch.tensor([4])
    tokens, given = inputs["x"], {name: inputs[name] for name in ("taps", "bias", "act")}
    conv = conv_in(make_memory(50, 4), 50, 4)
    whole = causal_conv1d(tokens[None], given["taps"], given["bias"], conv[at], activation="silu")
    steps = [conv_step(token[None], conv, at, **given) for token in tokens]
    check_close(torch.cat(steps), whole.y[0])
    assert torch.equal(conv[at], whole.final_state)


@needs_compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "num_taps"), [(35, 4), (9000, 4), (9001, 3)])
def test_a_row_steps_the_same_alone_and_among_others(
    channels: int, num_taps: int, dtype: torch.dtype
) -> None:
    inputs, alone = make_inputs(channels, num_taps, 5, dtype), make_memory(channels, num_taps)
    expected = []
    for row in range(5):
        one = {name: inputs[name][row : row + 1] for name in ("x", "rows")}
        expected.append(conv_step(conv=conv_in(alone, channels, num_taps), **inputs | one))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        memory = make_memory(channels, num_taps)
        y = conv_step(conv=conv_in(memory, channels, num_taps), **inputs)
        assert torch.equal(y, torch.cat(expected))
        assert torch.equal(memory, alone)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("part", ["x", "conv"])
def test_nan_is_seen_in_its_channel_only(part: str) -> None:
    inputs, memory = make_inputs(35, 4), make_memory(35, 4)
    conv = conv_in(memory, 35, 4)
    if part == "x":
        inputs["x"][1, 33] = torch.nan
    else:
        conv[inputs["rows"][1], 33, 1] = torch.nan
    assert conv_step(conv=conv, **inputs).isnan().nonzero().tolist() == [[1, 33]]


@pytest.mark.parametrize("what", ["x", "taps", "conv", "act"])
def test_other_types_and_layouts_take_the_reference(what: str) -> None:
    inputs, expected = make_inputs(35, 4), conv_in(make_memory(35, 4), 35, 4)
    conv = conv_in(make_memory(35, 4), 35, 4)
    if what == "x":
        inputs["x"] = inputs["x"].t().contiguous().t()
    elif what == "taps":
        inputs["taps"] = inputs["taps"].bfloat16()
    elif what == "conv":
        conv = conv.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        inputs["act"] = F.softplus
    wanted = conv_step_reference(conv=expected, **inputs)
    assert torch.equal(conv_step(conv=conv, **inputs), wanted)
    assert torch.equal(conv, expected)
