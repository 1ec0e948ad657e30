"""Sizes of a model that memory follows from, and the leaf types' promises."""

from __future__ import annotations

import dataclasses

import pytest

from agentcache.types import Kind, LayerKind, ModelShape, Usage, Vote

ATTENTION = LayerKind("attention", num_heads=8, head_dim=16, num_kv_heads=2, mlp_dim=64)
MAMBA = LayerKind(
    "mamba2", num_heads=4, head_dim=8, state_dim=16, num_groups=2, conv_width=4, mlp_dim=64
)


def shape(*layers: LayerKind, kv_itemsize: int = 4, state_itemsize: int = 4) -> ModelShape:
    return ModelShape(64, 100, layers, 4096, kv_itemsize, state_itemsize)


def test_kv_of_a_token_is_keys_and_values_of_every_attention_layer() -> None:
    assert shape(ATTENTION, MAMBA, ATTENTION).kv_bytes_per_token == 2 * (2 * 2 * 16 * 4)
    assert shape(ATTENTION, kv_itemsize=2).kv_bytes_per_token == 2 * 2 * 16 * 2
    assert shape(MAMBA).kv_bytes_per_token == 0


def test_checkpoint_is_recurrent_and_convolution_state_of_every_state_layer() -> None:
    inner = 4 * 8
    one = inner * 16 + (inner + 2 * 2 * 16) * 3
    assert shape(MAMBA, ATTENTION, MAMBA).state_bytes == 2 * one * 4
    assert shape(MAMBA, state_itemsize=2).state_bytes == one * 2
    assert shape(ATTENTION).state_bytes == 0


def test_layers_are_told_apart_in_order() -> None:
    model = shape(MAMBA, ATTENTION, MAMBA)
    assert model.attention_layers == (ATTENTION,)
    assert model.state_layers == (MAMBA, MAMBA)


@pytest.mark.parametrize("value", [ATTENTION, shape(MAMBA), Usage(3, 1, 2, 1, 0.1, 0.2)])
def test_values_between_rooms_are_frozen_and_slotted(value: object) -> None:
    field = dataclasses.fields(value)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, 1)
    assert not hasattr(value, "__dict__")


def test_kinds_and_votes_have_stable_names() -> None:
    assert [kind.value for kind in Kind] == ["full", "swa", "state"]
    assert str(Kind.STATE) == "state"
    assert {vote.value for vote in Vote} == {"resident", "loadable", "absent"}
