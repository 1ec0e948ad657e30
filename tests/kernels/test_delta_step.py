from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from testkit.rows import DTYPES, generator, needs_compiled
from torch import Tensor

from agentcache.kernels.causal_conv1d import causal_conv1d
from agentcache.kernels.delta_step import delta_step, delta_step_reference
from agentcache.kernels.gated_delta import gated_delta

POOL = 33
UNUSED = 3  # numbers between the tensors of a row
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Sizes:
    num_key_heads: int = 2
    key_dim: int = 16
    num_heads: int = 4
    value_dim: int = 32
    num_taps: int = 4
    by_channel: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_heads, self.key_dim, self.value_dim


SIZES = [
    Sizes(),
    Sizes(by_channel=True),
    Sizes(1, 5, 3, 7, num_taps=2),
    Sizes(4, 20, 4, 20, by_channel=True),
    Sizes(2, 33, 2, 65, num_taps=3),
]
LARGE = [Sizes(4, 64, 8, 64), Sizes(6, 50, 6, 70, by_channel=True)]
"""So much work that threads share it; widths a multiple of 16, and not."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows of numbers of which each holds a convolution's and a recurrent state."""

    memory: Tensor
    sizes: Sizes

    @classmethod
    def of(cls, sizes: Sizes) -> Pool:
        rng = generator(1)
        num_heads, key_dim, value_dim = sizes.state
        num = sizes.channels * (sizes.num_taps - 1) + num_heads * key_dim * value_dim
        return cls(torch.randn(POOL, num + 3 * UNUSED, generator=rng), sizes)

    def clone(self) -> Pool:
        return Pool(self.memory.clone(), self.sizes)

    @property
    def conv(self) -> Tensor:
        shape = (self.sizes.channels, self.sizes.num_taps - 1)
        return self.memory[:, UNUSED:][:, : shape[0] * shape[1]].unflatten(1, shape)

    @property
    def state(self) -> Tensor:
        start = 2 * UNUSED + self.sizes.channels * (self.sizes.num_taps - 1)
        return self.memory[:, start:-UNUSED].unflatten(1, self.sizes.state)


def make_weights(sizes: Sizes) -> dict[str, Any]:
    rng = generator(2)
    shape = (sizes.num_heads, sizes.key_dim) if sizes.by_channel else (sizes.num_heads,)
    return {
        "taps": torch.randn(sizes.channels, sizes.num_taps, generator=rng),
        "bias": torch.randn(sizes.channels, generator=rng),
        "act": F.silu,
        "A": -torch.logspace(-4, 1, sizes.num_heads),
        "dt_bias": torch.randn(shape, generator=rng),
        "num_key_heads": sizes.num_key_heads,
        "eps": EPS,
    }


