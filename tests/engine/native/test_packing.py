"""Spans that share a pass compute what each computes alone, wherever their memory lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from agentcache.engine.backend import Batch, Capture, Span
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE
from agentcache.pools.layout import PoolSizes
from agentcache.pools.table import PageTable
from agentcache.pools.tensors import TensorPools
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.types import IntArray

COVERED = [name for name, each in VARIANTS.items() if each.text_model_type in NATIVE]
PAGE = 8


@dataclass(frozen=True)
class Given:
    """A span: what came before it, how long it is, where in it states are captured."""

    start: int
    length: int
    captured: tuple[int, ...] = ()


MIXED = (
    Given(start=17, length=1),
    Given(start=5, length=12, captured=(3, 12)),
    Given(start=0, length=23, captured=(1, 5, 13)),
    Given(start=30, length=1, captured=(1,)),
    Given(start=26, length=33, captured=(2, 31)),
    Given(start=0, length=1),
)
ROOM = 64


@cache
def backend_of(name: str) -> NativeBackend:
    return NativeBackend(build(name))


class World:
    """Pools full of NaN with the sequences of `MIXED` in them, up to where their spans begin.

    scattered: pages and rows lie in no order.
    """

    def __init__(self, backend: NativeBackend, *, scattered: bool = True) -> None:
        self.backend = backend
        kv, state = backend.kv_layout, backend.state_layout
        lens = kv.page_shape(PAGE).lens
        num_pages = len(MIXED) * sum(-(-ROOM // size) for size in lens.values())
        num_staging = sum(len(given.captured) for given in MIXED)
        sizes = PoolSizes.of(
            kv,
            state,
            num_pages=num_pages,
            page_size=PAGE,
            num_rows=len(MIXED),
            num_staging=num_staging,
        )
        self.pools = TensorPools(kv, state, sizes, poison=True)
        for tensor in self.pools.state.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        pages, rows = np.arange(num_pages, dtype=np.int32), np.arange(len(MIXED))
        if scattered:
            rng = np.random.default_rng(0)
            pages, rows = rng.permutation(pages), rng.permutation(rows)
        per_sequence = np.split(pages, len(MIXED))
        staging = iter(self.pools.staging_rows)
        self.spans = [
            self._begin(given, row, own, staging)
            for given, row, own in zip(MIXED, rows.tolist(), per_sequence, strict=True)
        ]

    def _begin(self, given: Given, row: int, pages: IntArray, staging: Iterator[int]) -> Span:
        """A sequence up to where its span begins; the span."""
        tables = {}
        for kind, size in self.pools.page_lens.items():
            own, pages = np.split(pages, [-(-ROOM // size)])
            tables[kind] = PageTable(size, own)
        full = tables.get(Kind.FULL.value, PageTable(PAGE, pages[:0]))
        rng = np.random.default_rng(given.start + given.length)
        ids = rng.integers(64, 192, given.start + given.length).astype(np.int32)
        self.pools.clear_state(row)
        if given.start:
            self.forward([Span(ids[: given.start], 0, full, row, windows=tables)])
        return Span(
            ids[given.start :],
            given.start,
            full,
            row,
            logits_at=tuple(range(0, given.length, 2)),
            captures=tuple(Capture(given.start + at, next(staging)) for at in given.captured),
            windows=tables,
        )

    def forward(self, spans: list[Span], *, exact: bool = False) -> list[torch.Tensor]:
        return self.backend.forward(Batch(tuple(spans), self.pools, exact))

    def kept(self, span: Span) -> dict[str, torch.Tensor]:
        """KV of a sequence, its state, and the states captured of it."""
        found = {}
        for spec in self.backend.kv_layout.specs:
            pages = span.pages(self.pools.kv_layout.kind_of(spec.layer_idx))
            slots = [at + i for at, num in pages.runs(0, span.stop) for i in range(num)]
            for half, tensor in zip(("keys", "values"), self.pools.kv[spec.layer_idx], strict=True):
                found[f"{half} of layer {spec.layer_idx}"] = tensor[slots]
        for (layer_idx, name), tensor in self.pools.state.items():
            rows = [span.row, *(capture.row for capture in span.captures)]
            found[f"{name} of layer {layer_idx}"] = tensor[rows]
        return found


def assert_near(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.shape == expected.shape
    error = float((got.float() - expected.float()).abs().max())
    assert error <= 1e-4 * float(expected.float().std()), f"{what}: {error:.1e}"


@pytest.mark.parametrize("name", COVERED)
def test_mixed_pass_gives_what_each_span_gives_alone(name: str) -> None:
    together, alone = World(backend_of(name)), World(backend_of(name))
    logits = together.forward(together.spans)
    for i, (span, same) in enumerate(zip(together.spans, alone.spans, strict=True)):
        (expected,) = alone.forward([same])
        assert len(expected) == len(span.logits_at)
        assert_near(logits[i], expected, f"logits of span {i}")
        found = alone.kept(same)
        for what, tensor in together.kept(span).items():
            assert_near(tensor, found[what], f"{what}, span {i}")


@pytest.mark.parametrize("name", ["granitemoehybrid", "gemma3", "llama"])
def test_exact_pass_does_not_depend_on_where_its_memory_lies(name: str) -> None:
    worlds = [World(backend_of(name), scattered=scattered) for scattered in (False, True)]
    one, other = worlds
    for source, target in zip(one.spans, other.spans, strict=True):
        copy_kept(one, source, other, target)
    logits = [torch.cat(world.forward(world.spans, exact=True)) for world in worlds]
    assert torch.equal(*logits)
    for span, same in zip(one.spans, other.spans, strict=True):
        found = other.kept(same)
        for what, tensor in one.kept(span).items():
            assert torch.equal(tensor, found[what]), what


def copy_kept(source: World, span: Span, target: World, same: Span) -> None:
    """Give a sequence before its span the same history to the last bit."""
    for spec in source.backend.kv_layout.specs:
        kind = source.pools.kv_layout.kind_of(spec.layer_idx)
        from_, to = (
            [at + i for at, num in each.pages(kind).runs(0, span.start) for i in range(num)]
            for each in (span, same)
        )
        for old, new in zip(
            source.pools.kv[spec.layer_idx], target.pools.kv[spec.layer_idx], strict=True
        ):
            new[to] = old[from_]
    for key, tensor in source.pools.state.items():
        target.pools.state[key][same.row] = tensor[span.row]


def test_pass_that_is_not_exact_may_depend_on_it() -> None:
    """So the test above can fail: scattered history is merged run by run."""
    worlds = [World(backend_of("llama"), scattered=scattered) for scattered in (False, True)]
    one, other = worlds
    for source, target in zip(one.spans, other.spans, strict=True):
        copy_kept(one, source, other, target)
    first, second = (torch.cat(world.forward(world.spans)) for world in worlds)
    assert not torch.equal(first, second)
    assert_near(first, second, "logits")
