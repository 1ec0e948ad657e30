"""A model's sizes by its config alone are those of the loaded model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from agentcache.engine.config_shape import shape_by_config
from agentcache.engine.describe import describe
from agentcache.engine.families.tiny import build
from agentcache.errors import ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "name",
    [
        "granitemoehybrid_moe",
        "nemotron_h",
        "qwen3_next",
        "qwen4_exp",  # sparse attention, which selects by what it has computed
        "glm5_next",
        "gemma4_shared",
        "hymba",
        "recurrent_gemma",
        "deepseek_v4",
    ],
)
def test_a_config_file_gives_the_shape_of_the_loaded_model(name: str, tmp_path: Path) -> None:
    model = build(name)
    file = tmp_path / "config.json"
    model.config.to_json_file(file)
    assert shape_by_config(file) == describe(model).shape


def test_a_config_in_half_precision_halves_what_its_tokens_leave(tmp_path: Path) -> None:
    config = build("llama").config.to_dict()
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        assert shape_by_config(tmp_path).kv_bytes_per_token == 2 * 2 * 2 * 16 * itemsize


def test_a_family_that_is_not_proven_is_described_too(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_by_config(str(tmp_path))
    assert shape.kv_bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert [layer.mlp_dim for layer in shape.layers] == [96] * 3


def test_recurrences_without_heads_of_an_unproven_family_are_taken_for_mamba1(
    tmp_path: Path,
) -> None:
    config = {
        "model_type": "mamba",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 256,
        "state_size": 8,
        "time_step_rank": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = shape_by_config(tmp_path).layers[0]
    assert (layer.mixer, layer.num_heads, layer.state_dim) == ("mamba1", 128, 8)
    assert (layer.gate_rank, layer.mlp_dim) == (4, 0)


def test_an_embedded_model_is_known_by_name() -> None:
    assert shape_by_config("tiny-hybrid").state_layers[0].state_dim == 64


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "no-such-family"}'])
def test_what_is_no_config_of_a_model_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    for name in (file, str(tmp_path)):
        with pytest.raises(ModelNotFound, match="config"):
            shape_by_config(name)


def test_a_config_of_something_else_than_a_causal_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(UnsupportedModel, match="clip"):
        shape_by_config(tmp_path)


def test_sizes_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    config = {**build("llama").config.to_dict(), "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((UnsupportedModel, ModelNotFound)):
        shape_by_config(tmp_path)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such folder"):
        shape_by_config(str(tmp_path / "nothing" / "config.json"))
