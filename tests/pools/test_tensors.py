"""The tensors: views that copy nothing and never overlap; states that come back as they were."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from testkit.helpers import ids

from agentcache.pools.layout import KVLayout, KVSpec, PoolSizes, StateLayout, StateSpec
from agentcache.pools.tensors import TensorPools
from agentcache.types import Kind

KV = KVLayout((KVSpec(1, 2, 3), KVSpec(4, 1, 5)), torch.float32)


def state_layout(*shapes: tuple[int, ...]) -> StateLayout:
    names = ("conv", "recurrent")
    return StateLayout(
        tuple(
            StateSpec(idx // 2, names[idx % 2], shape, torch.float32)
            for idx, shape in enumerate(shapes)
        )
    )


STATE = state_layout((3, 7), (2, 5, 3), (1,), (4, 9))


def make(
    *,
    kv: KVLayout = KV,
    state: StateLayout = STATE,
    num_pages: int = 20,
    page_size: int = 3,
    num_rows: int = 2,
    poison: bool = False,
) -> TensorPools:
    sizes = PoolSizes.of(
        kv, state, num_pages=num_pages, page_size=page_size, num_rows=num_rows, num_staging=1
    )
    return TensorPools(kv, state, sizes, poison=poison)


def fill(pools: TensorPools, row: int, seed: int) -> dict[tuple[int, str], torch.Tensor]:
    """Random values in every state tensor of a row; returns copies."""
    torch.manual_seed(seed)
    for view in pools.state.values():
        view[row] = torch.randn(view[row].shape)
    return read(pools, row)


def read(pools: TensorPools, row: int) -> dict[tuple[int, str], torch.Tensor]:
    return {key: view[row].clone() for key, view in pools.state.items()}


def same(a: dict[tuple[int, str], torch.Tensor], b: dict[tuple[int, str], torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_state_tensors_have_their_shapes_and_do_not_overlap() -> None:
    pools = make()
    assert set(pools.state) == {(0, "conv"), (0, "recurrent"), (1, "conv"), (1, "recurrent")}
    assert [tuple(view.shape[1:]) for view in pools.state.values()] == [
        spec.shape for spec in STATE.specs
    ]
    for number, view in enumerate(pools.state.values(), 1):
        for row in range(len(view)):
            view[row] = 10 * number + row
    for number, view in enumerate(pools.state.values(), 1):
        assert len(view) == pools.rows.num_rows + len(pools.staging_rows) == 3
        for row in range(len(view)):
            assert (view[row] == 10 * number + row).all()


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("shapes", [((1,),), ((5, 13),), ((3, 7), (2, 5, 3), (1,)), ((64, 16),)])
def test_state_comes_back_from_scattered_pages(
    page_size: int, shapes: tuple[tuple[int, ...], ...]
) -> None:
    state = state_layout(*shapes)
    pools = make(state=state, page_size=page_size, num_pages=400)
    assert pools.state_pages == -(-state.num_bytes // pools.page_bytes)
    order = np.random.default_rng(page_size).permutation(400).astype(np.int32)
    first, second = order[: pools.state_pages], order[pools.state_pages : 2 * pools.state_pages]
    wanted, other = fill(pools, 0, seed=1), fill(pools, 1, seed=2)
    pools.save_state(0, first)
    pools.save_state(1, second)
    fill(pools, 0, seed=3)
    assert same(read(pools, 1), other)
    pools.load_state(first, 1)
    assert same(read(pools, 1), wanted)
    pools.load_state(second, 0)
    assert same(read(pools, 0), other)


def test_checkpoint_is_a_copy() -> None:
    pools = make()
    pages = np.arange(pools.state_pages, dtype=np.int32)
    wanted = fill(pools, 0, seed=1)
    pools.save_state(0, pages)
    fill(pools, 0, seed=2)
    pools.load_state(pages, 1)
    fill(pools, 1, seed=3)
    pools.load_state(pages, 0)
    assert same(read(pools, 0), wanted)


def test_saving_touches_no_other_page_and_loading_no_other_row() -> None:
    pools = make()
    pools._arena.fill_(7)
    pages = ids(*range(1, 2 * pools.state_pages, 2))
    fill(pools, 0, seed=1)
    rows = pools._rows.clone()
    pools.save_state(0, pages)
    others = np.setdiff1d(np.arange(pools.sizes.num_pages), pages)
    assert (pools._arena[torch.from_numpy(others)] == 7).all()
    pools.load_state(pages, 1)
    assert torch.equal(pools._rows[0], rows[0])
    assert torch.equal(pools._rows[1], rows[0])
    assert torch.equal(pools._rows[2], rows[2])


def test_cleared_row_is_zero_and_copied_row_is_equal_and_apart() -> None:
    pools = make()
    wanted = fill(pools, 0, seed=1)
    fill(pools, 1, seed=2)
    pools.copy_row(0, 2)
    pools.clear_state(0)
    assert all((value == 0).all() for value in read(pools, 0).values())
    assert same(read(pools, 2), wanted)
    assert not same(read(pools, 1), wanted)


def test_fresh_rows_are_the_state_before_the_first_token() -> None:
    assert all((view == 0).all() for view in make().state.values())


def test_kv_of_every_layer_and_slot_lies_apart() -> None:
    pools = make()
    num_slots = 20 * 3
    number = 0
    for spec in KV.specs:
        for view in pools.kv[spec.layer_idx]:
            assert view.shape == (num_slots, spec.num_kv_heads, spec.head_dim)
            number += 1
            for slot in range(num_slots):
                view[slot] = number * 1000 + slot
    number = 0
    for spec in KV.specs:
        for view in pools.kv[spec.layer_idx]:
            number += 1
            wanted = number * 1000 + torch.arange(num_slots)
            assert (view == wanted[:, None, None]).all()
    assert list(pools.kv) == [1, 4]


def test_neighbouring_slots_are_read_without_a_copy() -> None:
    pools = make()
    for keys, values in pools.kv.values():
        for view in (keys, values):
            part = view[4:9]
            assert part.untyped_storage().data_ptr() == pools._arena.untyped_storage().data_ptr()
            assert part.stride(0) * part.element_size() == KV.token_bytes
            part.fill_(3.0)
            assert (view[4:9] == 3.0).all()


def test_page_is_one_block_of_memory() -> None:
    pools = make()
    pools._arena.zero_()
    for keys, values in pools.kv.values():
        keys[6:9] = 1.0
        values[6:9] = 1.0
    touched = pools._arena.view(torch.float32).ne(0).any(dim=1).nonzero().flatten()
    assert touched.tolist() == [2]
    assert pools._arena.view(torch.float32)[2].ne(0).all()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_tail_copy_takes_the_first_tokens_of_every_layer_and_no_more(count: int) -> None:
    pools = make()
    for number, (keys, values) in enumerate(pools.kv.values()):
        keys[:], values[:] = -1.0, -1.0
        keys[3:6] = (10.0 * number + torch.arange(3))[:, None, None]
        values[3:6] = (10.0 * number + 5 + torch.arange(3))[:, None, None]
    pools.copy_tail(Kind.FULL, 1, 4, count)
    for keys, values in pools.kv.values():
        for view in (keys, values):
            assert torch.equal(view[12 : 12 + count], view[3 : 3 + count])
            assert (view[12 + count : 15] == -1).all()
            assert (view[15:] == -1).all()


def test_freed_pages_are_nan_and_others_are_not() -> None:
    pools = make(poison=True)
    pools._arena.zero_()
    pools.on_free(ids(2, 11))
    for keys, values in pools.kv.values():
        for view in (keys, values):
            nan = view.isnan().flatten(1)
            freed = [6, 7, 8, 33, 34, 35]
            assert nan.all(dim=1).nonzero().flatten().tolist() == freed
            assert nan.any(dim=1).nonzero().flatten().tolist() == freed
    pages = ids(2, *range(12, 12 + pools.state_pages - 1))
    pools.load_state(pages, 0)
    assert any(view[0].isnan().any() for view in pools.state.values())


def test_pages_are_left_alone_without_poison() -> None:
    pools = make()
    pools._arena.fill_(1)
    pools.on_free(ids(0, 1))
    assert (pools._arena == 1).all()


def test_bytes_held_are_those_of_the_sizes() -> None:
    pools = make(num_pages=11, num_rows=5)
    sizes = pools.sizes
    assert pools.held_bytes() == sizes.total_bytes
    assert sizes.total_bytes == 11 * sizes.page_bytes + 6 * sizes.row_bytes
    assert pools.page_bytes == 3 * KV.token_bytes
    assert pools.row_bytes == pools.state_pages * pools.page_bytes
    assert list(pools.staging_rows) == [5]


@pytest.mark.parametrize("kv", [True, False])
def test_model_of_one_kind_has_pools_of_one_kind(kv: bool) -> None:
    none = KVLayout((), torch.float32)
    pools = make(state=StateLayout(())) if kv else make(kv=none)
    assert bool(pools.kv) == kv
    assert bool(pools.state) != kv
    if kv:
        pools.clear_state(0)
        assert pools.state_pages == 0
    else:
        wanted = fill(pools, 0, seed=1)
        pools.save_state(0, ids(7))
        pools.load_state(ids(7), 1)
        assert same(read(pools, 1), wanted)


def test_half_precision_kv_stands_beside_single_precision_states() -> None:
    kv = KVLayout((KVSpec(0, 1, 3),), torch.bfloat16)
    pools = make(kv=kv, num_pages=200, page_size=1)
    assert pools.kv[0][0].dtype == torch.bfloat16
    pages = np.arange(0, 2 * pools.state_pages, 2, dtype=np.int32)
    wanted = fill(pools, 0, seed=1)
    pools.save_state(0, pages)
    pools.load_state(pages, 1)
    assert same(read(pools, 1), wanted)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what is resident in /proc")
def test_rows_that_nobody_runs_in_take_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    pools = make(state=state_layout((1 << 20,)), num_pages=1, num_rows=64)
    assert pools.row_bytes * 64 >= 1 << 28
    assert resident() - before < 1 << 26
    first = pools.state[0, "conv"][5]
    assert not first.any(), "a row nobody used is before the first token"
