from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from testkit.rows import DTYPES, generator, needs_compiled
from torch import Tensor

from agentcache.kernels.row_gates import (
    ACTS,
    gate,
    gelu_tanh,
    multiply,
    opened,
    relu_squared,
    soft_cap,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""Of one number, relative to it."""
NAMES = {act: "none" if act is None else act.__name__ for act in ACTS}
each_act = pytest.mark.parametrize("act", ACTS, ids=NAMES.values())


def strided(num_rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Some columns of a wider tensor."""
    return torch.randn(num_rows, width + 7, generator=generator(seed)).to(dtype)[:, 3 : 3 + width]


def formula(x: Tensor, act: Callable[[Tensor], Tensor] | None) -> Tensor:
    """In float64; GELU by what is left above, which loses nothing where that is little."""
    wide = x.double()
    if act is F.gelu:
        return 0.5 * wide * torch.erfc(-wide * 0.5**0.5)
    if act is gelu_tanh:
        return wide * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))
    return wide if act is None else act(wide)


# ---- activations ----


@pytest.mark.usefixtures("form")
@each_act
@pytest.mark.parametrize("width", [1, 17, 64, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opened_matches_the_formula(
    width: int, dtype: torch.dtype, act: Any, check_close: Any
) -> None:
    """Halves of rows, as a gated MLP has them, and one alone."""
    for num_rows in (1, 5, 32):
        x, up = (3 * strided(num_rows, 2 * width, dtype)).chunk(2, -1)
        kept = x.clone()
        check_close(opened(x, act, up), (formula(x, act) * up.double()).to(dtype))
        check_close(opened(x, act), formula(x, act).to(dtype))
        assert torch.equal(x, kept)


@pytest.mark.usefixtures("form")
@each_act
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opened_of_parts_apart_in_memory(dtype: torch.dtype, act: Any, check_close: Any) -> None:
    """As gates lie beside the queries of each head."""
    x = strided(5, 2 * 3 * 20, dtype).unflatten(-1, (3, 2, 20))[:, :, 1]
    by = strided(5, 3 * 20, dtype, seed=2).unflatten(-1, (3, 20))
    y = opened(x, act, by)
    check_close(y, (formula(x, act) * by.double()).to(dtype))
    assert y.is_contiguous()


_SIZES = [0.0, 1e-30, 1e-3, 0.1, 0.624, 0.626, 1.0, 5.0, 20.0, 88.0, 100.0, 1e4]
EXTREMES = torch.tensor([sign * number for number in _SIZES for sign in (1, -1)])


@pytest.mark.usefixtures("form")
@each_act
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opened_of_extremes(dtype: torch.dtype, act: Any) -> None:
    """Every number with every other, once more behind the last whole vector."""
    x, by = torch.cartesian_prod(EXTREMES, EXTREMES).to(dtype).T
    x, by = (torch.cat([each, each[:15]])[None] for each in (x, by))
    expected = formula(x, act) * by.double()
    y = opened(x, act, by)
    assert y.dtype == dtype
    # GELU of large negative numbers is made of a cancelled sum in the fallback
    relative = 2e-6 if dtype == torch.float32 else ROUNDING[dtype]
    lost = 1e-6 * (x.double() * by.double()).abs() if act in (F.gelu, gelu_tanh) else 0.0
    assert bool(((y.double() - expected).abs() <= relative * expected.abs() + lost + 1e-30).all())


@needs_compiled
@pytest.mark.parametrize("act", [F.gelu, gelu_tanh], ids=["gelu", "gelu_tanh"])
def test_compiled_gelu_keeps_what_is_small(act: Any) -> None:
    x = torch.linspace(-6, 6, 1000)[None]
    error = (opened(x, act).double() - formula(x, act)).abs()
    assert bool((error <= 2e-5 * formula(x, act).abs()).all())


@pytest.mark.usefixtures("form")
@each_act
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("at", [0, 15, 16, 20])
def test_opened_keeps_nan_where_it_is(at: int, dtype: torch.dtype, act: Any) -> None:
    for sign in (1, -1):
        x, by = strided(3, 21, dtype).contiguous(), strided(3, 21, dtype, seed=2)
        x[1, at] = sign * torch.tensor(torch.nan)
        assert opened(x, act, by).isnan().nonzero().tolist() == [[1, at]]
        assert opened(by, act, x).isnan().nonzero().tolist() == [[1, at]]


@pytest.mark.usefixtures("form")
def test_multiply_is_exact() -> None:
    for dtype in DTYPES:
        x, y = strided(4, 50, dtype), strided(4, 50, dtype, seed=2)
        assert torch.equal(multiply(x, y), x * y)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_cap_matches_the_formula(dtype: torch.dtype, cap: float) -> None:
    spread = torch.cat([EXTREMES, torch.linspace(-3, 3, 101) * cap])
    x = torch.stack([spread, -spread]).to(dtype)
    expected = cap * torch.tanh(x.double() / cap)
    y = soft_cap(x, cap)
    assert y.dtype == dtype
    assert bool(((y.double() - expected).abs() <= ROUNDING[dtype] * expected.abs() + 1e-30).all())
    assert bool((y.abs() <= cap * (1 + ROUNDING[dtype])).all())
    x[1, 3] = torch.nan
    assert soft_cap(x, cap).isnan().nonzero().tolist() == [[1, 3]]


@needs_compiled
@each_act
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opened_is_the_same_on_any_number_of_threads(dtype: torch.dtype, act: Any) -> None:
    """One row as well is shared by threads."""
    for shape in ((33, 1000), (1, 40_001), (7, 6, 1000)):
        x, by = torch.randn(2, *shape, generator=generator()).to(dtype)
        torch.set_num_threads(1)
        alone = torch.cat(
            [opened(*(each[i : i + 1] for each in (x,)), act, by[i : i + 1]) for i in range(len(x))]
        )
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(opened(x, act, by), alone)
            if len(shape) == 2:
                assert torch.equal(soft_cap(x, 2.0)[-1:], soft_cap(x[-1:], 2.0))


def test_other_types_layouts_and_activations_take_the_formula(check_close: Any) -> None:
    x, by = strided(4, 20), strided(4, 20, torch.bfloat16)
    check_close(opened(x, F.silu, by), (formula(x, F.silu) * by.double()).float())
    across = x.t().contiguous().t()
    check_close(opened(across, relu_squared), formula(x, relu_squared).float())
    check_close(opened(x, F.softplus, x), (F.softplus(x.double()) * x.double()).float())
    check_close(soft_cap(across, 2.0), (2.0 * torch.tanh(x.double() / 2.0)).float())


# ---- gates ----


def norm_formula(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def gate_formula(
    y: Tensor, opening: Tensor, norm: Tensor | None, act: Any = F.silu, **options: Any
) -> Tensor:
    open_by, wide = formula(opening, act), y.double()
    if norm is None:
        return wide * open_by
    before = options["norm_before_gate"]
    parts = (wide if before else wide * open_by).unflatten(-1, (options["groups"], -1))
    normed = norm_formula(parts, options["eps"]).flatten(-2) * norm
    return normed * open_by if before else normed


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("before", [False, True], ids=["gate, norm", "norm, gate"])
@pytest.mark.parametrize("groups", [None, 1, 4], ids=["no norm", "one group", "four groups"])
@pytest.mark.parametrize("act", [F.silu, torch.sigmoid], ids=["silu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [20, 64, 448])
def test_gate_matches_the_formula(
    width: int, dtype: torch.dtype, act: Any, groups: int | None, before: bool, check_close: Any
) -> None:
    y = torch.randn(5, width, generator=generator())
    opening = strided(5, width, dtype)
    kept = opening.clone()
    norm = None if groups is None else torch.randn(width, generator=generator(2))
    options = {"act": act, "eps": 1e-5, "groups": groups or 1, "norm_before_gate": before}
    expected = gate_formula(y, opening, norm, **options)
    check_close(gate(y.clone(), opening, norm, **options), expected.float())
    assert torch.equal(opening, kept)


@pytest.mark.usefixtures("form")
def test_gate_of_extremes() -> None:
    opening = torch.cat([EXTREMES, EXTREMES])[None, :31]
    y = gate(torch.full_like(opening, 1e4), opening)
    expected = F.silu(opening.double()) * 1e4
    assert bool(((y - expected).abs() <= 1e-6 * expected.abs() + 1e-30).all())


def test_gate_of_other_layouts_takes_the_formula(check_close: Any) -> None:
    y, opening = torch.randn(2, 5, 20, generator=generator())
    norm = torch.randn(20, generator=generator(2))
    options = {"eps": 1e-5, "groups": 2, "norm_before_gate": False}
    expected = gate_formula(y.bfloat16(), opening, norm, **options).bfloat16()
    check_close(gate(y.bfloat16(), opening, norm, **options), expected)
    across = opening.t().contiguous().t()
    expected = gate_formula(y, across, norm, **options).float()
    check_close(gate(y.clone(), across, norm, **options), expected)


@needs_compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_gated_rows_are_the_same_on_any_number_of_threads(dtype: torch.dtype) -> None:
    x, weight = strided(151, 448, dtype).contiguous(), torch.randn(448, generator=generator(2))
    options = {"eps": 1e-5, "groups": 2}
    alone = [gate(row[None].float().clone(), row[None], weight, **options) for row in x]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(gate(x.float().clone(), x, weight, **options), torch.cat(alone))
