"""Allocator, pools and settings over a long life, and at their edges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from testkit.helpers import NAMESPACE, Agent, ids, make_cache, run

from agentcache.cache import OutOfPages
from agentcache.config import CacheConfig, parse_bytes
from agentcache.errors import ConfigError
from agentcache.pools import pages_reference
from agentcache.pools.layout import KVLayout, KVSpec, PoolSizes, StateLayout, StateSpec
from agentcache.pools.pages import PageAllocator
from agentcache.pools.tensors import TensorPools

if TYPE_CHECKING:
    from agentcache.types import IntArray


def span(start: int, stop: int) -> IntArray:
    return np.arange(start, stop, dtype=np.int32)


def test_free_list_stays_small_over_many_turns() -> None:
    cache = make_cache(num_pages=64, page_size=4, state_pages=3)
    cache.pools.pages = pages_reference.PageAllocator(64)
    for at in range(2000):
        run(cache, span(10 * (at % 7), 10 * (at % 7) + 9))
        cache.clear()
    assert len(cache.pools.pages._free._heap) <= 4 * 64


def test_no_pages_are_no_error() -> None:
    pages = PageAllocator(4)
    assert pages.alloc(0).tolist() == []
    assert pages.alloc_scattered(0).tolist() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_freed_pages_are_nan_in_half_precision_too(dtype: torch.dtype) -> None:
    kv = KVLayout((KVSpec(0, 1, 4),), dtype)
    state = StateLayout((StateSpec(1, "recurrent", (4,), torch.float32),))
    sizes = PoolSizes.of(kv, state, num_pages=4, page_size=2, num_rows=1, num_staging=1)
    pools = TensorPools(kv, state, sizes, poison=True)
    pools._arena.zero_()
    pools.on_free(ids(2))
    assert pools.kv[0][0][4:6].isnan().all()


def test_fresh_pages_are_nan_where_memory_is_poisoned() -> None:
    """`torch.empty` may hold zeros: a read of a page nobody wrote would go unseen."""
    kv = KVLayout((KVSpec(0, 1, 4),), torch.float32)
    state = StateLayout((StateSpec(1, "recurrent", (4,), torch.float32),))
    sizes = PoolSizes.of(kv, state, num_pages=4, page_size=2, num_rows=1, num_staging=1)
    assert TensorPools(kv, state, sizes, poison=True).kv[0][0].isnan().all()


@pytest.mark.parametrize("value", [1.5e9, True, None, b"4096"])
def test_what_is_neither_number_nor_text_is_a_config_error(value: object) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(value)  # type: ignore[arg-type]


def test_truth_is_no_page_size() -> None:
    with pytest.raises(ConfigError):
        CacheConfig(page_size=True)


def test_reservation_that_can_never_fit_costs_nobody_anything() -> None:
    cache = make_cache(num_pages=20)
    agent = Agent(cache)
    agent.turn(span(0, 10), ids(90, 91))
    before = cache.pools.pages.num_used
    lease = cache.acquire(NAMESPACE, span(100, 110))
    with pytest.raises(OutOfPages):
        cache.reserve(lease, 4 * 21)  # more than the whole arena
    assert cache.pools.pages.num_used == before
