"""A budget divides into pools that never exceed it, waste less than a page, and have a minimum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from testkit.helpers import check, ids

from agentcache.cache import HybridCache
from agentcache.clock import ManualClock
from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.errors import BudgetTooSmall
from agentcache.metrics import Metrics
from agentcache.policy.eviction import make_policy
from agentcache.pools.layout import (
    KVLayout,
    KVSpec,
    PoolSizes,
    StateLayout,
    StateSpec,
    divide_budget,
)
from agentcache.pools.tensors import TensorPools
from agentcache.tree.radix_tree import RadixTree

if TYPE_CHECKING:
    from agentcache.components.base import Component

KV = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5)), max_size=2).map(
    lambda sizes: KVLayout(
        tuple(KVSpec(idx, heads, dim) for idx, (heads, dim) in enumerate(sizes)), torch.float32
    )
)
STATE = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 40)), max_size=3).map(
    lambda shapes: StateLayout(
        tuple(StateSpec(idx, "recurrent", shape, torch.float32) for idx, shape in enumerate(shapes))
    )
)


def minimum_of(kv: KVLayout, state: StateLayout, page_size: int) -> int:
    with pytest.raises(BudgetTooSmall) as refused:
        divide_budget(kv, state, budget_bytes=0, page_size=page_size, max_running=4)
    assert refused.value.budget_bytes == 0
    assert str(refused.value.minimum_bytes) in str(refused.value)
    return refused.value.minimum_bytes


@settings(max_examples=60)
@given(KV, STATE, st.integers(1, 17), st.integers(1, 9), st.integers(0, 60_000))
def test_pools_fill_the_budget_up_to_a_page_and_never_exceed_it(
    kv: KVLayout, state: StateLayout, page_size: int, max_running: int, spare: int
) -> None:
    assume(kv.specs or state.specs)
    budget = minimum_of(kv, state, page_size) + spare
    sizes = divide_budget(
        kv, state, budget_bytes=budget, page_size=page_size, max_running=max_running
    )
    assert budget - sizes.page_bytes < sizes.total_bytes <= budget
    assert 1 <= sizes.num_rows <= max_running
    assert sizes.num_staging >= 1
    assert sizes.num_pages >= sizes.state_pages + 1
    assert sizes.row_bytes >= state.num_bytes
    assert sizes.row_bytes - state.num_bytes < sizes.page_bytes
    rows_bytes = (sizes.num_rows + sizes.num_staging) * sizes.row_bytes
    assert rows_bytes <= max(budget // 4, 2 * sizes.row_bytes)
    assert TensorPools(kv, state, sizes).held_bytes() == sizes.total_bytes


@settings(max_examples=40)
@given(KV, STATE, st.integers(1, 17))
def test_minimum_is_exact(kv: KVLayout, state: StateLayout, page_size: int) -> None:
    assume(kv.specs or state.specs)
    minimum = minimum_of(kv, state, page_size)
    with pytest.raises(BudgetTooSmall) as refused:
        divide_budget(kv, state, budget_bytes=minimum - 1, page_size=page_size, max_running=4)
    assert refused.value.minimum_bytes == minimum
    sizes = divide_budget(kv, state, budget_bytes=minimum, page_size=page_size, max_running=4)
    assert sizes.total_bytes == minimum
    assert sizes.num_pages == sizes.state_pages + 1
    if state.specs:
        assert (sizes.num_rows, sizes.num_staging) == (1, 1)
    works(kv, state, sizes)


def works(kv: KVLayout, state: StateLayout, sizes: PoolSizes) -> None:
    """One request of a page of tokens runs, files its checkpoint and is found again."""
    rules: list[Component] = []
    if kv.specs:
        rules.append(FullComponent(sizes.page_size))
    if state.specs:
        rules.append(StateComponent())
    pools = TensorPools(kv, state, sizes)
    cache = HybridCache(RadixTree(rules), pools, make_policy("lru"), ManualClock(), Metrics())
    tokens = ids(*range(sizes.page_size))
    lease = cache.acquire(b"", tokens)
    cache.reserve(lease, len(tokens))
    assert cache.commit(lease, tokens, len(tokens), lease.row)
    cache.release(lease)
    check(cache)
    assert cache.tree.match(cache.tree.root(b""), tokens, len(tokens)).boundary == len(tokens)


def layouts() -> tuple[KVLayout, StateLayout]:
    kv = KVLayout((KVSpec(1, 2, 8),), torch.float32)
    state = StateLayout((StateSpec(0, "recurrent", (4, 8, 8), torch.float32),))
    return kv, state


def test_rows_are_fewer_where_they_would_crowd_out_the_pages() -> None:
    kv, state = layouts()
    row = 1024
    assert state.num_bytes == row
    # two rows, two pages of checkpoint, one page of KV
    assert minimum_of(kv, state, 4) == 2 * row + 3 * 512
    rich = divide_budget(kv, state, budget_bytes=400 * row, page_size=4, max_running=8)
    assert (rich.num_rows, rich.num_staging) == (8, 8)
    poor = divide_budget(kv, state, budget_bytes=20 * row, page_size=4, max_running=8)
    assert (poor.num_rows, poor.num_staging) == (3, 2)
    least = divide_budget(kv, state, budget_bytes=9 * row, page_size=4, max_running=8)
    assert (least.num_rows, least.num_staging) == (1, 1)


def test_model_without_state_gives_every_byte_to_pages() -> None:
    kv, _ = layouts()
    sizes = divide_budget(kv, StateLayout(()), budget_bytes=10_000, page_size=4, max_running=8)
    assert (sizes.state_pages, sizes.row_bytes, sizes.num_rows) == (0, 0, 8)
    assert sizes.num_pages == 10_000 // sizes.page_bytes


def test_model_without_kv_has_pages_as_large_as_a_checkpoint() -> None:
    _, state = layouts()
    none = KVLayout((), torch.float32)
    sizes = divide_budget(none, state, budget_bytes=20_000, page_size=4, max_running=8)
    assert (sizes.state_pages, sizes.page_bytes) == (1, 1024)


def test_layouts_count_bytes() -> None:
    kv = KVLayout((KVSpec(0, 2, 8), KVSpec(3, 1, 5)), torch.bfloat16)
    assert kv.token_elements == 2 * 16 + 2 * 5
    assert kv.token_bytes == 84
    state = StateLayout(
        (
            StateSpec(1, "conv", (3, 7), torch.float32),
            StateSpec(1, "recurrent", (4, 4), torch.float32),
            StateSpec(2, "recurrent", (1,), torch.float32),
        )
    )
    assert [spec.num_bytes for spec in state.specs] == [84, 64, 4]
    assert state.offsets == (0, 128, 192)
    assert state.num_bytes == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_pages_hold_whole_tokens_of_every_kind_and_whole_words(
    page_size: int, dtype: torch.dtype
) -> None:
    generator = np.random.default_rng(page_size)
    for _ in range(60):
        windows = [None, *generator.integers(2, 2000, 2).tolist()]
        specs = tuple(
            KVSpec(i, int(generator.integers(1, 5)), int(generator.integers(1, 40)), window=window)
            for i, window in enumerate(generator.choice(windows, generator.integers(1, 9)).tolist())
        )
        layout = KVLayout(specs, dtype)
        shape = layout.page_shape(page_size)
        assert shape.elements * dtype.itemsize % 8 == 0
        assert next(iter(shape.lens)) == layout.groups[0].kind
        assert shape.lens[layout.groups[0].kind] == page_size
        for group in layout.groups:
            assert shape.elements % shape.lens[group.kind] == 0
            assert shape.elements // shape.lens[group.kind] >= group.token_elements


def test_window_token_larger_than_a_whole_page_makes_the_page_larger() -> None:
    windowed = [KVSpec(i, 1, 16, window=64) for i in range(1, 36)]
    shape = KVLayout((KVSpec(0, 1, 8), *windowed), torch.float32).page_shape(64)
    assert shape.lens["swa"] >= 1
    assert shape.elements // shape.lens["swa"] >= 35 * 32
