"""Attention of one token each to keys in runs: compiled form and formula against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from testkit.rows import DTYPES, generator, needs_compiled, runs_of
from torch import Tensor

from agentcache.kernels import row_attention
from agentcache.kernels.row_attention import KeyRuns, attend, attend_reference

SCALE = 0.3
Pool = tuple[Tensor, Tensor, KeyRuns]

LENGTHS: dict[str, list[list[int]]] = {
    "one key": [[1]],
    "around a vector": [[15], [16], [17]],
    "around a chunk": [[127], [128], [129], [256]],
    "in pieces": [[16, 16, 5], [1] * 30, [127, 1, 129, 3], [2]],
    "long": [[2000], [3], [700, 1300]],
}
HEADS = [(3, 3), (6, 2), (4, 1)]
DIMS = [(16, 16), (64, 32)]


def make_pool(
    lengths: list[list[int]], kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> Pool:
    """Keys and values of the middle one of three layers, token by token; all else is NaN."""
    rng, free = generator(1), 1
    runs: list[list[tuple[int, int]]] = [[] for _ in lengths]
    pieces = [(row, length) for row, own in enumerate(lengths) for length in own]
    starts = {}
    for at in torch.randperm(len(pieces), generator=rng).tolist():
        starts[at] = free
        free += pieces[at][1] + 1
    for at, (row, length) in enumerate(pieces):
        runs[row].append((starts[at], length))
    width = kv_heads * sum(dims)
    arena = torch.full((free, 3 * width), torch.nan, dtype=dtype)
    for start, length in (run for own in runs for run in own):
        drawn = torch.randn(length, width, generator=rng)
        arena[start : start + length, width : 2 * width] = drawn.to(dtype)
    keys, values = arena[:, width : 2 * width].split([kv_heads * dim for dim in dims], -1)
    heads = (kv_heads, -1)
    return keys.unflatten(-1, heads), values.unflatten(-1, heads), KeyRuns.of(runs)


def make_queries(num_rows: int, num_heads: int, dim: int) -> Tensor:
    return torch.randn(num_rows, num_heads, dim, generator=generator(4))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_attend_matches_torch(
    lengths: list[list[int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    check_close: Any,
) -> None:
    keys, values, runs = make_pool(lengths, heads[1], dims, dtype)
    q = make_queries(len(lengths), heads[0], dims[0])
    y = attend(q, keys, values, runs, scale=SCALE)
    for row, own in enumerate(runs_of(runs)):
        k, v = (
            torch.cat([each[at : at + num] for at, num in own]).double().transpose(0, 1)
            for each in (keys, values)
        )
        one = q[row].double().unsqueeze(1)
        expected = F.scaled_dot_product_attention(one, k, v, scale=SCALE, enable_gqa=True)
        check_close(y[row], expected[:, 0].float())


OPTIONS: dict[str, dict[str, Any]] = {
    "neither": {},
    "cap": {"soft_cap": 2.0},
    "sinks": {"sinks": True},
    "cap and sinks": {"soft_cap": 2.0, "sinks": True},
}


def make_options(name: str, num_heads: int) -> dict[str, Any]:
    options = {"scale": SCALE, **OPTIONS[name]}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-2.0, 6.0, num_heads)
    return options


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_sinks_and_cap_match_the_formula(
    lengths: list[list[int]], heads: tuple[int, int], name: str, check_close: Any
) -> None:
    for dtype in DTYPES:
        pool = make_pool(lengths, heads[1], (32, 16), dtype)
        q = make_queries(len(lengths), heads[0], 32).to(dtype)
        options = make_options(name, heads[0])
        check_close(attend(q, *pool, **options), attend_reference(q, *pool, **options))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_apart(sign: int, check_close: Any) -> None:
    """The largest comes first, last, and in another chunk than the rest."""
    keys, values, runs = make_pool([[300], [200], [5]], 1, (16, 16), torch.float32)
    keys *= 100
    q = sign * make_queries(3, 2, 16)
    expected = attend_reference(q, keys, values, runs, scale=SCALE)
    check_close(attend(q, keys, values, runs, scale=SCALE), expected, 2e-5)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [1, 100, 2000])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_nan_in_a_slot_of_its_own_is_seen(part: str, length: int, threads: int) -> None:
    torch.set_num_threads(threads)
    keys, values, runs = make_pool([[length], [20]], 2, (16, 16), torch.float32)
    q = make_queries(2, 4, 16)
    start = int(runs.pairs[0, 0])
    for at in {0, length // 2, length - 1}:
        bad = (keys if part == "keys" else values)[start + at, 0]
        kept = bad.clone()
        bad[3] = torch.nan
        expected = attend_reference(q, keys, values, runs, scale=SCALE).isnan()
        y = attend(q, keys, values, runs, scale=SCALE)
        assert bool(expected[0, 0, 3])
        assert torch.equal(y.isnan(), expected)
        bad.copy_(kept)


@needs_compiled
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_long_sequences_merge_to_the_same(
    dtype: torch.dtype, name: str, check_close: Any
) -> None:
    pool = make_pool([[2000], [513], [40], [1, 1025, 1]], 2, (32, 16), dtype)
    q, options = make_queries(4, 6, 32), make_options(name, 6)
    whole = attend(q, *pool, **options)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        check_close(attend(q, *pool, **options), whole)


@needs_compiled
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rows_of_one_part_are_the_same_on_any_number_of_threads(
    heads: tuple[int, int], dtype: torch.dtype, name: str
) -> None:
    """With fewer units of work than threads, as many, and more, also such as share unevenly."""
    lengths = [[1023], [1], [500, 300], [128], [5], [600], [16, 17]]
    for num_rows in (1, 2, 3, len(lengths)):
        pool = make_pool(lengths[:num_rows], heads[1], (32, 16), dtype)
        q, options = make_queries(num_rows, heads[0], 32), make_options(name, heads[0])
        torch.set_num_threads(1)
        expected = attend(q, *pool, **options)
        assert bool(expected.isfinite().all())
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(attend(q, *pool, **options), expected)


@needs_compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_attends_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    keys, values, runs = make_pool([[300], [2000], [7, 130, 1], [1]], 2, (32, 16), dtype)
    q = make_queries(4, 4, 32)
    y = attend(q, keys, values, runs, scale=SCALE)
    for row, own in enumerate(runs_of(runs)):
        single = KeyRuns.of([own])
        alone = attend(q[row : row + 1], keys, values, single, scale=SCALE)
        assert torch.equal(y[row], alone[0])


@pytest.mark.parametrize("dims", [(20, 16), (16, 20), (8, 8)], ids=str)
def test_widths_without_a_compiled_form_take_the_formula(
    dims: tuple[int, int], check_close: Any
) -> None:
    pool, q = make_pool([[20], [3, 4]], 2, dims, torch.float32), make_queries(2, 4, dims[0])
    expected = attend_reference(q, *pool, scale=SCALE)
    check_close(attend(q, *pool, scale=SCALE), expected)


def test_heads_apart_in_memory_take_the_formula(check_close: Any) -> None:
    keys, values, runs = make_pool([[20], [3, 4]], 2, (16, 16), torch.float32)
    heads_first = keys.transpose(0, 1).contiguous().transpose(0, 1)
    q = make_queries(2, 4, 16)
    expected = attend_reference(q, keys, values, runs, scale=SCALE)
    check_close(attend(q, heads_first, values, runs, scale=SCALE), expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_gathered_some_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch, check_close: Any
) -> None:
    """Where others are longer, a row has no keys at all in the last pieces."""
    pool, q = make_pool([[300], [7], [1]], 2, (20, 12), torch.float32), make_queries(3, 4, 20)
    expected = attend_reference(q, *pool, **make_options(name, 4))
    for num in (1, 7, 299, 301):
        monkeypatch.setattr(row_attention, "_GATHERED_BYTES", num * 4 * 3 * 2 * 32)
        check_close(attend(q, *pool, **make_options(name, 4)), expected)


def test_slots_of_key_runs() -> None:
    """Also behind the last run there may be others, as in a step's memory, which nobody has."""
    runs = KeyRuns.of([[(5, 3), (9, 4)], [(1, 1)], [(20, 6)]])
    assert runs.most == 7
    longer = KeyRuns(torch.cat([runs.pairs, torch.tensor([[3, 9]])]), runs.firsts, 8)
    for each in (runs, longer):
        slots, is_there = each.slots
        own = [row[there].tolist() for row, there in zip(slots, is_there, strict=True)]
        assert own == [[5, 6, 7, 9, 10, 11, 12], [1], [20, 21, 22, 23, 24, 25]]
        assert slots[1].tolist() == [1] * each.most
