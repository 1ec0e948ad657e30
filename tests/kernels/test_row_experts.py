from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from testkit.rows import DTYPES, drawn, generator, needs_compiled
from torch import Tensor

from agentcache.kernels.row_experts import (
    Routing,
    blend,
    mix,
    mix_reference,
    route,
    route_reference,
)
from agentcache.kernels.row_gates import relu_squared

ROUTINGS = {
    "best": Routing(num=3, way="softmax_of_best"),
    "all": Routing(num=3, way="best_of_softmax"),
    "one": Routing(num=1, way="best_of_softmax", scale=2.5),
    "sigmoid": Routing(num=2, way="best_by_sigmoid", normed=False),
    "bias": Routing(num=4, way="best_by_sigmoid", bias=drawn(24, seed=5), scale=2.5, least=1e-6),
    "groups": Routing(
        num=4, way="best_by_sigmoid", bias=drawn(24, seed=5), groups=(6, 2), least=1e-20
    ),
    "every one": Routing(num=24, way="best_by_sigmoid"),
}
each_routing = pytest.mark.parametrize("routing", ROUTINGS.values(), ids=list(ROUTINGS))


# ---- routing ----


@pytest.mark.usefixtures("form")
@each_routing
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_route_matches_the_formula(routing: Routing, dtype: torch.dtype, check_close: Any) -> None:
    for num_rows in (1, 3, 32):
        # no two scores of a row are alike, in bfloat16 neither
        spread = torch.linspace(-6, 6, 24)
        order = [torch.randperm(24, generator=generator(row)) for row in range(num_rows)]
        scores = torch.stack([spread[each] for each in order]).to(dtype)
        chosen, weights = route(scores, routing)
        expected, shares = route_reference(scores, routing)
        assert torch.equal(chosen, expected)
        check_close(weights, shares)


@needs_compiled
@each_routing
def test_routes_of_a_row_are_the_same_alone_and_among_others(routing: Routing) -> None:
    scores = drawn(32, 24)
    routes = (route(row[None], routing) for row in scores)
    alone = [torch.cat(each) for each in zip(*routes, strict=True)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for got, expected in zip(route(scores, routing), alone, strict=True):
            assert torch.equal(got, expected)


@needs_compiled
@each_routing
def test_equal_scores_take_the_first(routing: Routing) -> None:
    plain = Routing(num=routing.num, way=routing.way, groups=routing.groups)
    chosen, _ = route(torch.zeros(2, 24), plain)
    assert chosen.tolist() == [list(range(routing.num))] * 2


@needs_compiled
@each_routing
def test_nan_is_seen_and_chosen_experts_exist(routing: Routing) -> None:
    """One such score, and nothing else."""
    scores = drawn(3, 24)
    scores[1, 17] = torch.nan
    scores[2] = torch.nan
    chosen, weights = route(scores, routing)
    assert bool(((chosen >= 0) & (chosen < 24)).all())
    assert all(len(set(row)) == routing.num for row in chosen.tolist())
    assert weights.isnan().any(1).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("shape", "groups", "num"), [((40, 24), (1, 1), 2), ((3, 24), (24, 3), 2), ((3, 24), (6, 1), 4)]
)
def test_routes_without_a_compiled_form_take_the_formula(
    shape: tuple[int, int], groups: tuple[int, int], num: int
) -> None:
    """Many rows. More experts than groups that are open have is refused as PyTorch takes it."""
    routing = Routing(num=num, way="best_by_sigmoid", groups=groups)
    scores = drawn(*shape)
    if groups[0] == 24:
        with pytest.raises(RuntimeError, match="out of range"):
            route(scores, routing)
        return
    for got, expected in zip(route(scores, routing), route_reference(scores, routing), strict=True):
        torch.testing.assert_close(got, expected)


# ---- experts ----


WEIGHT_DTYPES = [*DTYPES, torch.int8]
Scales = tuple[Tensor | None, Tensor | None]


