"""Our Hymba: what it computes, what it keeps between passes, and the weights it is loaded from."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from testkit.hymba import SETTINGS, hymba_reference, tiny_hymba
from testkit.models import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from agentcache.config import CacheConfig
from agentcache.engine._probe_memory import Memory
from agentcache.engine.describe import describe
from agentcache.engine.loader import load_model
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.errors import ModelError, UnsupportedModel
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from pathlib import Path

    from agentcache.types import IntArray

LEN = 60
"""Long enough for windows of 17 to move well past the first tokens."""


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    num = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num)


def tokens(num: int = LEN, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(3, 256, num).astype(np.int32)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Greatest difference, in units of the expected deviation."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.std())


@cache
def expected(seed: int = 0) -> torch.Tensor:
    return hymba_reference(tiny_hymba(), tokens(seed=seed).tolist())


@cache
def backend() -> TransformersBackend:
    """A taken-over model; passes leave nothing on it."""
    return TransformersBackend(tiny_hymba())


def memory(num_running: int = 1, num_captures: int = 0) -> Memory:
    return Memory(
        backend(),
        np.random.default_rng(0),
        room=LEN,
        num_running=num_running,
        num_captures=num_captures,
    )


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 1e-5),
        ({"num_memory_tokens": 0}, 3e-5),
        ({"num_memory_tokens": 24, "kv_reuse_group": [[0, 3]], "mamba_expand": 1}, 1e-5),
        ({"rope": False, "mlp_hidden_act": "relu2", "sliding_window": None}, 1e-5),
        ({"rope_type": None, "global_attn_idx": [0], "kv_reuse_group": [[1, 2, 3]]}, 1e-5),
    ],
    ids=["published layout", "no meta tokens", "shared in pairs", "no positions", "in threes"],
)
def test_a_full_pass_is_the_plain_reference(changes: dict[str, Any], limit: float) -> None:
    model, ids = tiny_hymba(**changes), tokens(45).tolist()
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    assert error(logits, hymba_reference(model, ids)) < limit


def test_a_stock_cache_goes_on_where_it_stopped() -> None:
    model, ids = tiny_hymba(), torch.tensor([tokens().tolist(), tokens(seed=1).tolist()])
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        held = DynamicCache(config=model.config)
        with torch.inference_mode():
            parts = [
                model(ids[:, low:high], cache=held, use_cache=True).logits
                for low, high in ((0, 1), (1, 30), (30, 31), (31, LEN))
            ]
        logits = torch.cat(parts, dim=1)
        assert error(logits[0], expected()) < 5e-5
        assert error(logits[1], expected(1)) < 5e-5


def test_padded_batches_are_refused() -> None:
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="padded"):
        tiny_hymba()(ids, attention_mask=torch.tensor([[0, 1, 1]]))


@pytest.mark.parametrize("cuts", [[], [1], [13, 14, 40], [2, 3, 4, 5], [30]], ids=str)
def test_passes_over_pools_are_the_plain_reference(cuts: list[int]) -> None:
    within = memory()
    running = within.start()
    logits = [within.extend(running, part)[0] for part in np.split(tokens(), cuts)]
    assert error(torch.cat(logits), expected()) < 5e-5


def test_captured_states_go_on_exactly() -> None:
    """Also those before a whole convolution of text, whose inputs are still meta tokens."""
    lengths = [1, 2, 3, 21, 33, 50]
    within = memory(num_running=1 + len(lengths), num_captures=len(lengths))
    running = within.start()
    _, early = within.extend(running, tokens()[:30], [n for n in lengths if n < 30])
    _, late = within.extend(running, tokens()[30:], [n for n in lengths if n > 30])
    for checkpoint in early + late:
        logits, _ = within.extend(within.resume(checkpoint), tokens()[checkpoint.length :])
        assert error(logits, expected()[checkpoint.length :]) < 5e-5


def test_ragged_decode_and_steps_from_the_first_token() -> None:
    """One sequence has 40 tokens when the other begins: only that row begins at the meta tokens."""
    within = memory(num_running=3)
    texts = [tokens(), tokens(seed=1), tokens()]
    running = [within.start() for _ in texts]
    starts = [40, 0, 25]
    for each, text, start in zip(running, texts, starts, strict=True):
        if start:
            within.extend(each, text[:start])
    steps = [
        within.step(
            running, [int(text[start + n]) for text, start in zip(texts, starts, strict=True)]
        )
        for n in range(20)
    ]
    for i, (seed, start) in enumerate(zip((0, 1, 0), starts, strict=True)):
        logits = torch.stack([step[i] for step in steps])
        assert error(logits, expected(seed)[start : start + 20]) < 5e-5


def test_what_a_row_holds_before_the_first_token_does_not_count() -> None:
    within = memory()
    running = within.start()
    for state in within.pools.state.values():
        state[running.row] = torch.nan
    assert error(within.extend(running, tokens())[0], expected()) < 5e-5


def test_only_producers_keep_kv_and_every_layer_keeps_states() -> None:
    description = describe(tiny_hymba())
    assert [spec.layer_idx for spec in description.kv.specs] == [0, 1, 3]
    assert [spec.window for spec in description.kv.specs] == [None, 17, None]
    assert {spec.value_width for spec in description.kv.specs} == {32}
    assert [spec.layer_idx for spec in description.state.specs] == [0, 0, 1, 1, 2, 2, 3, 3]
    halves = describe(tiny_hymba().to(torch.bfloat16)).state.specs[:2]
    assert [spec.dtype for spec in halves] == [torch.bfloat16, torch.float32]


def test_meta_tokens_are_read_once_a_model_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    within = memory()
    model = backend().model.model
    monkeypatch.setattr(type(model), "read_meta_tokens", lambda self: pytest.fail("read again"))
    within.extend(within.start(), tokens())


def test_sessions_on_it_are_verified() -> None:
    settings = CacheConfig(budget="16MiB", page_size=4, prefill_chunk=23)
    model, ids = tiny_hymba(vocab_size=8192), [30 + n % 97 for n in range(150)]
    with Runtime(model, tokenizer(), cache=settings, poison=True) as runtime:
        session = runtime.session()
        session.generate(ids[:90], replay=ids[90:100], verify=True)
        turn = session.generate(ids, max_new_tokens=4, verify=True)
    assert turn.usage.cached_tokens == 100
    assert turn.verify is not None
    assert turn.verify.ok


def published(model: Any) -> dict[str, torch.Tensor]:
    """A model's weights under the names of the published checkpoints."""
    names = {
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "model.memory_tokens": "model.meta_tokens",
        "model.final_layernorm.weight": "model.norm.weight",
    }
    of_layer = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_moe_layernorm.weight": "post_mixer_layernorm.weight",
        "moe.experts.0.gate_proj.weight": "mlp.gate_proj.weight",
        "moe.experts.0.up_proj.weight": "mlp.up_proj.weight",
        "moe.experts.0.down_proj.weight": "mlp.down_proj.weight",
        "mamba.in_proj.weight": "mixer.in_proj.weight",
        "mamba.out_proj.weight": "mixer.out_proj.weight",
        "mamba.conv1d.weight": "mixer.conv1d.weight",
        "mamba.conv1d.bias": "mixer.conv1d.bias",
        "mamba.x_proj.0.weight": "mixer.x_proj.weight",
        "mamba.dt_proj.0.weight": "mixer.dt_proj.weight",
        "mamba.dt_proj.0.bias": "mixer.dt_proj.bias",
        "mamba.A_log.0": "mixer.A_log",
        "mamba.D.0": "mixer.D",
        "mamba.dt_layernorm.weight": "mixer.dt_layernorm.weight",
        "mamba.B_layernorm.weight": "mixer.b_layernorm.weight",
        "mamba.C_layernorm.weight": "mixer.c_layernorm.weight",
        "mamba.pre_avg_layernorm1.weight": "mixer.attention_norm.weight",
        "mamba.pre_avg_layernorm2.weight": "mixer.scan_norm.weight",
    }
    for i in range(model.config.num_hidden_layers):
        for theirs, ours in of_layer.items():
            names[f"model.layers.{i}.{theirs}"] = f"model.layers.{i}.{ours}"
    weights = model.state_dict()
    assert set(weights) == {*names.values(), "lm_head.weight"}, "a weight without published name"
    return {theirs: weights[ours].clone() for theirs, ours in names.items()}


