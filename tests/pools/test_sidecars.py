"""Sidecars: what a page of KV brings with it goes wherever the page goes, and counts as memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.helpers import NAMESPACE, ids
from testkit.models import micro_model, micro_runtime, tokenizer
from testkit.tiers import TensorTier

from agentcache.cache import HybridCache
from agentcache.clock import ManualClock
from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.config import CacheConfig
from agentcache.errors import BudgetTooSmall, ConfigError
from agentcache.metrics import Metrics
from agentcache.policy.eviction import make_policy
from agentcache.pools.layout import (
    KVLayout,
    KVSpec,
    PoolSizes,
    SidecarSpec,
    StateLayout,
    StateSpec,
    divide_budget,
)
from agentcache.pools.tensors import TensorPools
from agentcache.runtime import Runtime
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.cache import Lease
    from agentcache.types import IntArray

INDEXER = SidecarSpec("indexer", (8,), torch.float32)
C4 = SidecarSpec("c4", (3,), torch.float32, tokens=4)
C128 = SidecarSpec("c128", (5,), torch.bfloat16, tokens=128)
DRAFT = SidecarSpec("draft", (2, 2, 1, 3), torch.float32)
ALL = (INDEXER, C4, C128, DRAFT)
KV = KVLayout((KVSpec(1, 1, 2),), torch.float32, ALL)
STATE = StateLayout((StateSpec(0, "recurrent", (6,), torch.float32),))
PAGE_SIZES = [16, 64, 128]


def sizes_of(page_size: int, num_pages: int, kv: KVLayout = KV) -> PoolSizes:
    return PoolSizes.of(
        kv, STATE, num_pages=num_pages, page_size=page_size, num_rows=3, num_staging=1
    )


def make_pools(page_size: int, num_pages: int = 40) -> TensorPools:
    return TensorPools(KV, STATE, sizes_of(page_size, num_pages), poison=True)


def make(page_size: int, num_pages: int = 40, lower_pages: int = 0) -> HybridCache:
    pools = make_pools(page_size, num_pages)
    return HybridCache(
        RadixTree([FullComponent(page_size), StateComponent()]),
        pools,
        make_policy("session-lru"),
        ManualClock(),
        Metrics(),
        lower=TensorTier(pools, lower_pages) if lower_pages else None,
    )


def traces(tokens: IntArray) -> list[float]:
    """Per position a number that stands for all tokens up to it, exact in bfloat16."""
    out, trace = [], 1
    for token in tokens.tolist():
        trace = (31 * trace + token + 7) % 251
        out.append(float(trace))
    return out


def write(pools: TensorPools, lease: Lease, tokens: IntArray, start: int, stop: int) -> None:
    """What a forward pass leaves at [start, stop): KV, and the entries that end there."""
    size, values = pools.sizes.page_size, traces(tokens)
    pages = lease.table.pages.tolist()
    keys, _ = pools.kv[1]
    for at in range(start, stop):
        keys[pages[at // size] * size + at % size] = values[at]
        for spec in ALL:
            if (at + 1) % spec.tokens == 0:
                page, idx = spec.place(at // spec.tokens, size)
                pools.sidecars[spec.name][pages[page], idx] = values[at]


def check_read(pools: TensorPools, lease: Lease, tokens: IntArray, length: int) -> None:
    """The KV of `tokens[:length]` is there, and every entry that ends in it."""
    size, values = pools.sizes.page_size, traces(tokens)
    pages = lease.table.pages.tolist()
    keys, _ = pools.kv[1]
    for at in range(length):
        assert (keys[pages[at // size] * size + at % size] == values[at]).all()
    for spec in ALL:
        for entry in range(length // spec.tokens):
            page, idx = spec.place(entry, size)
            held = pools.sidecars[spec.name][pages[page], idx]
            assert (held == values[(entry + 1) * spec.tokens - 1]).all(), (spec.name, entry)


def serve(cache: HybridCache, tokens: IntArray, structural: tuple[int, ...] = ()) -> Lease:
    """A whole request, which reads what it reuses."""
    pools, clock = cache.pools, cache._clock
    assert isinstance(pools, TensorPools)
    assert isinstance(clock, ManualClock)
    clock.advance(1.0)
    lease = cache.acquire(NAMESPACE, tokens, structural=structural)
    check_read(pools, lease, tokens, lease.boundary)
    at = lease.boundary
    for length in (*lease.plan, len(tokens)):
        cache.reserve(lease, length)
        write(pools, lease, tokens, at, length)
        assert cache.commit(lease, tokens, length, lease.row)
        at = length
    check_read(pools, lease, tokens, len(tokens))
    cache.release(lease)
    return lease


def prompt(length: int, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(0, 50, length).astype(np.int32)


@pytest.mark.parametrize(
    ("tokens", "page_size", "entries"),
    [(1, 16, 16), (4, 16, 4), (4, 4, 1), (4, 1, 1), (128, 16, 1), (128, 128, 1), (128, 256, 2)],
)
def test_page_has_an_entry_for_so_many_positions_or_one(
    tokens: int, page_size: int, entries: int
) -> None:
    spec = SidecarSpec("some", (3,), torch.float32, tokens=tokens)
    assert spec.entries(page_size) == entries
    assert 0 <= spec.page_bytes(page_size) - entries * 3 * 4 < 64
    assert spec.page_bytes(page_size) % 64 == 0


@pytest.mark.parametrize(("tokens", "page_size"), [(4, 6), (4, 3), (128, 48), (128, 192), (3, 16)])
def test_page_size_that_would_overlap_an_entry_in_part_is_refused(
    tokens: int, page_size: int
) -> None:
    layout = replace(KV, sidecars=(SidecarSpec("some", (3,), torch.float32, tokens=tokens),))
    for attempt in (
        lambda: layout.sidecars[0].entries(page_size),
        lambda: sizes_of(page_size, 4, layout),
        lambda: divide_budget(
            layout, STATE, budget_bytes=1 << 20, page_size=page_size, max_running=2
        ),
    ):
        with pytest.raises(ConfigError, match=f"page_size is {page_size}.*some.*{tokens} pos"):
            attempt()


def test_runtime_refuses_a_page_size_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    give_sidecars(monkeypatch, (C4,))
    with pytest.raises(ConfigError, match="page_size is 6, but c4"):
        micro_runtime(page_size=6)


@given(st.sampled_from([1, 2, 4, 8, 32, 128]), st.sampled_from([1, 2, 4, 16, 64, 128, 256]))
def test_every_entry_has_a_place_of_its_own_in_the_page_of_its_last_position(
    tokens: int, page_size: int
) -> None:
    spec = SidecarSpec("some", (1,), torch.float32, tokens=tokens)
    seen: dict[tuple[int, int], int] = {}
    for entry in range(3 * max(page_size, tokens) // tokens):
        page, idx = spec.place(entry, page_size)
        assert page == ((entry + 1) * tokens - 1) // page_size
        assert 0 <= idx < spec.entries(page_size)
        assert seen.setdefault((page, idx), entry) == entry
        before = [e for (p, i), e in seen.items() if p == page and i < idx]
        assert len(before) == idx, "entries of a page lie in order, from its beginning"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_entries_are_views_that_overlap_nothing(page_size: int) -> None:
    pools = make_pools(page_size, num_pages=3)
    keys, values = pools.kv[1]
    parts = {spec.name: pools.sidecars[spec.name] for spec in ALL} | {"k": keys, "v": values}
    for spec in ALL:
        assert parts[spec.name].shape == (3, spec.entries(page_size), *spec.shape)
        assert parts[spec.name].dtype == spec.dtype
    for number, part in enumerate(parts.values(), 1):
        part.copy_(torch.arange(part.numel()).reshape(part.shape) % 16 + 16 * number)
    for number, part in enumerate(parts.values(), 1):
        assert (part == torch.arange(part.numel()).reshape(part.shape) % 16 + 16 * number).all()


@pytest.mark.parametrize(
    ("page_size", "count"),
    [
        (page_size, count)
        for page_size in PAGE_SIZES
        for count in (1, 3, 4, 5, 15, 16, 63, 64, 127, 128)
        if count <= page_size
    ],
)
def test_copied_tail_brings_the_entries_that_are_complete_and_no_others(
    page_size: int, count: int
) -> None:
    pools = make_pools(page_size)
    source, target = 3, 7
    for spec in ALL:
        pools.sidecars[spec.name][source] = 5.0
    pools._arena[source] = 1
    pools.copy_tail(Kind.FULL, source, target, count)
    for spec in ALL:
        whole = count // spec.tokens if spec.tokens <= page_size else int(count == page_size)
        entries = pools.sidecars[spec.name]
        assert (entries[target, :whole] == 5.0).all()
        assert entries[target, whole:].isnan().all(), f"{spec.name}: half of an entry is none"
        assert (entries[source] == 5.0).all()
        others = [page for page in range(40) if page not in (source, target)]
        assert entries[others].isnan().all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_fresh_and_freed_entries_are_poison(page_size: int) -> None:
    cache = make(page_size)
    pools = cache.pools
    assert isinstance(pools, TensorPools)
    assert all(side.isnan().all() for side in pools.sidecars.values())
    serve(cache, prompt(200))
    assert not all(side.isnan().all() for side in pools.sidecars.values())
    cache.clear()
    assert all(side.isnan().all() for side in pools.sidecars.values())


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("lower_pages", [0, 60])
def test_entries_are_right_whatever_happens_to_their_pages(
    page_size: int, lower_pages: int
) -> None:
    """Branches inside pages and inside entries, splits, evictions, demotions and loads."""
    cache = make(page_size, lower_pages=lower_pages)
    rng = np.random.default_rng(page_size + lower_pages)
    trunk, reused = prompt(300), 0
    for turn in range(12):
        at = int(rng.choice([1, 3, 4, 6, 16, 63, 64, 66, 127, 128, 130, 200, 255, 256, 290]))
        tokens = np.concatenate([trunk[:at], prompt(int(rng.integers(1, 40)), seed=turn)])
        reused += serve(cache, tokens, structural=(at // 2,)).boundary > 0
        for _ in range(int(rng.integers(0, 4))):
            cache.evict_one()
    assert reused >= 4
    assert (cache.metrics.get("loads", Kind.FULL) > 0) == (lower_pages > 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_two_branches_in_one_page_have_entries_of_their_own(page_size: int) -> None:
    cache = make(page_size)
    stem = prompt(page_size + 6)
    serve(cache, stem)
    one = np.append(stem, ids(1, 2, 3)).astype(np.int32)
    two = np.append(stem, ids(4, 5, 6)).astype(np.int32)
    pools = cache.pools
    assert isinstance(pools, TensorPools)
    leases = [(cache.acquire(NAMESPACE, tokens), tokens) for tokens in (one, two)]
    assert leases[0][0].table.last != leases[1][0].table.last
    for lease, tokens in leases:
        assert lease.boundary == len(stem)
        cache.reserve(lease, len(tokens))
        write(pools, lease, tokens, lease.boundary, len(tokens))
    for lease, tokens in leases:
        check_read(pools, lease, tokens, len(tokens))
        cache.release(lease)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_demoted_entries_come_back(page_size: int) -> None:
    cache = make(page_size, lower_pages=60)
    tokens = prompt(280)
    serve(cache, tokens, structural=(70, 140))
    while cache.evict_one():
        pass
    pools = cache.pools
    assert isinstance(pools, TensorPools)
    assert pools.pages.num_used == 0
    assert all(side.isnan().all() for side in pools.sidecars.values())
    assert serve(cache, np.append(tokens, ids(9)).astype(np.int32)).boundary == 280


SIDECARS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 8, 32])), max_size=3).map(
    lambda drawn: tuple(
        SidecarSpec(f"side{idx}", (dim,), torch.float32, tokens=tokens)
        for idx, (dim, tokens) in enumerate(drawn)
    )
)


@settings(max_examples=60)
@given(SIDECARS, st.sampled_from([1, 2, 8, 16, 32]), st.integers(0, 60_000))
def test_budget_pays_for_what_lies_beside_the_pages(
    sidecars: tuple[SidecarSpec, ...], page_size: int, spare: int
) -> None:
    layout = replace(KV, sidecars=sidecars)
    with pytest.raises(BudgetTooSmall) as refused:
        divide_budget(layout, STATE, budget_bytes=0, page_size=page_size, max_running=4)
    least = refused.value.minimum_bytes
    beside = sum(spec.page_bytes(page_size) for spec in sidecars)
    budget = least + spare
    sizes = divide_budget(layout, STATE, budget_bytes=budget, page_size=page_size, max_running=4)
    assert sizes.sidecar_bytes == beside
    page = sizes.page_bytes + beside
    assert budget - page < sizes.total_bytes <= budget
    rows = (sizes.num_rows + sizes.num_staging) * sizes.row_bytes
    assert sizes.total_bytes == sizes.num_pages * page + rows
    assert sizes.num_pages >= sizes.state_pages + 1
    assert TensorPools(layout, STATE, sizes).held_bytes() == sizes.total_bytes
    plain = divide_budget(
        replace(layout, sidecars=()),
        STATE,
        budget_bytes=budget,
        page_size=page_size,
        max_running=4,
    )
    assert plain.num_pages >= sizes.num_pages
    with pytest.raises(BudgetTooSmall):
        divide_budget(layout, STATE, budget_bytes=least - 1, page_size=page_size, max_running=4)


def give_sidecars(monkeypatch: pytest.MonkeyPatch, sidecars: tuple[SidecarSpec, ...]) -> None:
    """Let the backend's model have sidecars, which nobody fills."""
    from agentcache.engine import describe

    plain = describe.describe(micro_model())
    kv = KVLayout(plain.kv.specs, plain.kv.dtype, sidecars)
    monkeypatch.setattr(describe, "_describe", lambda model, admission: replace(plain, kv=kv))
    monkeypatch.delitem(vars(micro_model()), describe._NAME)


def test_stats_of_a_runtime_name_each_sidecar(monkeypatch: pytest.MonkeyPatch) -> None:
    give_sidecars(monkeypatch, (INDEXER, C4))
    with Runtime(
        micro_model(), tokenizer(), cache=CacheConfig(budget="4MiB", page_size=8), poison=True
    ) as runtime:
        runtime.session().generate(list(range(5, 30)), max_new_tokens=2, verify=True)
        stats = runtime.stats()
        kinds, total = stats["bytes"], stats["bytes"]["total"]
        num_pages = runtime._pools.sizes.num_pages
        assert kinds["indexer"]["reserved"] == num_pages * 256
        assert kinds["c4"]["reserved"] == num_pages * 64
        pages = kinds["full"]["used"] // runtime._pools.page_bytes
        assert (kinds["indexer"]["used"], kinds["c4"]["used"]) == (pages * 256, pages * 64)
        parts = [kind["reserved"] for name, kind in kinds.items() if name != "total"]
        assert sum(parts) == total["reserved"] == stats["held_bytes"] <= stats["budget"]
