"""transformers cache layers over our pools: what the modeling code writes through.

One `Cache` object per backend, bound to a batch for one forward pass. Attention layers store new
keys and values in their slots and hand back only those: history is read in place by our attention
function, which knows the layer by the very tensor of keys. Where keys are computed from what the
cache returns, the layer hands out the whole history instead. State layers are views of rows; a
batch whose rows are no neighbours works on a gathered copy that is written back after the pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    LinearAttentionCacheLayerMixin,
)

from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.engine.backend import Batch, Span
    from agentcache.engine.describe import Description, KeptLayer
    from agentcache.pools.layout import KVSpec, StateSpec
    from agentcache.pools.tensors import TensorPools

__all__ = ["ForwardContext", "HybridLayer", "PagedKVLayer", "SlotStateLayer", "make_layers"]


class ForwardContext:
    """One batch, prepared once for all layers: where new tokens go and where history lies.

    gathered: the layer whose whole history was handed out last, until an attention has read it.
    exact: history is read as one run, however many it lies in.
    """

    def __init__(self, batch: Batch) -> None:
        self.pools: TensorPools = batch.pools
        self.spans: tuple[Span, ...] = batch.spans
        self.places = {
            group.kind: Places(self.spans, group.kind, group.window)
            for group in batch.pools.kv_layout.groups
        }
        self.rows = [span.row for span in batch.spans]
        self.exact = batch.exact
        self.gathered: PagedKVLayer | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens per span; all spans of a pass have the same number."""
        return len(self.spans[0].ids)


class Places:
    """Where one kind of KV lies for a batch.

    history: per span the runs of slots of earlier tokens, from the first that its first token sees.
    """

    def __init__(self, spans: tuple[Span, ...], kind: str, window: int | None) -> None:
        self.history = [
            list(
                span.pages(kind).runs(
                    0 if window is None else max(0, span.start + 1 - window), span.start
                )
            )
            for span in spans
        ]
        fresh = [run for span in spans for run in span.pages(kind).runs(span.start, span.stop)]
        self._fresh = fresh if len(fresh) == 1 else None
        self._slots = torch.cat([torch.arange(at, at + num) for at, num in fresh] or [_NO_SLOTS])

    def store(self, target: torch.Tensor, new: torch.Tensor) -> None:
        """Write [B, heads, T, dim] into the new tokens' slots of `target` [slots, heads, dim]."""
        flat = new.transpose(1, 2).flatten(0, 1)
        if self._fresh is not None:
            at, num = self._fresh[0]
            target[at : at + num] = flat
        else:
            target.index_copy_(0, self._slots, flat.to(target.dtype))


_NO_SLOTS = torch.empty(0, dtype=torch.int64)


