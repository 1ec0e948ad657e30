"""Cache layers of sparse and compressed attention: what lies beside the pages of KV.

An indexer's keys and compressed KV grow with the sequence, so they are sidecars; what waits to be
compressed has a fixed size, so it is state. One sequence a pass: these layers hand out everything a
sequence has, and sequences of one batch are of unequal length.

Shapes and dtypes are read off the stock layers after a short run, as for all other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.cache_layers import PagedKVLayer
from agentcache.pools.layout import SidecarSpec, StateSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentcache.engine.families.base import KeptLayer

__all__ = ["CompressedKVLayer", "IndexedKVLayer", "Part", "parts_of", "waiting_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """One layer's part of a sidecar, which holds entries [layers, width] of all layers alike.

    name: what the modeling code calls it.
    """

    name: str
    spec: SidecarSpec
    idx: int


@dataclass(frozen=True, slots=True)
class _Found:
    layer_idx: int
    name: str
    width: int
    dtype: torch.dtype
    tokens: int

    @property
    def kind(self) -> tuple[str, int, torch.dtype, int]:
        """What the layers that share a sidecar have in common."""
        return self.name, self.width, self.dtype, self.tokens


def parts_of(layers: Sequence[Any]) -> dict[int, tuple[Part, ...]]:
    """What each of the stock layers, after a run, keeps beside its KV."""
    found = [part for layer_idx, layer in enumerate(layers) for part in _found(layer_idx, layer)]
    out: dict[int, tuple[Part, ...]] = {}
    for kind in dict.fromkeys(part.kind for part in found):
        name, width, dtype, tokens = kind
        sharing = [part.layer_idx for part in found if part.kind == kind]
        title = name if tokens == 1 else f"{name}{tokens}"
        spec = SidecarSpec(title, (len(sharing), width), dtype, tokens)
        for idx, layer_idx in enumerate(sharing):
            out[layer_idx] = (*out.get(layer_idx, ()), Part(name, spec, idx))
    return out


def _found(layer_idx: int, layer: Any) -> Iterator[_Found]:
    keys = getattr(layer, "indexer_keys", None)
    if keys is not None:
        yield _Found(layer_idx, "indexer", keys.shape[-1], keys.dtype, 1)
    for name, entries in getattr(layer, "compressed_kv", {}).items():
        width, tokens = entries.shape[-1], layer.compress_rate
        yield _Found(layer_idx, name, width, entries.dtype, tokens)


def waiting_of(layer_idx: int, layer: Any) -> Iterator[StateSpec]:
    """States of a stock layer that compresses: tokens no entry stands for yet, and of the last
    entry's tokens what the next one needs as well."""
    overlaps = hasattr(layer, "overlap_kv")
    for name, entries in getattr(layer, "compressed_kv", {}).items():
        rate, width = layer.compress_rate, entries.shape[-1]
        for half in ("kv", "gate"):
            waiting = getattr(layer, f"buffer_{half}")[name]
            shape = rate - 1, waiting.shape[-1]
            yield StateSpec(layer_idx, f"waiting_{half}.{name}", shape, waiting.dtype)
            if overlaps:  # gates have had a bias added that is float32 in any model
                dtype = waiting.dtype if half == "kv" else torch.float32
                yield StateSpec(layer_idx, f"overlap_{half}.{name}", (rate, width), dtype)


