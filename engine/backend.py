"""The contract of a model backend: token ids and slots in, logits and captured states out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from agentcache.pools.layout import KVLayout, StateLayout
    from agentcache.pools.table import PageTable
    from agentcache.pools.tensors import TensorPools
    from agentcache.types import IntArray, ModelShape

__all__ = ["Batch", "Capture", "ModelBackend", "Span"]


@dataclass(frozen=True, slots=True)
class Capture:
    """Copy the state that has absorbed exactly `length` tokens of the sequence into `row`."""

    length: int
    row: int


@dataclass(frozen=True, slots=True)
class Span:
    """The next tokens of one sequence.

    ids are positions [start, start + len(ids)); `table` has room for them, and `windows` has the
    pages of each windowed kind from the first position on that the first token sees; `row` holds
    the state that has absorbed `start` tokens and is moved on in place. logits_at: indices into
    `ids` whose next-token distribution is wanted, ascending. captures: lengths in
    (start, start + len(ids)], ascending, each with a staging row.
    """

    ids: IntArray
    start: int
    table: PageTable
    row: int
    logits_at: tuple[int, ...] = ()
    captures: tuple[Capture, ...] = ()
    windows: Mapping[str, PageTable] = field(default_factory=dict)

    def pages(self, kind: str) -> PageTable:
        """The pages of a kind of KV."""
        return self.table if kind == Kind.FULL else self.windows[kind]

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Spans of different sequences for one forward pass over one set of pools.

    exact: results may not depend on where in the pools anything lies, down to the last bit.
    """

    spans: tuple[Span, ...]
    pools: TensorPools
    exact: bool = False


class ModelBackend(Protocol):
    """A model that computes over our pools. Called on the engine thread only, keeps no requests."""

    shape: ModelShape
    kv_layout: KVLayout
    state_layout: StateLayout
    device: torch.device
    max_extend_batch: int
    """How many spans of more than one token may share a pass."""

    def forward(self, batch: Batch) -> list[torch.Tensor]:
        """Absorb every span: write KV, move the states on, fill the captures.

        Returns per span its logits, [len(logits_at), vocab] float32. Spans of one token may share a
        pass; of longer ones at most `max_extend_batch`, alone. If it raises, the rows and the new
        positions of the batch are undefined; everything published is untouched.
        """
        ...
