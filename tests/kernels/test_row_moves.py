"""Moving rows about: compiled forms and PyTorch's against the formula, wherever the rows lie."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from testkit.rows import DTYPES, drawn, generator
from torch import Tensor

from agentcache.kernels import row_moves, rows
from agentcache.kernels.row_moves import (
    add,
    as_type,
    gather,
    gather_rounded,
    rotate,
    scale,
    scatter,
)

NUM_ROWS = [0, 1, 5, rows.MOST_ROWS, rows.MOST_ROWS + 1]


def apart(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows that lie apart in memory, each whole."""
    num, *inner = shape
    width = torch.Size(inner).numel()
    return drawn(num, width + 9, dtype=dtype, seed=seed)[:, 4 : 4 + width].unflatten(-1, inner)


def turned_about(x: Tensor) -> Tensor:
    """The same numbers, none beside its neighbour."""
    last = x.dim() - 1
    return x.transpose(0, last).contiguous().transpose(0, last)


# ---- sums ----


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num", NUM_ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_matches_the_formula(dtype: torch.dtype, num: int, check_close: Any) -> None:
    for shape, factor in product([(1,), (16,), (37,), (3, 20)], [1.0, -0.22]):
        x, y = (drawn(num, *shape, dtype=dtype, seed=seed) for seed in (1, 2))
        before = x.clone(), y.clone()
        expected = (x.double() + factor * y.double()).to(dtype)
        check_close(add(x, y, factor), expected)
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num", NUM_ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_matches_the_formula(dtype: torch.dtype, num: int, check_close: Any) -> None:
    for width, factor in product([1, 16, 37], [1.0, 0.0, -5.65]):
        x = drawn(num, width, dtype=dtype)
        check_close(scale(x, factor), (factor * x.double()).to(dtype))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_inputs_apart_in_memory(dtype: torch.dtype, check_close: Any) -> None:
    other = drawn(4, 20, dtype=dtype, seed=1)
    for x in (apart(4, 20, dtype=dtype), turned_about(drawn(4, 20, dtype=dtype))):
        check_close(add(x, other), (x.double() + other.double()).to(dtype))
        check_close(add(other, x, 3.0), (other.double() + 3 * x.double()).to(dtype))
        check_close(scale(x, 3.0), (3 * x.double()).to(dtype))


@pytest.mark.usefixtures("form")
def test_sums_of_what_is_not_alike_are_pytorchs(check_close: Any) -> None:
    x = drawn(4, 20)
    for y in (drawn(20, seed=1), drawn(1, 20, seed=1), drawn(4, 20, seed=1).bfloat16()):
        check_close(add(x, y, 2.0), (x.double() + 2 * y.double()).float())
    assert add(x.double(), x.double()).dtype == torch.float64
    assert scale(x.double(), 3.0).dtype == torch.float64


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_keep_nan_and_infinity_where_they_are(dtype: torch.dtype) -> None:
    x, y = drawn(3, 21, dtype=dtype), drawn(3, 21, dtype=dtype, seed=1)
    x[1, 3], x[2, 20], y[0, 17] = torch.nan, torch.inf, torch.nan
    assert add(x, y).isnan().nonzero().tolist() == [[0, 17], [1, 3]]
    assert scale(x, 2.0).isnan().nonzero().tolist() == [[1, 3]]
    for out in (add(x, y), scale(x, 2.0)):
        assert out.isinf().nonzero().tolist() == [[2, 20]]


# ---- copies ----


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num", NUM_ROWS)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_as_type_is_a_copy_in_that_type(source: torch.dtype, target: torch.dtype, num: int) -> None:
    for x in (
        drawn(num, 37, dtype=source),
        apart(num, 37, dtype=source),
        apart(num, 3, 16, dtype=source),
        turned_about(drawn(num, 3, 16, dtype=source)),
    ):
        y = as_type(x, target)
        assert y.dtype == target
        assert y.is_contiguous()
        assert torch.equal(y, x.to(target))