def make_experts(
    num: int, width: int, middle: int, gated: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    sizes = (2 * middle if gated else middle, width), (width, middle)
    up, down = (drawn(num, *size, seed=2 + at) for at, size in enumerate(sizes))
    if dtype == torch.int8:
        up, down = 30 * up, 30 * down
    return up.to(dtype), down.to(dtype)


def scales_of(up: Tensor, down: Tensor) -> Scales:
    """Of weights of 8 bits, another one for every output of every expert."""
    if up.dtype != torch.int8:
        return None, None
    up_scale, down_scale = (
        (0.2 + drawn(*each.shape[:2], seed=7 + at).abs()) / 30 for at, each in enumerate((up, down))
    )
    return up_scale, down_scale


def make_rows(
    num_rows: int, width: int, num: int, best: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of something wider; experts in no order, some of them of several rows."""
    x = drawn(num_rows, width + 7, dtype=dtype)[:, 3 : 3 + width]
    order = [torch.randperm(num, generator=generator(row))[:best] for row in range(num_rows)]
    return x, torch.stack(order), drawn(num_rows, best, seed=4).abs()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "middle"), [(64, 32), (20, 33), (5, 7)])
def test_mix_matches_the_formula(
    width: int,
    middle: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    gated: bool,
    check_close: Any,
) -> None:
    experts = make_experts(6, width, middle, gated, weight_dtype)
    act = F.silu if gated else relu_squared
    options: dict[str, Any] = {"gated": gated, "scales": scales_of(*experts)}
    for num_rows in (1, 2, 7, 32):
        given = (*make_rows(num_rows, width, 6, 3, dtype), *experts, act)
        check_close(mix(*given, **options), mix_reference(*given, **options))


@needs_compiled
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize(("width", "middle"), [(64, 32), (203, 301), (4100, 10)])
def test_a_row_is_mixed_the_same_alone_and_among_others(
    width: int, middle: int, weight_dtype: torch.dtype
) -> None:
    experts = make_experts(6, width, middle, True, weight_dtype)
    mixed = partial(mix, scales=scales_of(*experts))
    given = make_rows(32, width, 6, 3)
    alone = torch.cat(
        [mixed(*(each[row : row + 1] for each in given), *experts, F.silu) for row in range(32)]
    )
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for num_rows in (1, 2, 5, 32):
            y = mixed(*(each[:num_rows] for each in given), *experts, F.silu)
            assert torch.equal(y, alone[:num_rows])


@pytest.mark.usefixtures("form")
def test_experts_that_nobody_chose_are_not_read() -> None:
    up, down = make_experts(6, 20, 12, True)
    x, chosen, weights = make_rows(5, 20, 4, 2)
    expected = mix(x, chosen, weights, up, down, F.silu)
    up[4:], down[4:] = torch.nan, torch.nan
    assert torch.equal(mix(x, chosen, weights, up, down, F.silu), expected)
    x[2, 3] = torch.nan
    assert mix(x, chosen, weights, up, down, F.silu).isnan().all(1).tolist() == [
        row == 2 for row in range(5)
    ]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("which", [0, 1], ids=["up", "down"])
def test_the_scale_of_an_output_counts_for_the_rows_of_its_expert_alone(which: int) -> None:
    experts = make_experts(6, 20, 12, True, torch.int8)
    scales = scales_of(*experts)
    given = (*make_rows(7, 20, 6, 2), *experts, F.silu)
    expected = mix(*given, scales=scales)
    assert all(each is not None for each in scales)
    scales[which][4, 9] *= 1.5  # type: ignore[index]
    got = mix(*given, scales=scales)
    goes_there = (given[1] == 4).any(1)
    assert goes_there.any()
    assert torch.equal((got != expected).any(1), goes_there)
    if which:
        assert (got != expected).nonzero()[:, 1].unique().tolist() == [9]


def test_the_formula_takes_scales_in(check_close: Any) -> None:
    up, down = make_experts(6, 20, 12, True, torch.int8)
    scales = scales_of(up, down)
    assert scales[0] is not None
    assert scales[1] is not None
    rows = make_rows(3, 20, 6, 2)
    widened = up * scales[0][..., None], down * scales[1][..., None]
    check_close(
        mix_reference(*rows, up, down, F.silu, scales=scales),
        mix_reference(*rows, *widened, F.silu),
    )


def test_mix_of_other_types_layouts_and_activations_takes_the_formula(check_close: Any) -> None:
    up, down = make_experts(6, 20, 12, True)
    given = make_rows(3, 20, 6, 2)
    across = up.transpose(1, 2).contiguous().transpose(1, 2)
    check_close(mix(*given, across, down, F.silu), mix_reference(*given, up, down, F.silu))
    expected = mix_reference(*given, up, down, F.softplus)
    check_close(mix(*given, up, down, F.softplus), expected)
    expected = mix_reference(*given, up.half(), down.half(), F.silu)
    check_close(mix(*given, up.half(), down.half(), F.silu), expected)


# ---- sums ----


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num", "width"), [(1, 20), (3, 64), (8, 5)])
def test_blend_matches_the_formula(
    num: int, width: int, dtype: torch.dtype, check_close: Any
) -> None:
    for num_rows in (1, 5, 32):
        x, weights = drawn(num_rows, num, width, dtype=dtype), drawn(num_rows, num, dtype=dtype)
        expected = (x.double() * weights.double()[..., None]).sum(1)
        check_close(blend(x, weights), expected.to(dtype))


@needs_compiled
def test_blend_is_the_same_on_any_number_of_threads() -> None:
    x, weights = drawn(7, 3, 5000), drawn(7, 3, seed=1)
    alone = torch.cat([blend(x[row : row + 1], weights[row : row + 1]) for row in range(7)])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(blend(x, weights), alone)
