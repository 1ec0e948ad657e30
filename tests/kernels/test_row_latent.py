"""Attention of one token each to latents in runs: compiled form and formula against PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from testkit.rows import DTYPES, drawn, generator, needs_compiled, runs_of
from torch import Tensor

from agentcache.kernels.row_attention import KeyRuns
from agentcache.kernels.row_latent import attend, attend_reference

SCALE = 0.3
LENGTHS: dict[str, list[list[int]]] = {
    "one": [[1]],
    "around a vector": [[15], [16], [17]],
    "around what is near": [[31], [32], [33], [64]],
    "in pieces": [[16, 16, 5], [1] * 40, [31, 1, 33, 3], [2]],
    "around a part": [[255], [256], [257], [383, 1]],
    "long": [[2000], [3], [700, 1300]],
}


@dataclass(frozen=True)
class Sizes:
    heads: int
    key_dim: int
    shared_dim: int
    value_dim: int
    rank: int


SIZES = {
    "tiny": Sizes(4, 16, 8, 16, 16),
    "odd": Sizes(3, 5, 1, 7, 16),
    "one head": Sizes(1, 16, 16, 16, 80),
    "more heads than are near": Sizes(21, 6, 24, 10, 64),
}
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Pool = tuple[Tensor, Tensor, KeyRuns]


def make_pool(
    lengths: list[list[int]], sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 1
) -> Pool:
    """Latents and shared keys of the middle one of three layers, in no order; all else is NaN."""
    width, rng, free = sizes.rank + sizes.shared_dim, generator(seed), 1
    pieces = [(row, length) for row, own in enumerate(lengths) for length in own]
    starts = [0] * len(pieces)
    for at in torch.randperm(len(pieces), generator=rng).tolist():
        starts[at] = free
        free += pieces[at][1] + 1
    runs: list[list[tuple[int, int]]] = [[] for _ in lengths]
    arena = torch.full((free, 3 * width), torch.nan, dtype=dtype)
    for row, own in enumerate(lengths):  # the same of a row however it lies
        new = torch.randn(sum(own), width, generator=generator(row)).to(dtype)
        for part in new.split(own):
            start = starts.pop(0)
            arena[start : start + len(part), width : 2 * width] = part
            runs[row].append((start, len(part)))
    latents, shared = arena[:, width : 2 * width].split([sizes.rank, sizes.shared_dim], -1)
    return latents, shared, KeyRuns.of(runs)


def make_queries(num_rows: int, sizes: Sizes, dtype: torch.dtype = torch.float32) -> Tensor:
    return drawn(num_rows, sizes.heads, sizes.key_dim + sizes.shared_dim, seed=4, dtype=dtype)


def make_expand(sizes: Sizes, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = sizes.heads, sizes.key_dim + sizes.value_dim, sizes.rank
    return (drawn(*shape, seed=5) * sizes.rank**-0.5).to(dtype)


def by_torch(q: Tensor, pool: Pool, expand: Tensor, key_dim: int) -> Tensor:
    """In float64, by keys and values of all heads."""
    latents, shared, runs = pool
    out = []
    for query, own in zip(q.double(), runs_of(runs), strict=True):
        latent, common = (
            torch.cat([each[at : at + num] for at, num in own]).double()
            for each in (latents, shared)
        )
        keys, values = (latent @ expand.double().transpose(1, 2)).split(
            [key_dim, expand.shape[1] - key_dim], -1
        )
        keys = torch.cat([keys, common.expand(len(expand), -1, -1)], -1)
        found = F.scaled_dot_product_attention(query.unsqueeze(1), keys, values, scale=SCALE)
        out.append(found.flatten())
    return torch.stack(out).to(q.dtype)


@pytest.mark.usefixtures("form")
@each_dtype
@each_size
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_attend_matches_torch(
    lengths: list[list[int]], sizes: Sizes, dtype: torch.dtype, check_close: Any
) -> None:
    pool, expand = make_pool(lengths, sizes, dtype), make_expand(sizes, dtype)
    q = make_queries(len(lengths), sizes, dtype)
    y = attend(q, *pool, expand, key_dim=sizes.key_dim, scale=SCALE)
    check_close(y, by_torch(q, pool, expand, sizes.key_dim))


@pytest.mark.usefixtures("form")
def test_many_rows(check_close: Any) -> None:
    sizes = SIZES["tiny"]
    pool, expand = make_pool([[1 + row] for row in range(40)], sizes), make_expand(sizes)
    q = make_queries(40, sizes)
    y = attend(q, *pool, expand, key_dim=sizes.key_dim, scale=SCALE)
    check_close(y, by_torch(q, pool, expand, sizes.key_dim))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1]], ids=str)
def test_weights_and_cache_of_another_type(dtypes: list[torch.dtype], check_close: Any) -> None:
    sizes = SIZES["tiny"]
    pool, expand = make_pool([[40], [3]], sizes, dtypes[1]), make_expand(sizes, dtypes[1])
    q = make_queries(2, sizes, dtypes[0])
    y = attend(q, *pool, expand, key_dim=sizes.key_dim, scale=SCALE)
    check_close(y, by_torch(q, pool, expand, sizes.key_dim))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_far_apart(sign: int, check_close: Any) -> None:
    """The largest comes first, last, and in another part than the rest."""
    sizes = SIZES["tiny"]
    latents, shared, runs = make_pool([[300], [200], [5]], sizes)
    pool, expand = (latents * 30, shared * 30, runs), make_expand(sizes)
    q = sign * make_queries(3, sizes)
    y = attend(q, *pool, expand, key_dim=sizes.key_dim, scale=SCALE)
    check_close(y, by_torch(q, pool, expand, sizes.key_dim), 2e-5)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [1, 100, 2000])
@pytest.mark.parametrize("part", ["latents", "shared"])
def test_nan_in_a_slot_of_its_own_is_seen(part: str, length: int, threads: int) -> None:
    torch.set_num_threads(threads)
    sizes = SIZES["tiny"]
    latents, shared, runs = make_pool([[length], [20]], sizes)
    q, expand = make_queries(2, sizes), make_expand(sizes)
    start = int(runs.pairs[0, 0])
    for at in {0, length // 2, length - 1}:
        bad = (latents if part == "latents" else shared)[start + at]
        kept = bad.clone()
        bad[3] = torch.nan
        y = attend(q, latents, shared, runs, expand, key_dim=sizes.key_dim, scale=SCALE)
        assert y.isnan().all(1).tolist() == [True, False]
        assert bool(y[1].isfinite().all())
        bad.copy_(kept)


@needs_compiled
@each_dtype
@each_size
def test_threads_rows_beside_it_and_places_change_nothing(sizes: Sizes, dtype: torch.dtype) -> None:
    """Down to the last bit, also of a row whose latents are gone through in parts."""
    lengths = [[2000], [1], [300, 7, 130], [31, 2], [1100], [5], [600]]
    q, expand = make_queries(len(lengths), sizes, dtype), make_expand(sizes, dtype)
    options: dict[str, Any] = {"key_dim": sizes.key_dim, "scale": SCALE}
    whole = attend(q, *make_pool(lengths, sizes, dtype), expand, **options)
    pieces = [[1] * (sum(own) % 50) + [sum(own) - sum(own) % 50] for own in lengths]
    pool = make_pool([[n for n in own if n] for own in pieces], sizes, dtype, seed=2)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for num_rows in (1, 2, 3, len(lengths)):
            runs = KeyRuns(pool[2].pairs, pool[2].firsts[: num_rows + 1], pool[2].most)
            y = attend(q[:num_rows], *pool[:2], runs, expand, **options)
            assert torch.equal(y, whole[:num_rows])
        for row in range(len(lengths)):
            runs = KeyRuns(pool[2].pairs, pool[2].firsts[row : row + 2], pool[2].most)
            assert torch.equal(
                attend(q[row][None], *pool[:2], runs, expand, **options)[0], whole[row]
            )


@pytest.mark.parametrize("case", ["rank", "half", "weights across", "latents across", "too wide"])
def test_what_has_no_compiled_form_takes_the_formula(case: str, check_close: Any) -> None:
    sizes = SIZES["tiny"]
    if case == "rank":
        sizes = Sizes(4, 16, 8, 16, 20)
    if case == "too wide":
        sizes = Sizes(1, 4, 8, 4, 2048)
    latents, shared, runs = make_pool([[20], [3, 4]], sizes)
    q, expand = make_queries(2, sizes), make_expand(sizes)
    expected = attend_reference(
        q, latents, shared, runs, expand, key_dim=sizes.key_dim, scale=SCALE
    )
    if case == "half":
        q, expected = q.half(), expected.half()
    if case == "weights across":
        expand = expand.transpose(1, 2).contiguous().transpose(1, 2)
    if case == "latents across":
        latents = latents.t().contiguous().t()
    y = attend(q, latents, shared, runs, expand, key_dim=sizes.key_dim, scale=SCALE)
    check_close(y.float(), expected.float(), 1e-3 if case == "half" else None)
