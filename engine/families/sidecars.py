"""Sparse and compressed attention: entries beside the pages, one sequence a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.cache_layers import PagedKVLayer
from agentcache.engine.families.base import Family
from agentcache.engine.sidecar_layers import CompressedKVLayer, IndexedKVLayer

if TYPE_CHECKING:
    from agentcache.engine.backend import Span
    from agentcache.engine.families.base import KeptLayer

__all__ = ["FAMILIES"]


def _causal(config: Any, span: Span, device: torch.device) -> dict[str, torch.Tensor | None]:
    """Which tokens may be selected, [1, 1, T, stop]: the indexer reads it off the mask."""
    keys, queries = _positions(0, span, device)
    return {"indexed_attention": (keys <= queries)[None, None], "linear_attention": None}


def _windowed(config: Any, span: Span, device: torch.device) -> dict[str, torch.Tensor]:
    """Addend to the scores of the window's tokens, [1, 1, T, past + T].

    Without one the modeling code would also drop what hides later entries.
    """
    keys, queries = _positions(max(0, span.start + 1 - config.sliding_window), span, device)
    hidden = (keys > queries) | (keys <= queries - config.sliding_window)
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
    return {"sliding_attention": mask[None, None]}


def _positions(first: int, span: Span, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of keys from `first` on, and of queries, so that the two broadcast to [T, keys]."""
    positions = torch.arange(first, span.stop, device=device)
    return positions, positions[span.start - first :, None]


def _compressed(kept: KeptLayer) -> PagedKVLayer:
    """A layer with a window alone is read where it lies."""
    assert kept.kv is not None
    return CompressedKVLayer(kept) if kept.parts else PagedKVLayer(kept.kv)


def _first_ids(config: Any) -> dict[str, int]:
    """Before the first token a window of token ids is full of the end of another sequence."""
    end = config.eos_token_id
    first = end[0] if isinstance(end, list) else end
    return {"conv2": first} if config.ple_layer_ids else {}


def _blind(config: Any) -> str | None:
    if config.index_kpool == 1 or config.index_kpool_always_select_tail:
        return None
    return (
        "index_kpool_always_select_tail is off, so the first tokens select nothing, and then see "
        "all keys of their pass alike, later ones too"
    )


FAMILIES = (
    Family(
        ("qwen4_exp_text",),
        mixer="delta",
        ragged=False,
        mask=_causal,
        layer=IndexedKVLayer,
        whole_convs=(1, 2),
        fills=_first_ids,
        traps=(
            "the indexer reads off the mask what it may select from, and fails without one",
            "positions are kept by the first indexed layer, which every pass appends to",
            "the last token ids are kept as a third convolution, int64, which begins at the end id",
        ),
    ),
    Family(
        ("deepseek_v4",),
        ragged=False,
        mask=_windowed,
        layer=_compressed,
        traps=(
            "without a mask later entries become visible, and nothing says so",
            "between two entries up to a whole one's tokens wait, which is state at any position",
            "the modeling code reads one count of entries for a whole batch",
        ),
    ),
    Family(
        ("glm5_next_text",),
        mixer="delta",
        ragged=False,
        layer=IndexedKVLayer,
        refuses=_blind,
        traps=(
            "there is no causal LM: the text model is reached through the one that also sees",
            "the indexer reads the keys and their number off the cache after it was updated",
        ),
    ),
)
