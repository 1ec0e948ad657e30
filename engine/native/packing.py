"""One pass over tokens of several sequences, one behind the other, prepared once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentcache.kernels import row_moves
from agentcache.kernels.row_attention import KeyRuns

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentcache.engine.backend import Batch, Capture, Span
    from agentcache.pools.tensors import TensorPools

__all__ = ["KVPlaces", "OfPositions", "Pass", "Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """Several tokens of one sequence: where they lie in the pass, and the states to set aside.

    inside: captures before the last token. positions: their places, in tokens of the run.
    """

    at: slice
    span: Span
    inside: tuple[Capture, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(capture.length - self.span.start for capture in self.inside)


@dataclass(frozen=True)
class KVPlaces:
    """Where one kind of KV lies. slots: of the new tokens [N], or their start where they are
    neighbours. history: per span the runs (start, length) that its first token sees. seen: per span
    of one token the runs of all that it sees, itself included. device: of the KV."""

    slots: Tensor | int
    history: tuple[tuple[tuple[int, int], ...], ...]
    seen: tuple[tuple[tuple[int, int], ...], ...]
    device: torch.device

    @cached_property
    def of_steps(self) -> KeyRuns:
        """All that the spans of one token see."""
        return KeyRuns.of(self.seen, self.device)

    def store(self, target: Tensor, new: Tensor) -> None:
        """Write [N, heads, dim] into the new tokens' slots of `target` [slots, heads, dim]."""
        if isinstance(self.slots, int):
            target[self.slots : self.slots + len(new)] = new
        else:
            row_moves.scatter(target, self.slots, new)


@dataclass(frozen=True, slots=True)
class Runs:
    """What is left of a pass without its spans of one token."""

    pools: TensorPools
    runs: tuple[Run, ...]
    steps: int = 0

    @property
    def rows(self) -> list[int]:
        return []

    @property
    def behind_steps(self) -> Runs:
        return self


class OfPositions:
    """What is computed of the positions of some tokens, once for each key."""

    def __init__(self, positions: Tensor) -> None:
        self._positions = positions
        self._made: dict[object, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, key: object, make: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """What `make` computes of them."""
        if key not in self._made:
            self._made[key] = make(self._positions)
        return self._made[key]


class Pass:
    """A batch with its tokens packed: those of spans of one token first, then span by span.

    ids, positions: [N]. once: what is made of the positions. steps: how many spans have one token.
    runs: the others. order: of each span of the batch its place in the pass.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.batch = batch
        self.pools = batch.pools
        self.exact = batch.exact
        given = sorted(range(len(batch.spans)), key=lambda i: len(batch.spans[i].ids) > 1)
        self.spans = tuple(batch.spans[i] for i in given)
        self.order = given
        self.bounds: list[slice] = []
        at = 0
        for span in self.spans:
            self.bounds.append(slice(at, at + len(span.ids)))
            at += len(span.ids)
        self.steps = sum(len(span.ids) == 1 for span in self.spans)
        self.runs = tuple(
            Run(bounds, span, tuple(c for c in span.captures if c.length < span.stop))
            for bounds, span in zip(self.bounds, self.spans, strict=True)
            if len(span.ids) > 1
        )
        ids = np.concatenate([span.ids for span in self.spans])
        self.ids = torch.from_numpy(ids).to(device).long()
        self.positions = torch.cat([torch.arange(s.start, s.stop) for s in self.spans]).to(device)
        self._places: dict[str, KVPlaces] = {}
        self.once = OfPositions(self.positions)

    def places(self, kind: str) -> KVPlaces:
        """Where a kind of KV lies for this pass."""
        if kind not in self._places:
            self._places[kind] = self._find_places(kind)
        return self._places[kind]

    @cached_property
    def step_rows(self) -> Tensor:
        """Rows of the spans of one token, [steps] int64."""
        given = [span.row for span in self.spans[: self.steps]]
        return torch.tensor(given, dtype=torch.int64, device=self.ids.device)

    @cached_property
    def behind_steps(self) -> Runs:
        """The spans of several tokens alone, whose tokens begin with the first of theirs."""
        runs = (
            replace(run, at=slice(run.at.start - self.steps, run.at.stop - self.steps))
            for run in self.runs
        )
        return Runs(self.pools, tuple(runs))

    @cached_property
    def rows(self) -> slice | list[int]:
        """Rows of the spans of one token; a slice where they are neighbours in order."""
        rows = [span.row for span in self.spans[: self.steps]]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))
        return rows

    def next_block(self) -> None:
        """What the block before the last has made is not needed any more."""

    def wanted(self) -> Tensor | None:
        """Places in the pass of the tokens whose logits are asked for; None: all in order."""
        at = [
            bounds.start + i
            for bounds, span in zip(self.bounds, self.spans, strict=True)
            for i in span.logits_at
        ]
        if at == list(range(len(self.ids))):
            return None
        return torch.tensor(at, dtype=torch.int64, device=self.ids.device)

    def by_span(self, rows: Tensor) -> list[Tensor]:
        """Rows of `wanted` tokens, given back in the order of the batch's spans."""
        parts = rows.split([len(span.logits_at) for span in self.spans])
        out: list[Tensor] = [rows] * len(parts)
        for place, part in zip(self.order, parts, strict=True):
            out[place] = part
        return out

    def _find_places(self, kind: str) -> KVPlaces:
        group = next(g for g in self.pools.kv_layout.groups if g.kind == kind)
        window = group.window
        fresh: list[tuple[int, int]] = []
        history, seen = [], []
        for span in self.spans:
            pages = span.pages(kind)
            first = 0 if window is None else max(0, span.start + 1 - window)
            history.append(tuple(pages.runs(first, span.start)))
            if len(span.ids) == 1:
                seen.append(tuple(pages.runs(first, span.stop)))
            fresh.extend(pages.runs(span.start, span.stop))
        slots: Tensor | int = fresh[0][0]
        if len(fresh) > 1:
            slots = torch.cat([torch.arange(at, at + num) for at, num in fresh]).to(self.ids.device)
        return KVPlaces(slots, tuple(history), tuple(seen), self.ids.device)
