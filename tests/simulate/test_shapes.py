"""Shapes by name: presets, and whatever a reader of models finds."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from agentcache.errors import ConfigError, ModelNotFound, UnsupportedModel
from agentcache.policy.cost import PublishedShape
from agentcache.simulate.shapes import PRESETS, load_shape
from agentcache.types import LayerKind, ModelShape

if TYPE_CHECKING:
    from pathlib import Path

READ = ModelShape(8, 16, (LayerKind("attention", 1, 8, num_kv_heads=1),), max_len=32)


def refuse(name: str) -> ModelShape:
    raise ModelNotFound(f"no model at {name!r}")


def test_the_published_model_by_name() -> None:
    shape = load_shape("marconi-7b")
    assert shape == PublishedShape().shape()
    assert (shape.state_bytes, shape.kv_bytes_per_token) == (26_787_840, 65_536)
    assert (len(shape.state_layers), len(shape.attention_layers)) == (24, 4)


@pytest.mark.parametrize("ratio", range(2, 9))
def test_a_ratio_is_kept_exactly_with_about_as_many_layers(ratio: int) -> None:
    shape = load_shape(f"ratio-1:{ratio}")
    num_attention = len(shape.attention_layers)
    assert len(shape.state_layers) == ratio * num_attention
    assert 27 <= len(shape.layers) <= 32
    assert all(layer.mlp_dim == 4 * 4096 for layer in shape.layers)
    assert shape.kv_bytes_per_token == num_attention * 4 * 4096


def test_the_published_model_is_the_one_of_ratio_six() -> None:
    assert load_shape("ratio-1:6") == load_shape("marconi-7b") == load_shape("n128")


@pytest.mark.parametrize("size", [16, 32, 64, 100, 128])
def test_a_state_size_changes_checkpoints_alone(size: int) -> None:
    shape = load_shape(f"n{size}")
    assert shape.state_bytes == 24 * (2 * 4096 * size + 8 * (2 * 4096 + 2 * size))
    assert shape.kv_bytes_per_token == 65_536


def test_parts_combine_in_any_order() -> None:
    shape = load_shape("marconi-7b+ratio-1:3+n64")
    assert shape == load_shape("n64+ratio-1:3")
    assert (len(shape.state_layers), shape.state_layers[0].state_dim) == (21, 64)


@pytest.mark.parametrize("text", ["ratio-1:1", "ratio-1:9", "n15", "n129", "n0", "ratio-1:4+n999"])
def test_a_part_out_of_range_is_refused_with_its_limits(text: str) -> None:
    with pytest.raises(ConfigError, match=r"out of range: \d+ is not \d+ to \d+") as caught:
        load_shape(text)
    assert PRESETS in str(caught.value)


@pytest.mark.parametrize("text", ["n16+n32", "ratio-1:2+n16+ratio-1:2", "marconi-7b+marconi-7b"])
def test_a_part_given_twice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="twice"):
        load_shape(text)


@pytest.mark.parametrize("text", ["", "marconi", "n", "n-16", "ratio-2:1", "n16+", "n64+what"])
def test_an_unknown_name_is_refused_naming_what_is_known(text: str) -> None:
    for reader in (None, refuse):
        with pytest.raises(ConfigError) as caught:
            load_shape(text, reader)
        assert repr(text) in str(caught.value)
        assert PRESETS in str(caught.value)


def test_anything_else_is_read_as_a_model() -> None:
    names = []

    def read(name: str) -> ModelShape:
        names.append(name)
        return READ

    assert load_shape("some/model", read) is READ
    assert names == ["some/model"]


def test_presets_do_not_ask_for_a_model() -> None:
    assert load_shape("ratio-1:2+n16", refuse).state_bytes > 0


def test_a_path_goes_before_a_preset_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "n64").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_shape("n64", lambda name: READ) is READ


def test_a_model_that_cannot_be_described_is_its_own_error() -> None:
    def read(name: str) -> ModelShape:
        raise UnsupportedModel("sees both ways")

    with pytest.raises(UnsupportedModel, match="sees both ways"):
        load_shape("some/model", read)


def test_presets_need_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from agentcache.simulate.shapes import load_shape; load_shape('marconi-7b'); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
