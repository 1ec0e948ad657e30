"""Sequences in pools of their own, moved on by a native backend step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from agentcache.engine.backend import Batch, Span
from agentcache.engine.native.packing import Pass
from agentcache.pools.layout import PoolSizes
from agentcache.pools.table import PageTable
from agentcache.pools.tensors import TensorPools
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from agentcache.engine.native.backend import NativeBackend
    from agentcache.types import IntArray

PAGE, ROOM, STARTS = 8, 72, (17, 0, 30, 7, 15)


class World:
    """Pools full of NaN with sequences in them, whose pages and rows lie in no order.

    Two of one seed are the same to the last bit.
    """

    def __init__(
        self,
        backend: NativeBackend,
        starts: Sequence[int] = STARTS,
        *,
        page: int = PAGE,
        seed: int = 0,
    ) -> None:
        self.backend = backend
        kv, state = backend.kv_layout, backend.state_layout
        per_sequence = sum(-(-ROOM // size) for size in kv.page_shape(page).lens.values())
        sizes = PoolSizes.of(
            kv,
            state,
            num_pages=len(starts) * per_sequence,
            page_size=page,
            num_rows=len(starts),
            num_staging=1,
        )
        self.pools = TensorPools(kv, state, sizes, poison=True, device=backend.device)
        for tensor in self.pools.state.values():
            tensor.fill_(torch.nan)
        self.rng = np.random.default_rng(seed)
        pages = self.rng.permutation(np.arange(sizes.num_pages, dtype=np.int32))
        self.sequences = [
            self._begin(start, row, own)
            for start, row, own in zip(
                starts,
                self.rng.permutation(len(starts)).tolist(),
                np.split(pages, len(starts)),
                strict=True,
            )
        ]

    def _begin(self, start: int, row: int, pages: IntArray) -> Span:
        """A sequence up to where its steps begin; its last step, which was none."""
        tables = {}
        for kind, size in self.pools.page_lens.items():
            own, pages = np.split(pages, [-(-ROOM // size)])
            tables[kind] = PageTable(size, own)
        full = tables.get(Kind.FULL.value, PageTable(PAGE, pages[:0]))
        ids = self.rng.integers(0, 256, start).astype(np.int32)
        span = Span(ids, 0, full, row, windows=tables)
        self.pools.clear_state(row)
        if start:
            by_pass(self.backend, Batch((span,), self.pools))
        return span

    def next_spans(self, chosen: Sequence[int]) -> tuple[Span, ...]:
        """The next token of each of these sequences, in this order."""
        for at in chosen:
            span = self.sequences[at]
            ids = self.rng.integers(0, 256, 1).astype(np.int32)
            self.sequences[at] = replace(span, ids=ids, start=span.stop, logits_at=(0,))
        return tuple(self.sequences[at] for at in chosen)

    def step(self, chosen: Sequence[int], **options: Any) -> Tensor:
        """As the engine computes it; logits, [R, vocab]."""
        batch = Batch(self.next_spans(chosen), self.pools, **options)
        return torch.cat(self.backend.forward(batch))

    def passed(self, chosen: Sequence[int]) -> Tensor:
        """As a pass computes it."""
        return torch.cat(by_pass(self.backend, Batch(self.next_spans(chosen), self.pools)))


def by_pass(backend: NativeBackend, batch: Batch) -> list[Tensor]:
    """Logits by a pass."""
    with torch.inference_mode():
        tokens = Pass(batch, backend.device)
        return tokens.by_span(backend._model.logits(tokens))