@pytest.mark.usefixtures("form")
def test_as_type_leaves_alone_what_is_so_already() -> None:
    x = drawn(3, 20)
    assert as_type(x, torch.float32) is x


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float64], ids=str)
def test_as_type_takes_every_type(dtype: torch.dtype) -> None:
    x = 3 * drawn(rows.MOST_ROWS, 500)
    assert torch.equal(as_type(x, dtype), x.to(dtype))
    assert torch.equal(as_type(x.to(dtype), torch.float32), x.to(dtype).float())


@pytest.mark.usefixtures("form")
def test_as_type_rounds_like_pytorch() -> None:
    """Halfway cases, tiny, huge and none at all."""
    from_one = (0x3F80 + torch.arange(8, dtype=torch.int32)) << 16
    halfway = torch.cat([from_one + 0x8000 + off for off in (-1, 0, 1)]).view(torch.float32)
    others = torch.tensor([1e-40, 3.4e38, -3.4028235e38, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([halfway, others])[None]
    y = as_type(x, torch.bfloat16)
    assert torch.equal(y.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))
    assert bool(y[0, -1].isnan())
    assert bool(as_type(y, torch.float32)[0, -1].isnan())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num", NUM_ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_takes_rows_by_their_numbers(dtype: torch.dtype, num: int) -> None:
    index = torch.randint(50, (num,), generator=generator(2))
    for table in (
        drawn(50, 37, dtype=dtype),
        apart(50, 37, dtype=dtype),
        apart(50, 3, 16, dtype=dtype),
        turned_about(drawn(50, 3, 16, dtype=dtype)),
    ):
        table[7] = torch.nan
        got, expected = gather(table, index), table[index]
        assert got.dtype == dtype
        assert got.shape == expected.shape
        assert torch.equal(got.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num", NUM_ROWS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_rounded_rows_come_out_times_their_factor(dtype: torch.dtype, num: int) -> None:
    """To the last bit, whether they are few or many."""
    index, factors = torch.randint(50, (num,), generator=generator(2)), drawn(50, seed=1)
    factors[7] = torch.nan
    whole = (60 * drawn(50, 46)).to(torch.int8)
    for table in (whole, whole[:, 4:41], whole[:, ::2]):
        got = gather_rounded(table, factors, index, dtype)
        expected = (table.float() * factors[:, None])[index].to(dtype)
        assert got.dtype == dtype
        assert torch.equal(got.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.usefixtures("form")
def test_indices_of_other_forms_are_pytorchs() -> None:
    table, pairs = drawn(9, 20), torch.tensor([[3, 1], [8, 1], [0, 1]])
    assert torch.equal(gather(table, pairs[:, 0]), table[[3, 8, 0]])
    assert torch.equal(gather(table, pairs[:, 0].int().contiguous()), table[[3, 8, 0]])
    target, new = torch.zeros(9, 20), drawn(3, 20, seed=1)
    scatter(target, pairs[:, 0], new)
    assert torch.equal(target[[3, 8, 0]], new)
    heads, frequencies = drawn(3, 1, 20), torch.ones(20)[::2]
    expected = rotated(heads, pairs[:, 0], frequencies)
    got = rotate(heads, pairs[:, 0], frequencies)
    torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("num", NUM_ROWS)
@pytest.mark.parametrize("kept", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_writes_its_rows_and_no_others(
    dtype: torch.dtype, kept: torch.dtype, num: int
) -> None:
    index = torch.randperm(50, generator=generator(2))[:num]
    for new, like in product(
        (
            drawn(num, 3, 16, dtype=dtype),
            apart(num, 3, 16, dtype=dtype),
            turned_about(drawn(num, 3, 16, dtype=dtype)),
        ),
        (drawn(50, 3, 16, dtype=kept), apart(50, 3, 16, dtype=kept)),
    ):
        arena = torch.full((50, 3 * like.stride(0)), torch.nan, dtype=kept)
        target = arena.as_strided((50, 3, 16), (arena.stride(0), 16, 1), like.stride(0))
        around = arena.clone()
        scatter(target, index, new)
        assert torch.equal(target[index], new.to(kept))
        target[index] = torch.nan
        assert torch.equal(arena.isnan(), around.isnan())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_keeps_nan(dtype: torch.dtype) -> None:
    new, target = drawn(2, 20), torch.zeros((9, 20), dtype=dtype)
    new[1, 3] = torch.nan
    scatter(target, torch.tensor([8, 2]), new)
    assert target.isnan().nonzero().tolist() == [[2, 3]]


# ---- rotations ----


def rotated(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    scale: float = 1.0,
    in_turns: bool = False,
) -> Tensor:
    """Pairs as complex numbers, times e^(i angle)."""
    num = len(frequencies)
    y = x.double().clone()
    pairs = y[..., : 2 * num]
    if in_turns:
        real, imaginary = pairs[..., ::2], pairs[..., 1::2]
    else:
        real, imaginary = pairs[..., :num], pairs[..., num:]
    angles = (positions.float()[:, None] * frequencies)[:, None].double()
    z = torch.complex(real, imaginary) * torch.polar(torch.full_like(angles, scale), angles)
    real.copy_(z.real)
    imaginary.copy_(z.imag)
    return y


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("in_turns", [False, True], ids=["halves", "in turns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("width", "num"), [(16, 8), (64, 32), (20, 10), (20, 3), (16, 0), (2, 1), (7, 3)], ids=str
)
def test_rotate_matches_the_formula(
    width: int, num: int, dtype: torch.dtype, in_turns: bool, check_close: Any
) -> None:
    frequencies = 1e4 ** -(torch.arange(num, dtype=torch.float32) / max(num, 1))
    for num_rows, factor in product(NUM_ROWS, [1.0, 1.2]):
        positions = torch.randint(20000, (num_rows,), generator=generator(num_rows))
        options: dict[str, Any] = {"scale": factor, "in_turns": in_turns}
        for x in (
            drawn(num_rows, 3, width, dtype=dtype),
            apart(num_rows, 3, width, dtype=dtype),
            turned_about(drawn(num_rows, 3, width, dtype=dtype)),
        ):
            before = x.clone()
            expected = rotated(x, positions, frequencies, **options)
            y = rotate(x, positions, frequencies, **options)
            check_close(y, expected.to(dtype))
            assert torch.equal(y[..., 2 * num :], x[..., 2 * num :])
            assert torch.equal(x, before)


@pytest.mark.usefixtures("form")
def test_position_zero_turns_nothing() -> None:
    x, frequencies = drawn(2, 3, 16), torch.rand(8, generator=generator(1))
    assert torch.equal(rotate(x, torch.zeros(2, dtype=torch.int64), frequencies), x)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("in_turns", [False, True], ids=["halves", "in turns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate_keeps_nan_in_its_pair(dtype: torch.dtype, in_turns: bool) -> None:
    x, frequencies = drawn(3, 2, 20, dtype=dtype), torch.ones(8)
    x[1, 1, 5], x[2, 0, 19] = torch.nan, torch.nan
    y = rotate(x, torch.tensor([1, 2, 3]), frequencies, in_turns=in_turns)
    pair = [4, 5] if in_turns else [5, 13]
    assert y.isnan().nonzero().tolist() == [*([1, 1, at] for at in pair), [2, 0, 19]]


def test_compiled_forms_are_those_that_are_taken(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to so many rows and no more, so that a step of any width can be recorded."""
    calls: list[str] = []
    for name in ("_sum", "_move"):
        monkeypatch.setattr(row_moves, name, lambda *args, name=name: calls.append(name))
    for num in (rows.MOST_ROWS, rows.MOST_ROWS + 1):
        x, index = drawn(num, 20), torch.arange(num)
        add(x, x)
        scale(x, 2.0)
        as_type(x, torch.bfloat16)
        gather(x, index)
        gather_rounded(x.to(torch.int8), x[:, 0].contiguous(), index, torch.float32)
        scatter(x.clone(), index, x)
        expected = ["_sum"] * 2 + ["_move"] * 4 if form == "compiled" else []
        assert calls == expected if num == rows.MOST_ROWS else not calls
        calls.clear()
