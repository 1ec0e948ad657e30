"""Whose sizes a simulation counts with: presets by name, or a model's config."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentcache.errors import ConfigError, ModelNotFound
from agentcache.policy.cost import PublishedShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.types import ModelShape

    ReadModel = Callable[[str], ModelShape]
    """Sizes of the model a name stands for; raises ModelError."""

__all__ = ["PRESETS", "load_shape", "preset"]

PRESETS = "marconi-7b, ratio-1:2 to ratio-1:8 (attention to state layers), n16 to n128 (state size)"
"""What a preset is called, for messages and help. Several are joined by "+"."""

_RATIO = re.compile(r"ratio-1:(\d+)")
_STATE_DIM = re.compile(r"n(\d+)")
_RATIOS = range(2, 9)
_STATE_DIMS = range(16, 129)
_NUM_LAYERS = 28
"""Of the published model, state and attention layers together."""


def load_shape(text: str, read_model: ReadModel | None = None) -> ModelShape:
    """The shape that `text` names: a preset, or what `read_model` finds under it.

    read_model: sizes by a config file, a model folder, or another name of a model; it is not asked
    for presets, so those need nothing but this module. A path that exists goes before a preset.
    Raises ConfigError naming what is known, and ModelError for a model that cannot be described.

    >>> load_shape("ratio-1:3+n64").state_bytes == 21 * (2 * 4096 * 64 + 8 * (2 * 4096 + 2 * 64))
    True
    """
    is_path = bool(text) and Path(text).expanduser().exists()
    published = None if is_path else preset(text)
    if published is not None:
        return published.shape()
    if read_model is None:
        raise ConfigError(f"unknown shape {text!r}; there are {PRESETS}, joined by '+'")
    try:
        return read_model(text)
    except ModelNotFound as error:
        raise ConfigError(
            f"unknown shape {text!r}: no preset, and {error}; presets are {PRESETS}, joined by '+'"
        ) from error


def preset(text: str) -> PublishedShape | None:
    """The published model with what the parts of a preset's name change; None for another name.

    Raises ConfigError for a part out of its range or given twice.

    >>> shape = preset("ratio-1:3+n64")
    >>> shape.attention_layers, shape.state_layers, shape.state_dim
    (7, 21, 64)
    """
    shape, seen = PublishedShape(), set[str]()
    for part in text.split("+"):
        if part == "marconi-7b":
            what = "model"
        elif ratio := _RATIO.fullmatch(part):
            what, shape = "ratio", _with_ratio(shape, _within(part, int(ratio[1]), _RATIOS))
        elif size := _STATE_DIM.fullmatch(part):
            what = "state size"
            shape = replace(shape, state_dim=_within(part, int(size[1]), _STATE_DIMS))
        else:
            return None
        if what in seen:
            raise ConfigError(f"shape {text!r} names its {what} twice; leave one of the two out")
        seen.add(what)
    return shape


def _within(part: str, value: int, allowed: range) -> int:
    if value not in allowed:
        raise ConfigError(
            f"{part!r} is out of range: {value} is not {allowed[0]} to {allowed[-1]}; "
            f"there are {PRESETS}"
        )
    return value


def _with_ratio(shape: PublishedShape, ratio: int) -> PublishedShape:
    """So many state layers for each attention layer, exactly, and about as many layers as before;
    an MLP after each."""
    attention = round(_NUM_LAYERS / (1 + ratio))
    return replace(
        shape,
        attention_layers=attention,
        state_layers=ratio * attention,
        mlp_layers=(1 + ratio) * attention,
    )
