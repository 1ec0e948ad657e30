"""Weights that do not fit a description are named; those transformers saved are read back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from agentcache.engine.backend import Batch, Span
from agentcache.engine.families.tiny import build
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE
from agentcache.engine.native.weights import Weights
from agentcache.errors import ModelError, UnsupportedModel
from agentcache.pools.layout import PoolSizes
from agentcache.pools.table import PageTable
from agentcache.pools.tensors import TensorPools

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

NAMES = [
    ("llama", "model.layers.1.mlp.up_proj.weight"),
    ("llama", "lm_head.weight"),
    ("granitemoehybrid", "model.layers.0.mamba.A_log"),
    ("lfm2_moe", "model.layers.0.conv.conv.weight"),
    ("lfm2_moe", "model.layers.1.feed_forward.expert_bias"),
    ("lfm2_moe", "model.layers.2.feed_forward.experts.down_proj"),
]


def described(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """What a backend does with a model's weights."""
    weights = Weights(tensors)
    NATIVE[model.config.model_type](model.config, weights)
    weights.check_all_used()


@pytest.mark.parametrize(("variant", "name"), NAMES)
def test_missing_weight_is_named(variant: str, name: str) -> None:
    model = build(variant)
    tensors = dict(model.state_dict())
    del tensors[name]
    with pytest.raises(ModelError, match=f"no weight '{re.escape(name)}'"):
        described(model, tensors)


@pytest.mark.parametrize(("variant", "name"), NAMES)
def test_weight_of_another_shape_is_named_with_both_shapes(variant: str, name: str) -> None:
    model = build(variant)
    tensors = dict(model.state_dict())
    right = tuple(tensors[name].shape)
    tensors[name] = tensors[name][1:]
    wrong = (right[0] - 1, *right[1:])
    shapes = f"{re.escape(str(wrong))}.*{re.escape(str(right))}"
    with pytest.raises(ModelError, match=f"'{re.escape(name)}' has the shape {shapes}"):
        described(model, tensors)


def test_weight_that_no_layer_takes_is_named() -> None:
    model = build("llama")
    described(model, dict(model.state_dict()))
    sinks = torch.nn.Parameter(torch.zeros(4))
    model.model.layers[1].self_attn.register_parameter("sinks", sinks)
    with pytest.raises(ModelError, match=r"1 weights.*'model\.layers\.1\.self_attn\.sinks'"):
        NativeBackend(model)


def test_family_without_a_description_is_refused_with_what_to_take_instead() -> None:
    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModel, match=r"'gpt2'.*backend='transformers'.*llama"):
        NativeBackend(GPT2LMHeadModel(config))


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """Native logits of 40 tokens, [40, vocab]."""
    backend = NativeBackend(model)
    kv, state = backend.kv_layout, backend.state_layout
    sizes = PoolSizes.of(kv, state, num_pages=16, page_size=8, num_rows=1, num_staging=0)
    pools = TensorPools(kv, state, sizes, poison=True)
    tables = {}
    for i, (kind, size) in enumerate(kv.page_shape(8).lens.items()):
        tables[kind] = PageTable(size, np.arange(8 * i, 8 * i - (-40 // size), dtype=np.int32))
    ids = np.random.default_rng(0).integers(64, 192, 40).astype(np.int32)
    span = Span(ids, 0, tables["full"], 0, logits_at=tuple(range(40)), windows=tables)
    (logits,) = backend.forward(Batch((span,), pools))
    return logits


@pytest.mark.parametrize("variant", ["gemma3", "granitemoehybrid_moe", "lfm2_moe"])
def test_model_that_was_saved_and_loaded_gives_the_same_logits(
    variant: str, tmp_path: Path
) -> None:
    model = build(variant)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-1, 1, len(buffer)))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits_of(loaded), logits_of(model))
