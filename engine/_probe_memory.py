"""The memory a check of the probe runs in: sequences in scattered pages and rows, full of NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentcache.engine.backend import Batch, Capture, Span
from agentcache.pools.layout import PoolSizes
from agentcache.pools.table import PageTable
from agentcache.pools.tensors import TensorPools
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agentcache.engine.backend import ModelBackend
    from agentcache.pools.layout import KVSpec
    from agentcache.types import IntArray

__all__ = ["Checkpoint", "Memory", "Running"]

_PAGE, _LARGE_PAGE = 8, 64
_LONG = 512


@dataclass(slots=True)
class Running:
    """A sequence that has absorbed `length` tokens. own: the pages only it has."""

    table: PageTable
    own: IntArray
    row: int
    length: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that was filed, and the pages of the sequence it belongs to."""

    length: int
    pages: IntArray
    table: PageTable


class Memory:
    """Pools for a few sequences, one row for each and as many between them.

    room: tokens that a sequence may grow to. num_running: sequences at a time. num_captures: states
    that may be captured and filed.
    """

    def __init__(
        self,
        backend: ModelBackend,
        rng: np.random.Generator,
        *,
        room: int,
        num_running: int = 1,
        num_captures: int = 0,
    ) -> None:
        self.backend = backend
        kv, state = backend.kv_layout, backend.state_layout
        self._page_size = _PAGE if room <= _LONG else _LARGE_PAGE
        self._table_len = -(-room // self._page_size) if kv.specs else 0

        def sizes(num_pages: int) -> PoolSizes:
            return PoolSizes.of(
                kv,
                state,
                num_pages=num_pages,
                page_size=self._page_size,
                num_rows=2 * num_running,
                num_staging=num_captures,
            )

        num_pages = num_running * self._table_len + num_captures * sizes(0).state_pages
        self.pools = TensorPools(kv, state, sizes(num_pages), poison=True, device=backend.device)
        for tensor in self.pools.state.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        self._pages = rng.permutation(num_pages).astype(np.int32)
        self._rows = rng.permutation(2 * num_running).tolist()
        self._staging = list(self.pools.staging_rows)

    def start(self) -> Running:
        """An empty sequence."""
        own = self._take(self._table_len)
        running = Running(PageTable(self._page_size, own), own, self._rows.pop(), 0)
        self.pools.clear_state(running.row)
        return running

    def extend(
        self, running: Running, tokens: IntArray, captures_at: Iterable[int] = ()
    ) -> tuple[torch.Tensor, list[Checkpoint]]:
        """Absorb tokens in one pass.

        captures_at: lengths at which the state is captured inside the pass and filed. Returns the
        logits of all new tokens, [T, vocab], and the checkpoints.
        """
        captures = tuple(Capture(length, self._staging.pop()) for length in captures_at)
        span = Span(
            tokens,
            running.length,
            running.table,
            running.row,
            logits_at=tuple(range(len(tokens))),
            captures=captures,
        )
        (logits,) = self.backend.forward(Batch((span,), self.pools))
        running.length = span.stop
        return logits, [self._filed(capture, running) for capture in captures]

    def step(self, running: Sequence[Running], tokens: Sequence[int]) -> torch.Tensor:
        """Absorb one token each in one pass; returns the logits, [len(running), vocab]."""
        spans = tuple(
            Span(np.array([token], np.int32), each.length, each.table, each.row, logits_at=(0,))
            for each, token in zip(running, tokens, strict=True)
        )
        logits = self.backend.forward(Batch(spans, self.pools))
        for each in running:
            each.length += 1
        return torch.cat(logits)

    def resume(self, checkpoint: Checkpoint) -> Running:
        """Another sequence that goes on from a checkpoint.

        It shares the whole pages before it and has a copy of the one in which it goes on, as a
        request that resumes has.
        """
        length, size = checkpoint.length, self._page_size
        shared = checkpoint.table.prefix(length // size)
        own = self._take(self._table_len - len(shared))
        if len(own) and length % size:
            source = checkpoint.table.page_of(length - 1)
            self.pools.copy_tail(Kind.FULL, source, int(own[0]), length % size)
        table = PageTable(size, np.concatenate([shared.pages, own]))
        running = Running(table, own, self._rows.pop(), length)
        if self.pools.state_pages:
            self.pools.load_state(checkpoint.pages, running.row)
        return running

    def release(self, running: Running) -> None:
        """Give back what only this sequence has."""
        self._rows.insert(0, running.row)
        self.pools.on_free(running.own)
        self._pages = np.concatenate([self._pages, running.own])

    def lose_state(self, running: Running, name: str) -> None:
        """Zero one kind of state in all layers."""
        for (_, kind), tensor in self.pools.state.items():
            if kind == name:
                tensor[running.row] = 0

    def lose_kv(self, running: Running, specs: Iterable[KVSpec]) -> None:
        """Zero what some layers keep of all tokens so far."""
        runs = list(running.table.runs(0, running.length))
        for spec in specs:
            for half in self.pools.kv[spec.layer_idx]:
                for at, num in runs:
                    half[at : at + num] = 0

    def lose_sidecars(self, running: Running) -> None:
        """Zero what lies beside the pages of all tokens so far."""
        pages = torch.from_numpy(running.own.astype(np.int64))
        for entries in self.pools.sidecars.values():
            entries[pages] = 0

    def _filed(self, capture: Capture, running: Running) -> Checkpoint:
        pages = self._take(self.pools.state_pages)
        if len(pages):
            self.pools.save_state(capture.row, pages)
        return Checkpoint(capture.length, pages, running.table)

    def _take(self, num_pages: int) -> IntArray:
        taken, self._pages = self._pages[:num_pages], self._pages[num_pages:]
        assert len(taken) == num_pages, "the check asked for too little memory"
        return taken