def make_inputs(
    sizes: Sizes, num_rows: int = 3, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Parts of one product, rows apart."""
    rng = generator(0)
    heads = sizes.num_heads
    num_decays = heads * sizes.key_dim if sizes.by_channel else heads
    parts = [sizes.channels, 2, heads, num_decays, 1]
    projected = torch.randn(num_rows, sum(parts), generator=rng).to(dtype)
    mixed, _, beta, decay, _ = projected.split(parts, -1)
    return {
        "mixed": mixed,
        "decay": decay.unflatten(-1, (heads, -1)) if sizes.by_channel else decay,
        "beta": beta,
        "rows": torch.randperm(POOL, generator=rng)[:num_rows],
        **make_weights(sizes),
    }


def check_step(pool: Pool, inputs: dict[str, Any], check_close: Any) -> None:
    """Outputs and the states moved on are the reference's, and nothing else has changed."""
    expected, before = pool.clone(), pool.clone()
    wanted = delta_step_reference(conv=expected.conv, state=expected.state, **inputs)
    y = delta_step(conv=pool.conv, state=pool.state, **inputs)
    check_close(y, wanted)
    check_close(pool.state, expected.state)
    assert torch.equal(pool.conv, expected.conv)
    rows = inputs["rows"]
    before.conv[rows], before.state[rows] = pool.conv[rows], pool.state[rows]
    assert torch.equal(pool.memory, before.memory)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matches_the_reference_and_leaves_the_rest_of_the_pool(
    sizes: Sizes, dtype: torch.dtype, check_close: Any
) -> None:
    for num_rows in (1, 2, 7, 32):
        check_step(Pool.of(sizes), make_inputs(sizes, num_rows, dtype), check_close)


@needs_compiled
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_threads_share_the_work(sizes: Sizes, threads: int, check_close: Any) -> None:
    torch.set_num_threads(threads)
    for num_rows in (1, 5):
        check_step(Pool.of(sizes), make_inputs(sizes, num_rows), check_close)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("act", [None, F.silu, F.gelu], ids=["none", "silu", "gelu"])
def test_bias_and_activation_are_optional(act: Any, check_close: Any) -> None:
    check_step(Pool.of(Sizes()), make_inputs(Sizes()) | {"bias": None, "act": act}, check_close)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("by_channel", [False, True])
def test_decays_of_all_sizes(by_channel: bool, check_close: Any) -> None:
    """From none to all, also where a softplus is its input."""
    sizes = Sizes(by_channel=by_channel)
    inputs = make_inputs(sizes, 5)
    spread = torch.tensor([-100.0, -1.0, 19.0, 25.0])
    inputs["decay"][:] = spread[:, None] if by_channel else spread
    check_step(Pool.of(sizes), inputs, check_close)
    inputs["A"] = -torch.full((4,), 100.0)
    check_step(Pool.of(sizes), inputs, check_close)


@pytest.mark.usefixtures("form")
def test_queries_and_keys_of_zero_length_read_and_write_nothing(check_close: Any) -> None:
    sizes, inputs = Sizes(), make_inputs(Sizes()) | {"bias": None}
    inputs["taps"][: 2 * sizes.num_key_heads * sizes.key_dim] = 0
    pool = Pool.of(sizes)
    before = pool.clone()
    y = delta_step(conv=pool.conv, state=pool.state, **inputs)
    assert torch.equal(y, torch.zeros_like(y))
    decay = inputs["A"] * F.softplus(inputs["decay"] + inputs["dt_bias"])
    left = before.state[inputs["rows"]] * decay.exp()[..., None, None]
    check_close(pool.state[inputs["rows"]], left)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("by_channel", [False, True])
def test_steps_in_a_row_equal_a_scan(by_channel: bool, check_close: Any) -> None:
    """Over 20 tokens of one sequence: convolution and scan of all of them at once."""
    sizes = Sizes(by_channel=by_channel)
    pool, weights, at = Pool.of(sizes), make_weights(sizes), torch.tensor([4])
    start = pool.clone()
    names = ("mixed", "decay", "beta")
    inputs = [make_inputs(sizes, 20)[name] for name in names]
    steps = [
        delta_step(*(each[t : t + 1] for each in inputs), pool.conv, pool.state, at, **weights)
        for t in range(20)
    ]
    mixed, decay, beta = (each[None] for each in inputs)
    convolved = causal_conv1d(
        mixed, weights["taps"], weights["bias"], start.conv[at], activation="silu"
    )
    keys = sizes.num_key_heads * sizes.key_dim
    q, k, v = convolved.y.split([keys, keys, sizes.num_heads * sizes.value_dim], -1)
    q, k = (
        F.normalize(each.unflatten(-1, (-1, sizes.key_dim)), dim=-1, eps=EPS) for each in (q, k)
    )
    rates = weights["A"][:, None] if by_channel else weights["A"]
    scan = gated_delta(
        q * sizes.key_dim**-0.5,
        k,
        v.unflatten(-1, (sizes.num_heads, -1)),
        rates * F.softplus(decay + weights["dt_bias"]),
        beta.sigmoid(),
        initial_state=start.state[at],
    )
    check_close(torch.cat(steps), scan.y[0], 1e-5)
    check_close(pool.state[at], scan.final_state, 1e-5)
    assert torch.equal(pool.conv[at], convolved.final_state)


@needs_compiled
@pytest.mark.parametrize("sizes", [*SIZES, *LARGE], ids=str)
def test_a_row_steps_the_same_alone_and_among_others(sizes: Sizes) -> None:
    inputs, alone = make_inputs(sizes, 5), Pool.of(sizes)
    expected = []
    for row in range(5):
        one = {name: inputs[name][row : row + 1] for name in ("mixed", "decay", "beta", "rows")}
        expected.append(delta_step(conv=alone.conv, state=alone.state, **inputs | one))
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        pool = Pool.of(sizes)
        y = delta_step(conv=pool.conv, state=pool.state, **inputs)
        assert torch.equal(y, torch.cat(expected))
        assert torch.equal(pool.memory, alone.memory)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("part", ["mixed", "decay", "beta", "conv", "state"])
@pytest.mark.parametrize("by_channel", [False, True])
def test_nan_is_seen_in_the_outputs_of_its_row_only(by_channel: bool, part: str) -> None:
    sizes = Sizes(by_channel=by_channel)
    pool, inputs = Pool.of(sizes), make_inputs(sizes)
    if part in inputs:
        inputs[part][1, 3] = torch.nan
    else:
        (pool.conv if part == "conv" else pool.state)[inputs["rows"][1], 3, 1] = torch.nan
    y = delta_step(conv=pool.conv, state=pool.state, **inputs)
    assert bool(y[1].isnan().any())
    assert not bool(y[[0, 2]].isnan().any())


@pytest.mark.parametrize("what", ["mixed", "decay", "taps", "conv", "act"])
def test_other_types_and_layouts_take_the_reference(what: str) -> None:
    pool, plain, inputs = Pool.of(Sizes()), Pool.of(Sizes()), make_inputs(Sizes())
    conv = plain.conv
    if what == "mixed":
        inputs["mixed"] = inputs["mixed"].t().contiguous().t()
    elif what == "decay":
        inputs["decay"] = inputs["decay"].double()
    elif what == "taps":
        inputs["taps"] = inputs["taps"].bfloat16()
    elif what == "conv":
        conv = conv.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        inputs["act"] = F.softplus
    wanted = delta_step_reference(conv=pool.conv, state=pool.state, **inputs)
    assert torch.equal(delta_step(conv=conv, state=plain.state, **inputs), wanted)
    assert torch.equal(conv, pool.conv)
    assert torch.equal(plain.state, pool.state)