class _BesideLayer(PagedKVLayer):
    """Attention that sees what a mask says, with entries beside its pages."""

    masked = True

    def __init__(self, kept: KeptLayer) -> None:
        assert kept.kv is not None
        PagedKVLayer.__init__(self, kept.kv, gathers=True)
        self._parts = {part.name: part for part in kept.parts}

    def _append(self, name: str, entries: torch.Tensor) -> torch.Tensor:
        """Store a pass's new entries [1, m, width]; returns those of the whole sequence."""
        part, span = self._parts[name], self.context.spans[0]
        start, stop = span.start // part.spec.tokens, span.stop // part.spec.tokens
        assert entries.shape[1] == stop - start, f"{name}: {entries.shape[1]} entries"
        beside = self.context.pools.sidecars[part.spec.name][:, :, part.idx]
        if stop > start:
            beside[self._places(part.spec, start, stop)] = entries[0].to(beside.dtype)
        return beside[self._places(part.spec, 0, stop)][None]

    def _places(
        self, spec: SidecarSpec, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(pages, indices in them) of the entries [start, stop)."""
        table, device = self.context.spans[0].table, self.context.pools.sidecars[spec.name].device
        pages, places = spec.places(start, stop, table.page_size)
        mine = table.pages[pages - table.first]
        return torch.from_numpy(mine).long().to(device), torch.from_numpy(places).long().to(device)


class IndexedKVLayer(_BesideLayer):
    """Attention to the tokens an indexer selects; its keys lie beside the pages."""

    def bind(self, context: Any) -> None:
        """Point the layer at the sequence of one pass."""
        super().bind(context)
        self._added = 0
        # The first indexed layer holds all positions so far; the modeling code appends to them.
        past = torch.arange(
            context.spans[0].start, device=context.pools.kv[self.layer_idx][0].device
        )
        self.indexer_position_ids: torch.Tensor | None = past.expand(3, 1, -1)

    def unbind(self) -> None:
        """Let go of the pass."""
        super().unbind()
        self.keys = self.indexer_position_ids = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, values = super().update(key_states, value_states)
        self._added = key_states.shape[-2]
        return self.keys, values

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store the new tokens' keys [1, T, width]; returns those of the whole sequence."""
        return self._append("indexer", indexer_key_states)

    def get_seq_length(self) -> int:
        """Tokens stored: those of the pass too, once they are."""
        return super().get_seq_length() + self._added


class CompressedKVLayer(_BesideLayer):
    """A window of KV, where values are the keys, and one entry for every so many older tokens."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens' keys; returns them behind the window's, twice."""
        context, span = self.context, self.context.spans[0]
        keys, _ = context.pools.kv[self.layer_idx]
        context.places[self.kind].store(keys, key_states)
        self.unread, context.gathered = True, self
        first = self.get_mask_sizes(0)[1]
        parts = [keys[at : at + num] for at, num in span.table.runs(first, span.stop)]
        window = torch.cat(parts).transpose(0, 1)[None]
        return window, window

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Take what waits together with the new tokens, [1, T, width] each.

        Returns the part that fills whole entries, and the position of its first token; the rest
        waits.
        """
        rate, start = self._parts[name].spec.tokens, self.context.spans[0].start
        out = []
        for half, new in (("kv", kv), ("gate", gate)):
            waiting = self._state(f"waiting_{half}.{name}")
            both = torch.cat([waiting[: start % rate], new[0]])
            usable = len(both) // rate * rate
            waiting.zero_()  # what is left over would depend on how the tokens were cut
            waiting[: len(both) - usable] = both[usable:]
            out.append(both[None, :usable])
        return out[0], out[1], start - start % rate

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Store the new entries [1, m, width]; returns those of the whole sequence."""
        return self._append(name, compressed)

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Keep what the next entry needs of the last one's tokens, [1, entries, rate, 2 * width].

        Returns what was kept before, [1, rate, width] each; None before the first entry.
        """
        out: list[torch.Tensor | None] = []
        for half, chunk in (("kv", chunk_kv), ("gate", chunk_gate)):
            kept = self._state(f"overlap_{half}.{name}")
            is_first = self.context.spans[0].start < self._parts[name].spec.tokens
            out.append(None if is_first else kept.clone()[None])
            kept.copy_(chunk[0, -1, :, :head_dim])
        return out[0], out[1]

    def _state(self, name: str) -> torch.Tensor:
        context = self.context
        return context.pools.state[self.layer_idx, name][context.rows[0]]
