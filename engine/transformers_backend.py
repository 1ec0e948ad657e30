"""The transformers backend: its modeling code and weights, our caches, scan and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from agentcache.engine.attention import register_attention
from agentcache.engine.cache_layers import ForwardContext, make_layers
from agentcache.engine.families import family_of
from agentcache.pools.layout import KVLayout, StateLayout

if TYPE_CHECKING:
    from agentcache.engine.backend import Batch, Span
    from agentcache.types import ModelShape

__all__ = ["TransformersBackend", "shape_of"]


def shape_of(model: Any) -> ModelShape:
    """The sizes of a loaded model. Raises UnsupportedModel."""
    return family_of(model.config.model_type).shape(model.config, model.dtype)


class TransformersBackend:
    """Takes a loaded causal LM over: from here on it only computes over our pools.

    Extends one sequence a pass; decodes one token for any number of sequences. Raises
    UnsupportedModel for a family that is not admitted.
    """

    max_extend_batch = 1

    def __init__(self, model: Any) -> None:
        config = model.config
        family = family_of(config.model_type)
        self.model = model.eval()
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.shape = shape_of(model)
        self.kv_layout = KVLayout(family.kv_specs(config), self.dtype)
        self.state_layout = StateLayout(family.state_specs(config, self.dtype))
        family.install(model)
        model.set_attn_implementation(register_attention())
        self._layers = make_layers(
            [spec.layer_idx for spec in self.kv_layout.specs],
            {spec.layer_idx for spec in self.state_layout.specs},
        )
        self._cache = Cache(layers=list(self._layers))

    @torch.inference_mode()
    def forward(self, batch: Batch) -> list[torch.Tensor]:
        spans = batch.spans
        assert len(spans) == 1 or all(len(span.ids) == 1 for span in spans)
        context = ForwardContext(batch)
        for layer in self._layers:
            layer.bind(context)
        try:
            logits = self._call(spans, context)
        finally:
            for layer in self._layers:
                layer.unbind()  # no memory of a batch outlives its pass
        for span in spans:
            for capture in span.captures:
                if capture.length == span.stop:
                    batch.pools.copy_row(span.row, capture.row)
        return logits

    def _call(self, spans: tuple[Span, ...], context: ForwardContext) -> list[torch.Tensor]:
        ids = torch.tensor([span.ids.tolist() for span in spans], device=self.device)
        starts = torch.tensor([[span.start] for span in spans], device=self.device)
        wanted = spans[0].logits_at if len(spans) == 1 else (0,)
        out = self.model(
            input_ids=ids,
            # Given as a mapping, masks are not built: our attention and mixers need none.
            attention_mask={"full_attention": None, "linear_attention": None},
            position_ids=starts + torch.arange(ids.shape[1], device=self.device),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(wanted or (0,), device=self.device),
            agentcache=context,
        )
        logits = out.logits.float()
        return [logits[i, : len(span.logits_at)] for i, span in enumerate(spans)]
