"""Our caches, scan and attention give what the untouched modeling code gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from testkit.models import micro_config, tokenizer
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, GraniteMoeHybridForCausalLM

from agentcache.config import CacheConfig
from agentcache.engine.tiny_hybrid import build
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.errors import UnsupportedModel
from agentcache.runtime import Runtime

VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "two groups": {"mamba_n_groups": 2},
    "rotary positions": {"position_embedding_type": "rope"},
    "grouped heads": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "experts": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def stock_model(variant: dict[str, Any]) -> Any:
    config = micro_config(**variant)
    if config.num_local_experts:
        torch.manual_seed(3)
        return GraniteMoeHybridForCausalLM(config).eval()
    return build(config)


def stock_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([ids]), cache=DynamicCache(config=model.config), use_cache=True
        )
    return out.logits[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_stock_model(name: str) -> None:
    """Prefill in odd chunks, a warm extension, decode: each row against one stock pass."""
    reference, model = stock_model(VARIANTS[name]), stock_model(VARIANTS[name])
    ids = np.random.default_rng(1).integers(20, 8000, 230).tolist()
    expected = stock_logits(reference, ids)
    settings = CacheConfig(budget="32MiB", page_size=4, prefill_chunk=37)
    with Runtime(model, tokenizer(), cache=settings) as runtime:
        session = runtime.session()
        options: dict[str, Any] = {"return_logits": True, "verify": True}
        turns = [
            session.generate(ids[:101], replay=ids[101:160], **options),
            session.generate(ids[:171], replay=ids[171:180], stepwise=True, **options),
            session.generate(ids[:181], replay=ids[181:230], **options),
        ]
    assert [turn.usage.cached_tokens for turn in turns] == [0, 160, 179]
    for turn, start in zip(turns, (100, 170, 180), strict=True):
        assert turn.verify is not None
        assert turn.verify.ok
        assert turn.logits is not None
        rows = expected[start : start + len(turn.logits)]
        error = (turn.logits - rows).abs().amax(1) / rows.std(1)
        assert float(error.max()) < 1e-4, f"{name}: {float(error.max()):.1e}"
        assert turn.logits.argmax(1).tolist() == rows.argmax(1).tolist()


def test_taking_a_model_over_leaves_other_models_alone() -> None:
    other = build(micro_config())
    ids = list(range(30, 90))
    before = stock_logits(other, ids)
    with Runtime(build(micro_config()), tokenizer()) as runtime:
        runtime.session().generate(ids, max_new_tokens=2)
        assert torch.equal(stock_logits(other, ids), before)


def test_weights_of_linear_layers_lie_transposed_once_a_model_is_taken_over() -> None:
    model = build(micro_config())
    TransformersBackend(model)
    weights = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"  # tied to the embedding
    }
    assert weights
    assert all(weight.t().is_contiguous() for weight in weights.values())


def test_bfloat16_weights_keep_float32_recurrent_states() -> None:
    model = build(micro_config()).to(torch.bfloat16)
    with Runtime(model, tokenizer()) as runtime:
        turn = runtime.session().generate(list(range(30, 90)), max_new_tokens=4, verify=True)
        dtypes = {name: state.dtype for (_, name), state in runtime.engine.pools.state.items()}
    assert dtypes == {"conv": torch.bfloat16, "recurrent": torch.float32}
    assert turn.verify is not None
    # The decode and the scan round differently in bfloat16; a wrong state would be off by far more.
    assert turn.verify.max_state_error < 0.05


def test_family_that_is_not_admitted_is_refused_by_name() -> None:
    config = GPT2Config(vocab_size=8192, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedModel, match=r"'gpt2'.*granitemoehybrid"):
        Runtime(GPT2LMHeadModel(config), tokenizer())
