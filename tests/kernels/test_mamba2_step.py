from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from testkit.rows import DTYPES, generator, needs_compiled
from torch import Tensor

from agentcache.kernels.causal_conv1d import causal_conv1d
from agentcache.kernels.mamba2_step import mamba2_step, mamba2_step_reference
from agentcache.kernels.ssd_scan import ssd_scan

POOL = 9
UNUSED = 12  # bytes between the tensors of a row


@dataclass(frozen=True, slots=True)
class Sizes:
    num_heads: int = 4
    head_dim: int = 8
    num_groups: int = 1
    state_dim: int = 16
    num_taps: int = 4

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.width + 2 * self.num_groups * self.state_dim


SIZES = [
    Sizes(),
    Sizes(num_groups=2, state_dim=20),
    Sizes(num_heads=6, head_dim=5, num_groups=2, state_dim=128),
    Sizes(num_taps=2),
    Sizes(num_heads=1, num_groups=1, state_dim=20, num_taps=2),
]
LARGE = [Sizes(num_heads=12, head_dim=32, state_dim=64), Sizes(10, 20, 1, 50)]
"""So much work that threads share it; channels a multiple of 32, and not."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of bytes of which each holds a convolution's and a recurrent state, as pools have it."""

    memory: Tensor
    sizes: Sizes
    conv_dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, sizes: Sizes, conv_dtype: torch.dtype = torch.float32) -> Pool:
        rng = generator(1)
        conv = torch.randn(POOL, sizes.channels * (sizes.num_taps - 1), generator=rng)
        state = torch.randn(POOL, sizes.width * sizes.state_dim, generator=rng)
        unused = torch.randint(256, (POOL, UNUSED), dtype=torch.uint8, generator=rng)
        parts = [conv.to(conv_dtype).view(torch.uint8), unused, state.view(torch.uint8), unused]
        return cls(torch.cat([unused, *parts], 1), sizes, conv_dtype)

    def clone(self) -> Pool:
        return Pool(self.memory.clone(), self.sizes, self.conv_dtype)

    @property
    def conv(self) -> Tensor:
        sizes, held = self.sizes, self.sizes.num_taps - 1
        end = UNUSED + sizes.channels * held * self.conv_dtype.itemsize
        flat = self.memory[:, UNUSED:end].view(self.conv_dtype)
        return flat.view(POOL, sizes.channels, held)

    @property
    def state(self) -> Tensor:
        sizes = self.sizes
        start = 2 * UNUSED + sizes.channels * (sizes.num_taps - 1) * self.conv_dtype.itemsize
        flat = self.memory[:, start:-UNUSED].view(torch.float32)
        return flat.view(POOL, sizes.num_heads, sizes.head_dim, sizes.state_dim)


def make_inputs(
    sizes: Sizes, num_rows: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Any]:
    rng = generator(seed)
    inputs = sizes.width + sizes.channels + sizes.num_heads
    return {
        "projected": torch.randn(num_rows, inputs, generator=rng).to(dtype),
        "rows": torch.randperm(POOL, generator=rng)[:num_rows],
        **make_weights(sizes),
    }


def make_weights(sizes: Sizes) -> dict[str, Any]:
    rng = generator(2)
    return {
        "taps": torch.randn(sizes.channels, sizes.num_taps, generator=rng),
        "bias": torch.randn(sizes.channels, generator=rng),
        "dt_bias": torch.randn(sizes.num_heads, generator=rng),
        "dt_limits": (0.0, inf),
        "A": -torch.logspace(-6, 1, sizes.num_heads),
        "D": torch.randn(sizes.num_heads, generator=rng),
        "num_groups": sizes.num_groups,
    }


def check_step(pool: Pool, inputs: dict[str, Any], check_close: Any) -> None:
    """Outputs and the states moved on are the reference's, and nothing else has changed."""
    expected, before = pool.clone(), pool.clone()
    wanted = mamba2_step_reference(conv=expected.conv, state=expected.state, **inputs)
    y = mamba2_step(conv=pool.conv, state=pool.state, **inputs)
    # the reference rounds what it has convolved to the type of the inputs, which moves states, too
    rounds = None if inputs["projected"].dtype == torch.float32 else 8e-3
    check_close(y.float(), wanted.float(), rounds)
    check_close(pool.state, expected.state, rounds)
    assert torch.equal(pool.conv, expected.conv)
    rows = inputs["rows"]
    before.conv[rows], before.state[rows] = pool.conv[rows], pool.state[rows]
    assert torch.equal(pool.memory, before.memory)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("conv_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_the_reference_and_leaves_the_rest_of_the_pool(
    sizes: Sizes, dtype: torch.dtype, conv_dtype: torch.dtype, check_close: Any
) -> None:
    for num_rows in (1, 2, 7):
        inputs = make_inputs(sizes, num_rows, dtype)
        check_step(Pool.of(sizes, conv_dtype), inputs, check_close)


