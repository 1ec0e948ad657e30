"""transformers cache layers over our pools: what the modeling code writes through.

One `Cache` object per backend, bound to a batch for one forward pass. Attention layers store new
keys and values in their slots and hand back only those: history is read in place by our attention
function, never gathered. State layers are views of rows; a batch whose rows are no neighbours works
on a gathered copy that is written back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache.engine.backend import Batch, Span
    from agentcache.pools.tensors import TensorPools

__all__ = ["ForwardContext", "PagedKVLayer", "SlotStateLayer", "make_layers"]


class ForwardContext:
    """One batch, prepared once for all layers: where new tokens go and where history lies."""

    def __init__(self, batch: Batch) -> None:
        self.pools: TensorPools = batch.pools
        self.spans: tuple[Span, ...] = batch.spans
        self.history = [list(span.table.runs(0, span.start)) for span in batch.spans]
        fresh = [run for span in batch.spans for run in span.table.runs(span.start, span.stop)]
        self._fresh = fresh if len(fresh) == 1 else None
        self._slots = torch.cat([torch.arange(at, at + num) for at, num in fresh] or [_NO_SLOTS])
        self.rows = [span.row for span in batch.spans]

    @property
    def num_tokens(self) -> int:
        """Tokens per span; all spans of a pass have the same number."""
        return len(self.spans[0].ids)

    def store(self, target: torch.Tensor, new: torch.Tensor) -> None:
        """Write [B, heads, T, dim] into the new tokens' slots of `target` [slots, heads, dim]."""
        flat = new.transpose(1, 2).flatten(0, 1)
        if self._fresh is not None:
            at, num = self._fresh[0]
            target[at : at + num] = flat
        else:
            target.index_copy_(0, self._slots, flat)


_NO_SLOTS = torch.empty(0, dtype=torch.int64)


class PagedKVLayer(CacheLayerMixin):
    """Attention KV in token slots of the arena."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer_idx = layer_idx
        self._context: ForwardContext | None = None
        self.is_initialized = True

    def bind(self, context: ForwardContext) -> None:
        """Point the layer at the sequences of one pass."""
        self._context = context

    def unbind(self) -> None:
        """Let go of the pass."""
        self._context = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        return

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new tokens; returns them alone, [B, heads, T, dim] each."""
        context = self._context
        assert context is not None, "the layer is bound before a forward pass"
        keys, values = context.pools.kv[self.layer_idx]
        context.store(keys, key_states)
        context.store(values, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self._context.spans[0].start if self._context else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SlotStateLayer(LinearAttentionCacheLayerMixin):
    """Convolution and recurrent state of one layer, as rows of the pools."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self._context: ForwardContext | None = None
        self.conv: torch.Tensor = _NO_STATE
        self.recurrent: torch.Tensor = _NO_STATE

    def bind(self, context: ForwardContext) -> None:
        """Make `conv` [B, ...] and `recurrent` [B, ...] the states of one pass's sequences."""
        self._context = context
        self.conv = self._rows(context, "conv")
        self.recurrent = self._rows(context, "recurrent")

    def unbind(self) -> None:
        """Let go of the pass."""
        self._context = None
        self.conv = self.recurrent = _NO_STATE

    def _rows(self, context: ForwardContext, name: str) -> torch.Tensor:
        rows = context.rows
        state = context.pools.state[self.layer_idx, name]
        if rows[-1] - rows[0] + 1 == len(rows) and rows == sorted(rows):
            return state[rows[0] : rows[-1] + 1]
        return state[rows]

    def write_back(self) -> None:
        """Put the states where they belong, if `bind` had to gather them."""
        assert self._context is not None
        for name, mine in (("conv", self.conv), ("recurrent", self.recurrent)):
            state = self._context.pools.state[self.layer_idx, name]
            if mine.untyped_storage().data_ptr() != state.untyped_storage().data_ptr():
                state[self._context.rows] = mine

    def capture(self, name: str, row: int, value: torch.Tensor) -> None:
        """Put a state from inside the pass into a staging row."""
        assert self._context is not None
        self._context.pools.state[self.layer_idx, name][row] = value

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
    ) -> None:
        return

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Move the window on; returns old window and new inputs together, [B, C, K - 1 + T]."""
        joined = torch.cat([self.conv, conv_states.to(self.conv.dtype)], dim=-1)
        self.conv.copy_(joined[..., -self.conv.shape[-1] :])
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Replace the state; returns it."""
        self.recurrent.copy_(recurrent_states)
        return self.recurrent


_NO_STATE = torch.empty(0)

Layer = PagedKVLayer | SlotStateLayer


def make_layers(kv_layers: Iterable[int], state_layers: Iterable[int]) -> list[Layer]:
    """Our layers in order of their index; the two lists together number all layers."""
    kinds: dict[int, Layer] = {i: PagedKVLayer(i) for i in kv_layers}
    kinds.update({i: SlotStateLayer(i) for i in state_layers})
    return [kinds[i] for i in range(len(kinds))]