def checkpoint(folder: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A folder as published: the config with all it says that no code here needs."""
    settings = {
        "architectures": ["HymbaForCausalLM"],
        "attn_implementation": "flex",
        "attn_implementation_new": "flex",
        "auto_map": {"AutoConfig": "configuration_hymba.HymbaConfig"},
        "calc_logits_for_entire_prompt": False,
        "conv_dim": {"0": 128, "1": 128, "2": 128, "3": 128},
        "kq_norm": "none",
        "layer_type": ["h"] * 4,
        "mamba_dt_rank": 4,
        "model_type": "hymba",
        "seq_length": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_mamba_kernels": True,
        "v_head_dim": 32,
        **SETTINGS,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_published_checkpoint_loads_to_the_same_logits(tmp_path: Path) -> None:
    model, ids = tiny_hymba(seed=4), torch.tensor([tokens().tolist()])
    folder = checkpoint(tmp_path, published(model))
    tokenizer().save_pretrained(folder)
    loaded = load_model(folder).model
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_a_saved_model_has_the_published_names(tmp_path: Path) -> None:
    model = tiny_hymba(seed=4)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) - {"lm_head.weight"} == set(published(model))


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    weights = published(tiny_hymba())
    del weights["model.layers.2.mamba.A_log.0"]
    weights["model.layers.1.mamba.A_log.1"] = torch.zeros(3)
    weights["model.memory_tokens"] = torch.zeros(9, 64)
    folder = checkpoint(tmp_path, weights)
    with pytest.raises(ModelError) as raised:
        AutoModelForCausalLM.from_pretrained(folder)
    for name in ("layers.2.mixer.A_log", "layers.1.mamba.A_log.1", "model.meta_tokens"):
        assert name in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 4}, "num_experts is 4"),
        ({"kq_norm": "rms"}, "kq_norm is 'rms'"),
        ({"memory_tokens_interspersed_every": 512}, "interspersed"),
        ({"rope_type": "dynamic_ntk"}, "dynamic_ntk"),
        ({"orig_max_position_embeddings": None}, "orig_max_position_embeddings"),
        ({"kv_reuse_group": [[0, 1]]}, r"layers \[0, 1\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layouts_that_are_not_computed_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        tiny_hymba(**changes)


def test_the_config_round_trips(tmp_path: Path) -> None:
    config = tiny_hymba().config
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(again, name) for name in SETTINGS} == SETTINGS
    assert again.layer_types == ["hybrid", "hybrid", "linear_attention", "hybrid"]
