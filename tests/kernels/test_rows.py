from __future__ import annotations

import os
import platform
import subprocess
import sys
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from testkit.rows import DTYPES, generator, needs_compiled
from torch import Tensor

from agentcache.kernels import rows

if TYPE_CHECKING:
    from collections.abc import Callable

WEIGHT_DTYPES = [torch.float32, torch.bfloat16, torch.int8]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""Of one number, relative to the sum of the magnitudes it was added up from."""


def strided(num_rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Some columns of a wider tensor."""
    return torch.randn(num_rows, width + 7, generator=generator(seed)).to(dtype)[:, 3 : 3 + width]


# ---- linear ----


def make_weight(out: int, width: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (out, width), dtype=dtype, generator=generator(2))
    return torch.randn(out, width, generator=generator(2)).to(dtype)


def make_factors(out: int, chosen: tuple[bool, bool, bool] = (True, True, True)) -> dict[str, Any]:
    """weight_scale, bias and scale, of which some are None."""
    rng = generator(3)
    drawn = torch.randn(3, out, generator=rng)
    names = ("weight_scale", "bias", "scale")
    return {
        name: each if there else None
        for name, each, there in zip(names, drawn, chosen, strict=True)
    }


def check_linear(x: Tensor, weight: Tensor, **factors: Any) -> None:
    """Each output on its own against float64, as exact as its largest intermediates allow."""
    wide, spread = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if factors.get("weight_scale") is not None:
        wide, spread = wide * factors["weight_scale"], spread * factors["weight_scale"].abs()
    if factors.get("bias") is not None:
        wide, spread = wide + factors["bias"], spread + factors["bias"].abs()
    if factors.get("scale") is not None:
        wide, spread = wide * factors["scale"], spread * factors["scale"].abs()
    y = rows.linear(x, weight, **factors)
    assert y.dtype == x.dtype
    assert y.shape == wide.shape
    # what is added up in float32, then what rounding to the type of y adds
    bound = ROUNDING[torch.float32] * spread + ROUNDING[x.dtype] * wide.abs()
    assert bool(((y.double() - wide).abs() <= bound).all())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 16, 17, 448])
