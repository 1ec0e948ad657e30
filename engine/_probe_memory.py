"""The memory a check of the probe runs in: sequences in scattered pages and rows, full of NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
_NONE: IntArray = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Running:
    """A sequence that has absorbed `length` tokens. tables: its pages by kind, all of them. own:
    the pages only it has."""

    tables: dict[str, PageTable]
    own: IntArray
    row: int
    length: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that was filed, and the pages of the sequence it belongs to."""

    length: int
    pages: IntArray
    tables: dict[str, PageTable]


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
        self._page_lens = kv.page_shape(self._page_size).lens
        self._room = room
        table_len = sum(-(-room // size) for size in self._page_lens.values())

        def sizes(num_pages: int) -> PoolSizes:
            return PoolSizes.of(
                kv,
                state,
                num_pages=num_pages,
                page_size=self._page_size,
                num_rows=2 * num_running,
                num_staging=num_captures,
            )

        num_pages = num_running * table_len + num_captures * sizes(0).state_pages
        self.pools = TensorPools(kv, state, sizes(num_pages), poison=True, device=backend.device)
        for tensor in self.pools.state.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
        self._pages = rng.permutation(num_pages).astype(np.int32)
        self._rows = rng.permutation(2 * num_running).tolist()
        self._staging = list(self.pools.staging_rows)

    def start(self) -> Running:
        """An empty sequence."""
        running = self._begin({}, 0)
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
        span = replace(
            self._span(running, tokens), logits_at=tuple(range(len(tokens))), captures=captures
        )
        (logits,) = self.backend.forward(Batch((span,), self.pools))
        running.length = span.stop
        return logits, [self._filed(capture, running) for capture in captures]

    def step(self, running: Sequence[Running], tokens: Sequence[int]) -> torch.Tensor:
        """Absorb one token each in one pass; returns the logits, [len(running), vocab]."""
        spans = tuple(
            replace(self._span(each, np.array([token], np.int32)), logits_at=(0,))
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
        running = self._begin(checkpoint.tables, checkpoint.length)
        if self.pools.state_pages:
            self.pools.load_state(checkpoint.pages, running.row)
        return running

    def _begin(self, before: dict[str, PageTable], length: int) -> Running:
        """A sequence whose first `length` tokens are those of other tables."""
        tables, own = {}, []
        for kind, size in self._page_lens.items():
            shared = before[kind].prefix(length // size).pages if length else _NONE
            mine = self._take(-(-self._room // size) - len(shared))
            if length % size:
                source = before[kind].page_of(length - 1)
                self.pools.copy_tail(kind, source, int(mine[0]), length % size)
            tables[kind] = PageTable(size, np.concatenate([shared, mine]))
            own.append(mine)
        return Running(tables, np.concatenate([_NONE, *own]), self._rows.pop(), length)

    def _span(self, running: Running, tokens: IntArray) -> Span:
        table = running.tables.get(Kind.FULL, PageTable(self._page_size, _NONE))
        return Span(tokens, running.length, table, running.row, windows=running.tables)

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
        for spec in specs:
            table = running.tables[self.pools.kv_layout.kind_of(spec.layer_idx)]
            runs = list(table.runs(0, running.length))
            for half in self.pools.kv[spec.layer_idx]:
                for at, num in runs:
                    half[at : at + num] = 0

    def kept(self, running: Running) -> dict[str, torch.Tensor]:
        """What each layer keeps of a sequence, by what it is; float32 copies."""
        out = {
            f"{name} of layer {layer_idx}": tensor[running.row].float()
            for (layer_idx, name), tensor in self.pools.state.items()
        }
        for spec in self.pools.kv_layout.specs:
            table = running.tables[self.pools.kv_layout.kind_of(spec.layer_idx)]
            for what, half in zip(("keys", "values"), self.pools.kv[spec.layer_idx], strict=True):
                runs = [half[at : at + num] for at, num in table.runs(0, running.length)]
                out[f"{what} of layer {spec.layer_idx}"] = torch.cat(runs).float()
        return out

    def lose_sidecars(self, running: Running) -> None:
        """Zero what lies beside the pages of all tokens so far."""
        pages = torch.from_numpy(running.own.astype(np.int64))
        for entries in self.pools.sidecars.values():
            entries[pages] = 0

    def _filed(self, capture: Capture, running: Running) -> Checkpoint:
        pages = self._take(self.pools.state_pages)
        if len(pages):
            self.pools.save_state(capture.row, pages)
        return Checkpoint(capture.length, pages, running.tables)

    def _take(self, num_pages: int) -> IntArray:
        taken, self._pages = self._pages[:num_pages], self._pages[num_pages:]
        assert len(taken) == num_pages, "the check asked for too little memory"
        return taken