@needs_compiled
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_threads_share_the_work(sizes: Sizes, threads: int, check_close: Any) -> None:
    torch.set_num_threads(threads)
    for num_rows in (1, 5):
        check_step(Pool.of(sizes), make_inputs(sizes, num_rows), check_close)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num_taps", [2, 4])
def test_bias_is_optional(num_taps: int, check_close: Any) -> None:
    sizes = Sizes(num_taps=num_taps)
    check_step(Pool.of(sizes), make_inputs(sizes) | {"bias": None}, check_close)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("limits", [(0.0, inf), (0.5, 0.6), (1.0, inf), (0.0, 0.1)], ids=str)
def test_time_steps_keep_to_their_limits(limits: tuple[float, float], check_close: Any) -> None:
    inputs = make_inputs(Sizes(), 5) | {"dt_limits": limits}
    inputs["projected"][:, -4:] = torch.tensor([-100.0, -1.0, 1.0, 30.0])
    check_step(Pool.of(Sizes()), inputs, check_close)


@pytest.mark.usefixtures("form")
def test_steps_in_a_row_equal_a_scan(check_close: Any) -> None:
    """Over 20 tokens of one sequence: convolution and scan of all of them at once."""
    sizes, pool = Sizes(num_groups=2), Pool.of(Sizes(num_groups=2))
    weights, at = make_weights(sizes), torch.tensor([4])
    tokens = (
        make_inputs(sizes, 8)["projected"].repeat(3, 1)[:20] * torch.linspace(0.5, 2, 20)[:, None]
    )
    start = pool.clone()
    steps = [mamba2_step(token[None], pool.conv, pool.state, at, **weights) for token in tokens]
    _, mixed, dt = tokens[None].split([sizes.width, sizes.channels, sizes.num_heads], -1)
    convolved = causal_conv1d(
        mixed, weights["taps"], weights["bias"], start.conv[at], activation="silu"
    )
    grouped = sizes.num_groups * sizes.state_dim
    x, b, c = convolved.y.split([sizes.width, grouped, grouped], -1)
    scan = ssd_scan(
        x.unflatten(-1, (sizes.num_heads, -1)),
        F.softplus(dt + weights["dt_bias"]),
        weights["A"],
        b.unflatten(-1, (sizes.num_groups, -1)),
        c.unflatten(-1, (sizes.num_groups, -1)),
        D=weights["D"],
        initial_state=start.state[at],
    )
    check_close(torch.cat(steps), scan.y[0].flatten(1))
    check_close(pool.state[at], scan.final_state)
    assert torch.equal(pool.conv[at], convolved.final_state)


@needs_compiled
@pytest.mark.parametrize("sizes", [*SIZES, *LARGE], ids=str)
def test_a_row_steps_the_same_alone_and_among_others(sizes: Sizes) -> None:
    inputs, alone = make_inputs(sizes, 5), Pool.of(sizes)
    expected = []
    for row in range(5):
        one = {name: inputs[name][row : row + 1] for name in ("projected", "rows")}
        expected.append(mamba2_step(conv=alone.conv, state=alone.state, **inputs | one))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        pool = Pool.of(sizes)
        y = mamba2_step(conv=pool.conv, state=pool.state, **inputs)
        assert torch.equal(y, torch.cat(expected))
        assert torch.equal(pool.memory, alone.memory)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("part", ["gate", "x", "B", "dt", "conv", "state"])
def test_nan_is_seen_in_the_outputs_of_its_row_only(part: str) -> None:
    sizes, pool = Sizes(), Pool.of(Sizes())
    inputs = make_inputs(sizes)
    columns = {"gate": 3, "x": sizes.width + 3, "B": 2 * sizes.width + 3, "dt": -1}
    if part in columns:
        inputs["projected"][1, columns[part]] = torch.nan
    else:
        (pool.conv if part == "conv" else pool.state)[inputs["rows"][1]].view(-1)[3] = torch.nan
    expected = pool.clone()
    wanted = mamba2_step_reference(conv=expected.conv, state=expected.state, **inputs).isnan()
    bad = mamba2_step(conv=pool.conv, state=pool.state, **inputs).isnan()
    assert bool(wanted[1].any()) == (part != "gate")
    assert torch.equal(bad, wanted)
    assert torch.equal(pool.state.isnan(), expected.state.isnan())


@pytest.mark.parametrize("what", ["projected", "taps", "conv"])
def test_other_types_and_layouts_take_the_reference(what: str, check_close: Any) -> None:
    pool, plain, inputs = Pool.of(Sizes()), Pool.of(Sizes()), make_inputs(Sizes())
    conv = plain.conv
    if what == "projected":
        inputs["projected"] = inputs["projected"].repeat(1, 2)[:, : inputs["projected"].shape[1]]
    elif what == "taps":
        inputs["taps"] = inputs["taps"].bfloat16()
    else:
        conv = conv.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = mamba2_step_reference(conv=pool.conv, state=pool.state, **inputs)
    check_close(mamba2_step(conv=conv, state=plain.state, **inputs), wanted)
    assert torch.equal(conv, pool.conv)
    assert torch.equal(plain.state, pool.state)