class PagedKVLayer(CacheLayerMixin):
    """Attention KV in token slots of the arena.

    kind: of the pages it lies in. window: how many positions a token sees; None: all before it.
    gathers: hand out the whole history, not the new tokens alone. masked: what a token sees of that
    is told by the mask. unread: keys were stored in this pass and no attention came.
    """

    masked = False

    def __init__(self, spec: KVSpec, *, kind: str = Kind.FULL.value, gathers: bool = False) -> None:
        CacheLayerMixin.__init__(self)
        self._open(spec, kind, gathers)

    def _open(self, spec: KVSpec, kind: str, gathers: bool) -> None:
        self.layer_idx = spec.layer_idx
        self.kind = kind
        self.window = spec.window
        self.is_sliding = spec.window is not None
        self.is_initialized = True
        self.unread = False
        self._gathers = gathers
        self._context: ForwardContext | None = None

    @property
    def context(self) -> ForwardContext:
        """The pass the layer is bound to."""
        assert self._context is not None, "the layer is bound before a forward pass"
        return self._context

    def bind(self, context: ForwardContext) -> None:
        """Point the layer at the sequences of one pass."""
        self._context = context
        self.unread = False

    def unbind(self) -> None:
        """Let go of the pass."""
        self._context = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        return

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens, [B, heads, T, dim] each; returns them alone, or behind all history.

        Gathered histories of unequal length are padded on the left.
        """
        context = self.context
        keys, values = context.pools.kv[self.layer_idx]
        places = context.places[self.kind]
        places.store(keys, key_states)
        places.store(values, value_states)
        self.unread = True
        if not self._gathers:
            key_states.agentcache_layer = self  # type: ignore[attr-defined]
            return key_states, value_states
        context.gathered = self
        return self._whole(keys), self._whole(values)

    def _whole(self, half: torch.Tensor) -> torch.Tensor:
        """Everything up to each span's end, [B, heads, longest, dim]."""
        spans = self.context.spans
        longest = max(span.stop for span in spans)
        out = []
        for span in spans:
            parts = [half[at : at + num] for at, num in span.table.runs(0, span.stop)]
            out.append(F.pad(torch.cat(parts).transpose(0, 1), (0, 0, longest - span.stop, 0)))
        return torch.stack(out)

    def get_seq_length(self) -> int:
        """Tokens before the pass; of several sequences the most."""
        return max(span.start for span in self._context.spans) if self._context else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys a mask would have, position of the first)."""
        length = self.get_seq_length()
        first = 0 if self.window is None else max(0, length + 1 - self.window)
        return length - first + query_length, first

    def get_max_length(self) -> int:
        return -1


class SlotStateLayer(LinearAttentionCacheLayerMixin):
    """Convolution and recurrent states of one layer, as rows of the pools.

    A row that was cleared is the state before the first token, so there always is a previous state.
    keeps: whether states inside a pass are set aside here, where convolutions are all there is.
    """

    def __init__(
        self, layer_idx: int, specs: tuple[StateSpec, ...], *, keeps: bool = False
    ) -> None:
        self._open_states(layer_idx, specs, keeps)

    def _open_states(self, layer_idx: int, specs: tuple[StateSpec, ...], keeps: bool) -> None:
        self._names = [spec.name for spec in specs]
        numbers = [int(name.lstrip("convreut") or 0) for name in self._names]
        LinearAttentionCacheLayerMixin.__init__(self, max(numbers) + 1)
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), True)
        self.layer_idx = layer_idx
        self._keeps = keeps
        self._context: ForwardContext | None = None

    @property
    def context(self) -> ForwardContext:
        """The pass the layer is bound to."""
        assert self._context is not None, "the layer is bound before a forward pass"
        return self._context

    @property
    def conv(self) -> torch.Tensor:
        """The first convolution's last inputs, [B, channels, K - 1]."""
        state = self.conv_states[0]
        assert state is not None
        return state

    @property
    def recurrent(self) -> torch.Tensor:
        """The first recurrent state, [B, ...]."""
        state = self.recurrent_states[0]
        assert state is not None
        return state

    def bind(self, context: ForwardContext) -> None:
        """Make the states those of one pass's sequences, [B, ...] each."""
        self._context = context
        for name in self._names:
            self._put(name, self._rows(name))

    def unbind(self) -> None:
        """Let go of the pass."""
        self._context = None
        for name in self._names:
            self._put(name, None)

    def _put(self, name: str, state: torch.Tensor | None) -> None:
        states, idx = self._place(name)
        states[idx] = state

    def _place(self, name: str) -> tuple[dict[int, torch.Tensor | None], int]:
        for kind, states in (("conv", self.conv_states), ("recurrent", self.recurrent_states)):
            if name.startswith(kind):
                return states, int(name.removeprefix(kind) or 0)
        raise KeyError(name)

    def _rows(self, name: str) -> torch.Tensor:
        rows = self.context.rows
        state = self.context.pools.state[self.layer_idx, name]
        if rows[-1] - rows[0] + 1 == len(rows) and rows == sorted(rows):
            return state[rows[0] : rows[-1] + 1]
        return state[rows]

    def write_back(self) -> None:
        """Put the states where they belong, if `bind` had to gather them."""
        for name in self._names:
            states, idx = self._place(name)
            mine = states[idx]
            state = self.context.pools.state[self.layer_idx, name]
            assert mine is not None
            if mine.untyped_storage().data_ptr() != state.untyped_storage().data_ptr():
                state[self.context.rows] = mine

    def capture(self, name: str, row: int, value: torch.Tensor) -> None:
        """Put a state from inside the pass into a staging row."""
        self.context.pools.state[self.layer_idx, name][row] = value

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        return

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Move the window on; returns old window and new inputs together, [B, C, K - 1 + T]."""
        mine = self.conv_states[state_idx]
        assert mine is not None
        joined = torch.cat([mine, conv_states.to(mine.dtype)], dim=-1)
        width = mine.shape[-1]
        if self._keeps:
            span = self.context.spans[0]
            for capture in span.captures:
                at = capture.length - span.start
                name = f"conv{state_idx or ''}"
                self.capture(name, capture.row, joined[0, ..., at : at + width])
        mine.copy_(joined[..., -width:] if width else joined[..., :0])
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace the state; returns it."""
        mine = self.recurrent_states[state_idx]
        assert mine is not None
        mine.copy_(recurrent_states)
        return mine


class HybridLayer(SlotStateLayer, PagedKVLayer):
    """A layer with attention and a recurrence or convolutions side by side."""

    is_compileable = False
    is_croppable = False

    def __init__(
        self, kv: KVSpec, states: tuple[StateSpec, ...], *, kind: str, keeps: bool
    ) -> None:
        PagedKVLayer.__init__(self, kv, kind=kind)
        self._open_states(kv.layer_idx, states, keeps)

    def bind(self, context: ForwardContext) -> None:
        """Point the layer at the sequences of one pass."""
        PagedKVLayer.bind(self, context)
        SlotStateLayer.bind(self, context)


Layer = PagedKVLayer | SlotStateLayer | HybridLayer | DummyLayer


def make_layers(description: Description) -> list[Layer]:
    """Our layers in order of their index."""
    return [_make_layer(description, i, layer) for i, layer in enumerate(description.layers)]


def _make_layer(description: Description, layer_idx: int, layer: KeptLayer) -> Layer:
    family = description.family
    keeps = family.captures == "conv"
    if layer.kv is not None:
        if family.layer is not None:
            made: PagedKVLayer = family.layer(layer)
            return made
        kind = description.kv.kind_of(layer_idx)
        if layer.states:
            return HybridLayer(layer.kv, layer.states, kind=kind, keeps=keeps)
        return PagedKVLayer(layer.kv, kind=kind, gathers=family.gathers)
    if layer.states:
        return SlotStateLayer(layer_idx, layer.states, keeps=keeps)
    return DummyLayer()
