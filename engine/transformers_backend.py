"""The transformers backend: its modeling code and weights, our caches, scans and attention."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.admission import code_of_others
from agentcache.engine.attention import register_attention
from agentcache.engine.cache_layers import (
    ForwardContext,
    PagedKVLayer,
    SlotStateLayer,
    make_layers,
)
from agentcache.engine.describe import describe, text_config
from agentcache.engine.linear_layout import lay_out_for_few_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.engine.backend import Batch, Span

__all__ = ["TransformersBackend"]


class TransformersBackend:
    """Takes a loaded causal LM over: from here on it only computes over our pools.

    Extends one sequence a pass; decodes one token for any number of sequences. Where the family's
    mixers cannot hand out a state from inside a pass, the pass is cut there.

    unproven: also a model that has not been proven. doubt: why it has not, if so; then sample is
    what its own code computes of the first few ids (see `try_out`). Raises UnsupportedModel.
    """

    max_extend_batch = 1

    def __init__(self, model: Any, *, unproven: bool = False) -> None:
        model.eval()
        description = describe(model, unproven=unproven)
        family = description.family
        self.model = model
        self.model_type: str = text_config(model.config).model_type
        self.doubt = description.doubt
        self.sample = None if self.doubt is None else description.sample
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.shape = description.shape
        self.kv_layout = description.kv
        self.state_layout = description.state
        if family.install is not None:
            resolve_name(family.install)(model)
        lay_out_for_few_rows(model)
        with code_of_others(self.model_type, self.doubt):
            model.set_attn_implementation(register_attention())
        layers = make_layers(description)
        self._attention = [layer for layer in layers if isinstance(layer, PagedKVLayer)]
        self._states = [layer for layer in layers if isinstance(layer, SlotStateLayer)]
        self._cache = family.cache(list(layers))
        self._cuts = bool(description.state.specs) and family.captures == "cut"
        self._family = family
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, batch: Batch) -> list[torch.Tensor]:
        spans = batch.spans
        assert len(spans) == 1 or all(len(span.ids) == 1 for span in spans)
        if len(spans) > 1 and not self._family.ragged:
            return [self.forward(replace(batch, spans=(span,)))[0] for span in spans]
        if self._cuts and len(spans) == 1:
            parts = [self._pass(replace(batch, spans=(part,)))[0] for part in _cut(spans[0])]
            return [torch.cat(parts)]
        return self._pass(batch)

    def _pass(self, batch: Batch) -> list[torch.Tensor]:
        spans, context = batch.spans, ForwardContext(batch)
        bound: list[PagedKVLayer | SlotStateLayer] = [*self._attention, *self._states]
        for layer in bound:
            layer.bind(context)
        try:
            logits = self._call(spans, context)
            for layer in self._states:
                layer.write_back()
            unread = [layer.layer_idx for layer in self._attention if layer.unread]
            assert not unread, f"layers {unread} stored keys that no attention has read"
        finally:
            for layer in bound:
                layer.unbind()  # no memory of a batch outlives its pass
        for span in spans:
            for capture in span.captures:
                if capture.length == span.stop:
                    batch.pools.copy_row(span.row, capture.row)
        return logits

    def _mask(self, span: Span) -> Any:
        """What the modeling code has to be given as a mask, if anything."""
        if self._family.mask is None:
            return None
        return self._family.mask(text_config(self.model.config), span, self.device)

    def _call(self, spans: tuple[Span, ...], context: ForwardContext) -> list[torch.Tensor]:
        ids = torch.tensor([span.ids.tolist() for span in spans], device=self.device)
        wanted = spans[0].logits_at if len(spans) == 1 else (0,)
        positions = {}
        if self._takes_positions:
            starts = torch.tensor([[span.start] for span in spans], device=self.device)
            positions["position_ids"] = starts + torch.arange(ids.shape[1], device=self.device)
        out = self.model(
            input_ids=ids,
            # For an attention that is not one of its own transformers builds no masks.
            attention_mask=self._mask(spans[0]),
            **positions,
            cache=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(wanted or (0,), device=self.device),
            agentcache=context,
        )
        logits = out.logits.float()
        return [logits[i, : len(span.logits_at)] for i, span in enumerate(spans)]


def _cut(span: Span) -> Iterator[Span]:
    """The span in parts that end at its captures."""
    start = span.start
    for stop in sorted({capture.length for capture in span.captures} | {span.stop}):
        low, high = start - span.start, stop - span.start
        yield replace(
            span,
            ids=span.ids[low:high],
            start=start,
            logits_at=tuple(at - low for at in span.logits_at if low <= at < high),
            captures=tuple(capture for capture in span.captures if capture.length == stop),
        )
        start = stop
