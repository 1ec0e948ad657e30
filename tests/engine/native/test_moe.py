"""Experts of few tokens and of many, with weights as given and in 8 bits, give the formula."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agentcache.engine.native.linear import LinearStack
from agentcache.engine.native.moe import Experts, softmax_of_best
from agentcache.kernels import rows
from agentcache.kernels.row_experts import mix_reference
from agentcache.kernels.row_gates import relu_squared

if TYPE_CHECKING:
    from agentcache.engine.native.packing import Pass

NUM, WIDTH, MIDDLE = 6, 40, 24
NO_PASS = cast("Pass", None)
each_form = pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "fallback"])


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_experts(dtype: torch.dtype, gated: bool, rounded: bool) -> Experts:
    made = Experts(
        route=softmax_of_best(drawn(NUM, WIDTH, seed=1, dtype=dtype), 2),
        up=LinearStack(drawn(NUM, (1 + gated) * MIDDLE, WIDTH, seed=2, dtype=dtype) / 6),
        down=LinearStack(drawn(NUM, WIDTH, MIDDLE, seed=3, dtype=dtype) / 6),
        act=F.silu if gated else relu_squared,
        gated=gated,
    )
    if rounded:
        made.up.round_to_int8()
        made.down.round_to_int8()
    return made


def formula(experts: Experts, x: Tensor) -> Tensor:
    up, down = experts.up, experts.down
    act: Any = experts.act
    return mix_reference(
        x,
        *experts.route(x),
        up.weight,
        down.weight,
        act,
        gated=experts.gated,
        scales=(up.weight_scale, down.weight_scale),
    )


@each_form
@pytest.mark.parametrize("way", ["pytorch", "compiled", "widened"])
@pytest.mark.parametrize("rounded", [False, True], ids=["as given", "int8"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_tokens_gives_the_formula(
    dtype: torch.dtype,
    gated: bool,
    rounded: bool,
    way: rows.Way,
    is_compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 200 of them some experts have many, with 33 each has a few."""
    monkeypatch.setattr(rows, "way_of_many", lambda _: way)
    monkeypatch.setattr(rows, "IS_COMPILED", is_compiled and rows.IS_COMPILED)
    experts = make_experts(dtype, gated, rounded)
    for num_tokens in (1, 5, rows.MOST_ROWS, rows.MOST_ROWS + 1, 200):
        x = drawn(num_tokens, WIDTH, seed=num_tokens, dtype=dtype)
        got = experts(x, NO_PASS)
        assert got.dtype == dtype
        most = 2e-2 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got, formula(experts, x), rtol=most, atol=most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_output_of_each_expert_has_a_scale_of_its_own(dtype: torch.dtype) -> None:
    weight = drawn(NUM, 7, WIDTH, seed=1, dtype=dtype)
    weight *= torch.arange(1, NUM * 7 + 1).view(NUM, 7, 1)
    stack = LinearStack(weight)
    stack.round_to_int8()
    assert stack.weight.dtype == torch.int8
    assert stack.weight_scale is not None
    assert stack.weight_scale.shape == (NUM, 7)
    assert bool((stack.weight.abs().amax(-1) == 127).all())
    off = (stack.weight * stack.weight_scale[..., None] - weight.float()).abs()
    assert bool((off <= weight.float().abs().amax(-1, keepdim=True) / 254 * (1 + 1e-5)).all())


@each_form
@pytest.mark.parametrize("num_tokens", [3, 50])
@pytest.mark.parametrize("which", ["up", "down"])
def test_the_scale_of_an_expert_counts_for_its_tokens_alone(
    which: str, num_tokens: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "IS_COMPILED", is_compiled and rows.IS_COMPILED)
    experts = make_experts(torch.float32, True, True)
    x = drawn(num_tokens, WIDTH, seed=0)
    before, (chosen, shares) = experts(x, NO_PASS), experts.route(x)
    number = int(chosen[1, 0])
    getattr(experts, which).weight_scale[number] *= 1.5
    moved, goes_there = (experts(x, NO_PASS) != before).any(1), chosen == number
    assert not moved[~goes_there.any(1)].any()
    assert moved[(goes_there & (shares > 1e-3)).any(1)].all()
    assert moved.tolist()[:2] == [False, True]


def test_only_one_expert_at_a_time_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, most = make_experts(torch.float32, True, True), [0]
    monkeypatch.setattr(rows, "way_of_many", lambda _: "widened")
    widen = torch.Tensor.float

    def counted(x: Tensor) -> Tensor:
        if x.dtype == torch.int8:
            most[0] = max(most[0], x.numel())
        return widen(x)

    monkeypatch.setattr(torch.Tensor, "float", counted)
    experts(drawn(400, WIDTH, seed=0), NO_PASS)
    assert most[0] == 2 * MIDDLE * WIDTH
