"""Checkpoints that are rounded: how far, in how many bytes, and what is never touched."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.helpers import ids

from agentcache.pools.layout import (
    KVLayout,
    KVSpec,
    PoolSizes,
    StateLayout,
    StateSpec,
    divide_budget,
)
from agentcache.pools.packing import Packing, make_packing
from agentcache.pools.tensors import TensorPools

KV = KVLayout((KVSpec(1, 2, 4), KVSpec(4, 1, 8)), torch.float32)
STATE = StateLayout(
    (
        StateSpec(0, "conv", (24, 3), torch.float32),
        StateSpec(0, "recurrent", (4, 8, 32), torch.float32),
        StateSpec(2, "conv", (24, 3), torch.bfloat16),
        StateSpec(2, "recurrent", (4, 8, 32), torch.float32),
        StateSpec(2, "recurrent1", (131,), torch.float32),
        StateSpec(3, "recurrent", (6, 40), torch.bfloat16),
        StateSpec(3, "waiting_kv.c4", (4, 8), torch.float32),
        StateSpec(3, "count", (2,), torch.int64),
    )
)
ERRORS = {"float16": 2**-11, "int8": 0.51 / 127}
"""Greatest error over the largest of the numbers that share a scale."""
FORMATS = pytest.mark.parametrize("name", list(ERRORS))


def make(name: str, *, state: StateLayout = STATE, kv: KVLayout = KV, page_size: int = 1):
    packing = make_packing(state, name)
    sizes = PoolSizes.of(
        kv,
        state,
        num_pages=300,
        page_size=page_size,
        num_rows=2,
        num_staging=1,
        checkpoint_bytes=None if packing is None else packing.num_bytes,
    )
    return TensorPools(kv, state, sizes, packing=packing, poison=True)


def fill(pools: TensorPools, row: int, seed: int) -> dict[tuple[int, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for view in pools.state.values():
        if view.is_floating_point():
            view[row] = torch.randn(view[row].shape, generator=generator).to(view.dtype)
        else:
            view[row] = torch.randint(2**40, view[row].shape, generator=generator)
    return read(pools, row)


def read(pools: TensorPools, row: int) -> dict[tuple[int, str], torch.Tensor]:
    return {key: view[row].clone() for key, view in pools.state.items()}


def round_trip(values: torch.Tensor, name: str) -> torch.Tensor:
    """What one recurrent tensor comes back as."""
    layout = StateLayout((StateSpec(0, "recurrent", tuple(values.shape), values.dtype),))
    packing = Packing(layout, name)
    row = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    row[: layout.specs[0].num_bytes] = values.contiguous().view(-1).view(torch.uint8)
    packed = torch.full((packing.num_bytes,), 0xFF, dtype=torch.uint8)
    packing.pack(row, packed)
    packing.unpack(packed, row)
    return row[: layout.specs[0].num_bytes].view(values.dtype).view(values.shape)


def pages_of(pools: TensorPools, seed: int = 0) -> np.ndarray:
    order = np.random.default_rng(seed).permutation(300).astype(np.int32)
    return order[: pools.state_pages]


@FORMATS
def test_states_come_back_within_the_bound_and_the_rest_as_it_was(name: str) -> None:
    pools = make(name)
    wanted, pages = fill(pools, 0, seed=1), pages_of(pools)
    pools.save_state(0, pages)
    fill(pools, 0, seed=2)
    other = fill(pools, 1, seed=3)
    pools.load_state(pages, 0)
    got = read(pools, 0)
    rounded = {(0, "conv"), (0, "recurrent"), (2, "recurrent"), (2, "recurrent1")}
    rounded |= {(3, "recurrent")} if name == "int8" else set()
    for key, value in wanted.items():
        if key not in rounded:
            assert torch.equal(got[key], value), key
            continue
        assert not torch.equal(got[key], value), key
        bound = ERRORS["float16" if key[1] == "conv" else name]
        slack = 2**-8 if value.dtype == torch.bfloat16 else 0
        error = (got[key].float() - value.float()).abs().max() / value.float().abs().max()
        assert error <= bound + slack, key
    assert all(torch.equal(value, other[key]) for key, value in read(pools, 1).items())


@FORMATS
@pytest.mark.parametrize("magnitude", [3e38, 1e30, 65504.0, 1.0, 1e-8, 1e-30])
def test_no_magnitude_overflows_or_vanishes(name: str, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (2 * torch.rand((5, 64), generator=generator) - 1) * magnitude
    values[0, 0] = magnitude
    got = round_trip(values, name)
    assert got.isfinite().all()
    peaks = values.abs().amax(dim=1, keepdim=True)
    assert ((got - values).abs() / peaks).max() <= ERRORS[name]


@FORMATS
def test_heads_of_unlike_magnitudes_do_not_share_their_rounding(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((8, 4, 32), generator=generator) * 10.0 ** torch.arange(-16, 16, 4).view(
        -1, 1, 1
    )
    got = round_trip(values, name)
    errors = torch.linalg.vector_norm(got - values, dim=(1, 2))
    assert (errors / torch.linalg.vector_norm(values, dim=(1, 2)) < 2 * ERRORS[name]).all()


@FORMATS
def test_zeros_stay_zeros(name: str) -> None:
    values = torch.zeros((3, 32))
    values[1] = torch.arange(32)
    got = round_trip(values, name)
    assert (got[[0, 2]] == 0).all()
    assert got[1, 0] == 0


@FORMATS
def test_what_is_not_finite_comes_back_as_it_was_and_spoils_nothing_else(name: str) -> None:
    values = torch.randn((6, 32), generator=torch.Generator().manual_seed(0))
    values[1, 3], values[1, 4], values[1, 5] = math.nan, math.inf, -math.inf
    values[4] = math.nan
    got = round_trip(values, name)
    finite = values.isfinite()
    assert torch.equal(got.isnan(), values.isnan())
    assert torch.equal(got[values.isinf()], values[values.isinf()])
    errors = (got - values)[finite].abs().max()  # the largest beside them may lose a step
    assert errors <= values[finite].abs().max() * 2 * ERRORS[name]
    clean = values.clone()
    clean[[1, 4]] = 0
    assert torch.equal(round_trip(clean, name)[[0, 2, 3, 5]], got[[0, 2, 3, 5]])


@FORMATS
@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(1,), (7,), (131,), (3, 5), (4, 16), (2, 3, 128), (2, 257), (2, 300)]),
    exponent=st.integers(-30, 37),
    seed=st.integers(0, 2**16),
)
def test_error_is_bounded_whatever_the_shape(
    name: str, shape: tuple[int, ...], exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = (2 * torch.rand(shape, generator=generator) - 1) * 10.0**exponent
    got = round_trip(values, name)
    assert (got - values).abs().max() <= values.abs().max() * ERRORS[name]


@FORMATS
def test_rounding_twice_is_rounding_once(name: str) -> None:
    once = round_trip(torch.randn((9, 64), generator=torch.Generator().manual_seed(0)), name)
    again = round_trip(once, name)
    assert (again - once).abs().max() <= 2**-7 * once.abs().max() * ERRORS[name]


@FORMATS
def test_pages_that_were_given_back_read_as_no_number(name: str) -> None:
    pools = make(name)
    fill(pools, 0, seed=1)
    pages = pages_of(pools)
    pools.save_state(0, pages)
    pools.on_free(pages)
    pools.load_state(pages, 0)
    for key, value in read(pools, 0).items():
        if value.is_floating_point():
            assert value.isnan().all(), key


@FORMATS
def test_state_in_as_many_pages_as_a_row_has_is_kept_as_it_is(name: str) -> None:
    pools = make(name)
    wanted = fill(pools, 0, seed=1)
    assert pools.state_pages < pools.row_pages
    pages = np.random.default_rng(1).permutation(300).astype(np.int32)[: pools.row_pages]
    pools.save_state(0, pages)
    pools.load_state(pages, 1)
    assert all(torch.equal(value, wanted[key]) for key, value in read(pools, 1).items())


@FORMATS
def test_saving_and_loading_touch_nothing_else(name: str) -> None:
    pools = make(name)
    pools._arena.fill_(7)
    fill(pools, 0, seed=1)
    pages = pages_of(pools)
    rows = pools._rows.clone()
    pools.save_state(0, pages)
    assert torch.equal(pools._rows, rows)
    others = np.setdiff1d(np.arange(300), pages)
    assert (pools._arena[torch.from_numpy(others)] == 7).all()
    arena = pools._arena.clone()
    pools.load_state(pages, 1)
    assert torch.equal(pools._arena, arena)
    assert torch.equal(pools._rows[[0, 2]], rows[[0, 2]])


def test_sizes_of_a_checkpoint() -> None:
    state = StateLayout((StateSpec(0, "recurrent", (8, 64, 128), torch.float32),))
    count = 8 * 64 * 128
    assert Packing(state, "float16").num_bytes == count * 2 + 8 * 64
    assert Packing(state, "int8").num_bytes == count + 8 * 64 * 2
    assert make_packing(state, "unchanged") is None


@pytest.mark.parametrize(
    "specs",
    [
        (),
        (StateSpec(0, "conv", (8, 3), torch.bfloat16),),
        (StateSpec(0, "recurrent", (3, 2), torch.float64),),
        (StateSpec(0, "recurrent", (1,), torch.float32),),
    ],
)
@FORMATS
def test_states_that_would_get_no_smaller_are_not_packed(
    name: str, specs: tuple[StateSpec, ...]
) -> None:
    assert make_packing(StateLayout(specs), name) is None


@FORMATS
def test_nothing_is_rounded_where_that_would_save_no_page(name: str) -> None:
    pools = make(name, page_size=400)
    assert pools.state_pages == pools.row_pages == 1
    assert pools.checkpoint_format == "unchanged"
    assert pools.held_bytes() == pools.sizes.total_bytes
    wanted = fill(pools, 0, seed=1)
    pools.save_state(0, ids(5))
    pools.load_state(ids(5), 1)
    assert all(torch.equal(value, wanted[key]) for key, value in read(pools, 1).items())


@FORMATS
@pytest.mark.parametrize("kv", [KV, KVLayout((), torch.float32)], ids=["full", "no KV"])
def test_budget_counts_all_that_is_held_and_holds_more_checkpoints(name: str, kv: KVLayout) -> None:
    packing = make_packing(STATE, name)
    assert packing is not None
    counts = {}
    for checkpoint_bytes in (None, packing.num_bytes):
        sizes = divide_budget(
            kv,
            STATE,
            budget_bytes=400_000,
            page_size=1,
            max_running=4,
            checkpoint_bytes=checkpoint_bytes,
        )
        pools = TensorPools(kv, STATE, sizes, packing=packing)
        assert pools.held_bytes() == sizes.total_bytes
        assert 400_000 - sizes.page_bytes < sizes.total_bytes <= 400_000
        assert sizes.row_bytes >= STATE.num_bytes
        counts[checkpoint_bytes] = sizes.num_pages // sizes.state_pages
    assert counts[packing.num_bytes] > 1.6 * counts[None]
