"""Sinks and soft caps in native attention, against the attention modules of stock models."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from agentcache.engine.backend import Batch, Span
from agentcache.engine.describe import describe
from agentcache.engine.families.tiny import build
from agentcache.engine.native.families.parts import attention
from agentcache.engine.native.packing import Pass
from agentcache.engine.native.rope import Rope
from agentcache.engine.native.weights import Weights
from agentcache.pools.layout import PoolSizes
from agentcache.pools.table import PageTable
from agentcache.pools.tensors import TensorPools

if TYPE_CHECKING:
    from agentcache.engine.native.attention import Attention

LEN = 40
CUTS = (0, 25, 39, LEN)


def stock_output(module: Any, x: torch.Tensor, rotary: Any, **options: Any) -> torch.Tensor:
    """A stock module without a cache, [T, width]."""
    age = torch.arange(LEN)[:, None] - torch.arange(LEN)
    hidden = (age < 0) | (age >= (module.sliding_window or LEN))
    mask = torch.zeros(1, 1, LEN, LEN).masked_fill(hidden, float("-inf"))
    with torch.inference_mode():
        return module(x[None], position_embeddings=rotary, attention_mask=mask, **options)[0][0]


def native_output(layer: Attention, model: Any, x: torch.Tensor) -> torch.Tensor:
    """The same over scattered pages: an extension, one after it, one step."""
    kept = describe(model)
    sizes = PoolSizes.of(kept.kv, kept.state, num_pages=16, page_size=8, num_rows=1, num_staging=0)
    pools = TensorPools(kept.kv, kept.state, sizes, poison=True)
    pages = np.random.default_rng(0).permutation(16).astype(np.int32)
    tables = {
        kind: PageTable(size, half)
        for (kind, size), half in zip(pools.page_lens.items(), np.split(pages, 2), strict=True)
    }
    parts = []
    for start, stop in pairwise(CUTS):
        ids = np.zeros(stop - start, dtype=np.int32)
        span = Span(ids, start, tables["full"], 0, windows=tables)
        with torch.inference_mode():
            parts.append(layer(x[start:stop], Pass(Batch((span,), pools), x.device)))
    return torch.cat(parts)


def parts_of(model: Any, layer_idx: int) -> tuple[Any, Weights, dict[str, Any]]:
    """A stock attention module, its weights, and what its layer is by the config."""
    config = model.config
    module = model.model.layers[layer_idx].self_attn
    window, kind = module.sliding_window, config.layer_types[layer_idx]
    rope_kind = kind if kind in config.rope_parameters else None
    return (
        module,
        Weights(dict(module.state_dict())),
        {
            "rope": Rope.of(config, config.head_dim, rope_kind),
            "window": window,
            "kind": "full" if window is None else "swa",
        },
    )


def inputs(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(LEN, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(LEN)[None]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.std())


@pytest.mark.parametrize("layer_idx", [0, 1], ids=["window", "full"])
def test_sinks_are_those_of_gpt_oss(layer_idx: int) -> None:
    model: Any = build("gpt_oss")
    module, weights, options = parts_of(model, layer_idx)
    sinks = weights.get("sinks", model.config.num_attention_heads)
    x, positions = inputs(model)
    expected = stock_output(module, x, model.model.rotary_emb(x[None], positions))
    with_sinks = attention(model.config, weights, layer_idx, sinks=sinks, **options)
    weights.check_all_used()
    assert error(native_output(with_sinks, model, x), expected) < 1e-5
    without = attention(model.config, weights, layer_idx, **options)
    assert error(native_output(without, model, x), expected) > 0.1


@pytest.mark.parametrize("layer_idx", [0, 1], ids=["window", "full"])
def test_soft_cap_is_that_of_stock_attention(layer_idx: int) -> None:
    """Gemma 3's module hands on a cap it is called with."""
    model: Any = build("gemma3", query_pre_attn_scalar=16)
    module, weights, options = parts_of(model, layer_idx)
    options |= {"norms": 1.0, "scale": module.scaling}
    x, positions = inputs(model)
    rotary = model.model.rotary_emb(x[None], positions, module.layer_type)
    expected = stock_output(module, x, rotary, softcap=0.5)
    capped = attention(model.config, weights, layer_idx, soft_cap=0.5, **options)
    assert error(native_output(capped, model, x), expected) < 1e-5
    free = attention(model.config, weights, layer_idx, **options)
    assert error(native_output(free, model, x), expected) > 0.1