def test_linear_matches_the_formula(
    width: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    for num_rows, out in product([*range(1, 10), 32], [1, 3, 4, 18]):
        x = torch.randn(num_rows, width, generator=generator()).to(dtype)
        check_linear(x, make_weight(out, width, weight_dtype), **make_factors(out))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("chosen", [*product([False, True], repeat=3)], ids=str)
def test_linear_with_some_of_its_factors(
    chosen: tuple[bool, bool, bool], weight_dtype: torch.dtype
) -> None:
    for num_rows in (1, 6):
        x = torch.randn(num_rows, 20, generator=generator())
        check_linear(x, make_weight(9, 20, weight_dtype), **make_factors(9, chosen))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("width", [4096, 4097, 5000])
def test_linear_of_wide_inputs(width: int, weight_dtype: torch.dtype) -> None:
    for num_rows in (1, 7):
        x = torch.randn(num_rows, width, generator=generator())
        check_linear(x, make_weight(6, width, weight_dtype), **make_factors(6))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_of_inputs_apart_in_memory(dtype: torch.dtype) -> None:
    weight = make_weight(9, 35, dtype)
    check_linear(strided(6, 35, dtype), weight)
    check_linear(torch.randn(35, 6, generator=generator()).to(dtype).t(), weight)


@pytest.mark.usefixtures("form")
def test_linear_rounds_to_bfloat16_like_torch() -> None:
    """With one input of 1 an output is its weight: halfway cases, tiny, huge and none at all."""
    from_one = (0x3F80 + torch.arange(8, dtype=torch.int32)) << 16
    halfway = torch.cat([from_one + 0x8000 + off for off in (-1, 0, 1)]).view(torch.float32)
    others = torch.tensor([1e-40, 3.4e38, -3.4028235e38, torch.inf, -torch.inf, torch.nan])
    weight = torch.cat([halfway, others])
    y = rows.linear(torch.ones(1, 1, dtype=torch.bfloat16), weight[:, None])
    assert torch.equal(y[0].nan_to_num(7.0), weight.bfloat16().nan_to_num(7.0))
    assert bool(y[0, -1].isnan())


@needs_compiled
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [448, 1003, 4113])
def test_a_row_of_a_product_is_the_same_alone_and_among_others(
    width: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    weight, factors = make_weight(75, width, weight_dtype), make_factors(75)
    x = torch.randn(32, width, generator=generator()).to(dtype)
    alone = torch.cat([rows.linear(row, weight, **factors) for row in x[:, None]])
    for threads, num_rows in product((1, 2), (1, 2, 3, 4, 5, 9, 32)):
        torch.set_num_threads(threads)
        y = rows.linear(x[:num_rows], weight, **factors)
        assert torch.equal(y, alone[:num_rows])


@needs_compiled
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "most"), [(64, 1100), (1000, 300), (5000, 700)], ids=str)
def test_many_rows_go_in_blocks_and_come_out_as_each_alone(
    width: int, most: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """Numbers of rows around those of a block, which has 1024, 64 and 64."""
    weight, factors = make_weight(10, width, weight_dtype), make_factors(10)
    x = torch.randn(most, width, generator=generator()).to(dtype)
    alone = torch.cat([rows.linear(row, weight, **factors) for row in x[:, None]])
    check_linear(x, weight, **factors)
    block = 1024 if width == 64 else 64
    for threads, num_rows in product((1, 2, 3), (33, 63, block, block + 1, block + 7, most)):
        torch.set_num_threads(threads)
        assert torch.equal(rows.linear(x[:num_rows], weight, **factors), alone[:num_rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_way_of_many_rows_is_decided_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def seconds(compute: Callable[[], Tensor]) -> float:
        tried.append(compute().shape)
        return 1.0 / len(tried)

    monkeypatch.setattr(rows, "_seconds", seconds)
    rows._measured_way.cache_clear()
    try:
        ways = {rows.way_of_many(dtype) for _ in range(3)}
    finally:
        rows._measured_way.cache_clear()
    if rows.IS_COMPILED:
        assert ways == {"widened"}  # the last of three, and the fastest by far
        assert len(set(tried)) == 1
        assert len(tried) == 3
    else:
        assert not tried


@needs_compiled
@pytest.mark.parametrize(
    ("dtype", "seconds", "way"),
    [
        (torch.float32, (1.0, 0.9, 1.0), "pytorch"),  # no clear lead
        (torch.float32, (1.0, 0.5, 1.0), "compiled"),
        (torch.bfloat16, (0.9, 0.9, 1.0), "widened"),
        (torch.bfloat16, (0.2, 0.5, 1.0), "pytorch"),
        (torch.bfloat16, (0.5, 0.2, 1.0), "compiled"),
    ],
    ids=str,
)
def test_another_way_than_the_usual_needs_a_clear_lead(
    dtype: torch.dtype,
    seconds: tuple[float, ...],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """seconds: of PyTorch, compiled and widened."""
    left = iter(seconds)
    monkeypatch.setattr(rows, "_seconds", lambda compute: next(left))
    rows._measured_way.cache_clear()
    try:
        assert rows.way_of_many(dtype) == way
    finally:
        rows._measured_way.cache_clear()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("weight_dtype", WEIGHT_DTYPES, ids=str)
def test_a_row_of_nan_spoils_no_other(weight_dtype: torch.dtype) -> None:
    x = torch.randn(7, 20, generator=generator())
    x[2, 17] = torch.nan
    bad = rows.linear(x, make_weight(6, 20, weight_dtype)).isnan()
    assert bool(bad[2].all())
    assert int(bad.sum()) == 6


def test_types_without_a_compiled_form_take_the_formula(check_close: Any) -> None:
    x, weight = strided(3, 20), make_weight(5, 20, torch.float32).half()
    assert not rows.takes(weight)
    check_close(rows.linear(x, weight), (x.double() @ weight.double().T).float())
    wide = x.double()
    assert not rows.takes(wide)
    check_close(rows.rms_norm(wide, torch.ones(20), 1e-5), norm_formula(wide, 1e-5))


# ---- norms ----


def norm_formula(x: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 448), (9, 17), (3, 1), (4, 5), (3, 4, 20), (2, 3, 64)], ids=str
)
def test_rms_norm_matches_the_formula(
    shape: tuple[int, ...], dtype: torch.dtype, eps: float, check_close: Any
) -> None:
    x = torch.randn(shape, generator=generator()).to(dtype)
    weight = torch.randn(shape[-1], generator=generator(2))
    before = x.clone()
    check_close(rows.rms_norm(x, weight, eps), (norm_formula(x, eps) * weight).to(dtype))
    assert torch.equal(x, before)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_inputs_apart_in_memory(dtype: torch.dtype, check_close: Any) -> None:
    x, weight = strided(6, 35, dtype), torch.randn(35, generator=generator(2))
    check_close(rows.rms_norm(x, weight, 1e-5), (norm_formula(x, 1e-5) * weight).to(dtype))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_parts_apart_in_memory(dtype: torch.dtype, check_close: Any) -> None:
    """Every other part of a row, as queries lie beside their gates."""
    x = strided(5, 4 * 20, dtype).unflatten(-1, (4, 20))[:, ::2]
    weight = torch.randn(20, generator=generator(2))
    check_close(rows.rms_norm(x, weight, 1e-5), (norm_formula(x, 1e-5) * weight).to(dtype))


@needs_compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_normed_rows_are_the_same_on_any_number_of_threads(dtype: torch.dtype) -> None:
    x, weight = strided(151, 448, dtype), torch.randn(448, generator=generator(2))
    alone = torch.cat([rows.rms_norm(row[None], weight, 1e-5) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(rows.rms_norm(x, weight, 1e-5), alone)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_a_processor_without_the_instructions_takes_the_formulas(capability: str) -> None:
    """Which PyTorch tells, as it does where its own kernels are kept to less."""
    code = "from agentcache.kernels import rows; print(rows.IS_COMPILED)"
    env = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    told = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    expected = rows.IS_COMPILED and (capability != "default" or platform.machine() != "x86_64")
    assert told.stdout.strip() == str(expected)
