"""The tensors behind the slots: one arena of pages, and rows for the states of running requests."""

from __future__ import annotations

import mmap
from math import prod
from typing import TYPE_CHECKING

import torch

from agentcache.pools.base import RowAllocator
from agentcache.pools.pages import PageAllocator

if TYPE_CHECKING:
    from agentcache.pools.layout import KVLayout, PoolSizes, SidecarSpec, StateLayout, StateSpec
    from agentcache.pools.packing import Packing
    from agentcache.types import IntArray

__all__ = ["TensorPools"]


def _zeros(num: int, num_bytes: int, device: torch.device | None) -> torch.Tensor:
    """[num, num_bytes] of zeros. On a CPU a row takes memory when it is first written: there are as
    many rows as requests may ever run at once."""
    if (device is not None and device.type != "cpu") or not num * num_bytes:
        return torch.zeros((num, num_bytes), dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, num * num_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num, num_bytes)


_NAN_BYTE = 0xFF
"""Repeated, it is NaN in every float type."""


class TensorPools:
    """Memory of one runtime (or of one cold check), with views into it per layer.

    arena [num_pages, page_bytes]: KV pages and checkpoints. rows [num_rows + num_staging,
    row_bytes]: the private states of running requests, then `num_staging` rows into which a forward
    pass puts the states it captures on the way.

    page_lens: tokens a page of each kind of KV holds. kv: per attention layer keys and values of
    every token slot of its kind, [num_slots, heads, width] each.
    state: per (layer_idx, name) that tensor of every row, [rows, *shape].
    sidecars: per name its entries beside every page, [num_pages, entries, *shape].

    packing: how checkpoints are packed, if `sizes` says that they are.
    poison: fill fresh and freed pages with NaN, so that a read of what nobody wrote, or of evicted
        data, cannot go unseen (tests).
    """

    def __init__(
        self,
        kv: KVLayout,
        state: StateLayout,
        sizes: PoolSizes,
        *,
        packing: Packing | None = None,
        poison: bool = False,
        device: torch.device | None = None,
    ) -> None:
        assert packing is not None or not sizes.packing_bytes, "packed, but nothing says how"
        self.sizes = sizes
        self.kv_layout = kv
        self.state_layout = state
        self.page_lens = kv.page_shape(sizes.page_size).lens
        self.pages = PageAllocator(sizes.num_pages)
        self.rows = RowAllocator(sizes.num_rows)
        self.staging_rows = range(sizes.num_rows, sizes.num_rows + sizes.num_staging)
        self._poison = poison
        self._arena = torch.empty(
            (sizes.num_pages, sizes.page_bytes), dtype=torch.uint8, device=device
        )
        self._rows = _zeros(sizes.num_rows + sizes.num_staging, sizes.row_bytes, device)
        self._packing = packing if sizes.packing_bytes else None
        self._packed = torch.zeros(
            (sizes.packing_bytes // sizes.page_bytes, sizes.page_bytes),
            dtype=torch.uint8,
            device=device,
        )
        self._beside = {
            spec.name: torch.zeros(
                (sizes.num_pages, spec.page_bytes(sizes.page_size)),
                dtype=torch.uint8,
                device=device,
            )
            for spec in kv.sidecars
        }
        if poison:
            for memory in (self._arena, *self._beside.values()):
                memory.fill_(_NAN_BYTE)
        self.sidecars = {spec.name: self._sidecar_view(spec) for spec in kv.sidecars}
        self.kv = self._kv_views()
        self.state = {
            (spec.layer_idx, spec.name): self._state_view(spec, at)
            for spec, at in zip(state.specs, state.offsets, strict=True)
        }
        self._fill(slice(None))  # a row nobody used is before the first token as well

    @property
    def device(self) -> torch.device:
        return self._arena.device

    @property
    def state_pages(self) -> int:
        return self.sizes.state_pages

    @property
    def row_pages(self) -> int:
        return self.sizes.row_pages

    @property
    def page_bytes(self) -> int:
        return self.sizes.page_bytes

    @property
    def row_bytes(self) -> int:
        return self.sizes.row_bytes

    @property
    def checkpoint_format(self) -> str:
        """How checkpoints are kept, as a name."""
        return "unchanged" if self._packing is None else self._packing.checkpoint_format

    def copy_tail(self, kind: str, source: int, target: int, count: int) -> None:
        num = count * self.sizes.page_bytes // self.page_lens[kind]
        self._arena[target, :num] = self._arena[source, :num]
        for spec in self.kv_layout.sidecars:  # entries whose last position is copied
            whole = count * spec.entries(self.sizes.page_size) // self.sizes.page_size
            entries = self.sidecars[spec.name]
            entries[target, :whole] = entries[source, :whole]

    def save_state(self, row: int, pages: IntArray) -> None:
        index, packing = self._index(pages), self._packing
        source = self._row_pages(row)
        if packing is not None and len(pages) < self.row_pages:
            packing.pack(self._rows[row], self._packed.view(-1))
            source = self._words(self._packed)
        self._words(self._arena).index_copy_(0, index, source)

    def load_state(self, pages: IntArray, row: int) -> None:
        index, packing = self._index(pages), self._packing
        if packing is not None and len(pages) < self.row_pages:
            torch.index_select(self._words(self._arena), 0, index, out=self._words(self._packed))
            packing.unpack(self._packed.view(-1), self._rows[row])
            return
        torch.index_select(self._words(self._arena), 0, index, out=self._row_pages(row))

    def clear_state(self, row: int) -> None:
        self._rows[row].zero_()
        self._fill(row)

    def _fill(self, rows: int | slice) -> None:
        """Write what states begin with, where that is not zero."""
        for spec in self.state_layout.specs:
            if spec.fill:
                self.state[spec.layer_idx, spec.name][rows] = spec.fill

    def on_free(self, pages: IntArray) -> None:
        if self._poison:
            index = self._index(pages)
            for memory in (self._arena, *self._beside.values()):
                memory[index] = _NAN_BYTE

    def copy_row(self, source: int, target: int) -> None:
        """Copy a running or staged state into another row."""
        self._rows[target] = self._rows[source]

    def held_bytes(self) -> int:
        """Bytes of the tensors' storages, whatever is used of them."""
        memories = (self._arena, self._rows, self._packed, *self._beside.values())
        return sum(memory.untyped_storage().nbytes() for memory in memories)

    def _kv_views(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Per attention layer keys and values of every token slot, [num_slots, heads, width]."""
        out = {}
        for group in self.kv_layout.groups:
            num_slots = self.sizes.num_pages * self.page_lens[group.kind]
            slots = self._arena.view(self.kv_layout.dtype).view(num_slots, -1)
            at = 0
            for spec in group.specs:
                middle = at + spec.num_kv_heads * spec.head_dim
                end = at + spec.token_elements
                keys = slots[:, at:middle].view(num_slots, spec.num_kv_heads, spec.head_dim)
                values = slots[:, middle:end].view(num_slots, spec.num_kv_heads, spec.value_width)
                out[spec.layer_idx] = (keys, values)
                at = end
        return out

    def _sidecar_view(self, spec: SidecarSpec) -> torch.Tensor:
        """A sidecar's entries beside every page, [num_pages, entries, *shape]."""
        entries = spec.entries(self.sizes.page_size)
        num_bytes = entries * prod(spec.shape) * spec.dtype.itemsize
        flat = self._beside[spec.name][:, :num_bytes].view(spec.dtype)
        return flat.view(len(flat), entries, *spec.shape)

    def _state_view(self, spec: StateSpec, at: int) -> torch.Tensor:
        """One state tensor of all rows, [rows, *shape]."""
        flat = self._rows[:, at : at + spec.num_bytes].view(spec.dtype)
        return flat.view(len(flat), *spec.shape)

    def _index(self, pages: IntArray) -> torch.Tensor:
        return torch.from_numpy(pages.astype("int64")).to(self.device)

    def _row_pages(self, row: int) -> torch.Tensor:
        return self._words(self._rows)[row].view(self.row_pages, -1)

    @staticmethod
    def _words(data: torch.Tensor) -> torch.Tensor:
        """Bytes as 32-bit words: torch copies those in blocks."""
        return data.view(torch.int32)
