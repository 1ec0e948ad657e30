"""Leaf types that cross rooms: shapes, counts and names, all frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "FEW_TOKENS",
    "FinishReason",
    "IntArray",
    "Kind",
    "LayerKind",
    "Mixer",
    "ModelShape",
    "TokenLogprob",
    "Usage",
    "Vote",
]

IntArray = npt.NDArray[np.int32]
"""Token ids or slots, one dimension, int32."""

FEW_TOKENS = 8
"""What is always computed at the end of a prompt, and too little to be worth a checkpoint: the
reply header and one more."""

FinishReason = Literal["stop", "length", "replay", "prefill"]
"""Why a call ended: end id, stop string or complete grammar; max_new_tokens; recorded answer
absorbed; no output."""


class Kind(StrEnum):
    """A reuse rule: which prefixes of a cached sequence a layer kind can resume from.

    These are the built-in ones. A component of another kind names itself by any other string.
    """

    FULL = "full"
    SWA = "swa"
    STATE = "state"


class Vote(Enum):
    """A component's answer at one node."""

    RESIDENT = "resident"
    LOADABLE = "loadable"
    ABSENT = "absent"


Mixer = Literal["attention", "mamba2", "mamba1", "delta", "conv", "none"]
"""What mixes the tokens of a layer: attention, a recurrence (SSD, selective scan, a delta rule), a
short convolution alone, or nothing."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one layer of a model computes, as far as cost and memory go.

    Sizes are counts of elements: for attention `num_heads`, `num_kv_heads`, `head_dim`; for mamba2
    `num_heads`, `head_dim`, `state_dim`, `num_groups`, `conv_width`, and for other recurrences what
    corresponds to these: keys of width `state_dim` in `num_groups` heads, values of width
    `head_dim` in `num_heads`. A layer with two mixers side by side counts as two. `mlp_dim` is the
    width of the gated MLP that follows (0: none).
    """

    mixer: Mixer
    num_heads: int
    head_dim: int
    num_kv_heads: int = 0
    state_dim: int = 0
    num_groups: int = 0
    conv_width: int = 0
    mlp_dim: int = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that cost and memory follow from.

    `kv_itemsize` and `state_itemsize` are bytes per element of attention KV and of recurrent state.
    token_bytes, checkpoint_bytes: what the layers really keep, where that is known better.
    """

    hidden_dim: int
    vocab_size: int
    layers: tuple[LayerKind, ...]
    max_len: int
    kv_itemsize: int = 4
    state_itemsize: int = 4
    token_bytes: int | None = None
    checkpoint_bytes: int | None = None

    @property
    def attention_layers(self) -> tuple[LayerKind, ...]:
        """The layers that keep KV."""
        return tuple(layer for layer in self.layers if layer.mixer == "attention")

    @property
    def state_layers(self) -> tuple[LayerKind, ...]:
        """The layers that keep a recurrent state."""
        return tuple(layer for layer in self.layers if layer.mixer not in ("attention", "none"))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in all attention layers."""
        if self.token_bytes is not None:
            return self.token_bytes
        return sum(
            2 * layer.num_kv_heads * layer.head_dim * self.kv_itemsize
            for layer in self.attention_layers
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint: recurrent and convolution state of all state layers."""
        if self.checkpoint_bytes is not None:
            return self.checkpoint_bytes
        total = 0
        for layer in self.state_layers:
            inner = layer.num_heads * layer.head_dim
            conv_dim = inner + 2 * layer.num_groups * layer.state_dim
            total += inner * layer.state_dim + conv_dim * (layer.conv_width - 1)
        return total * self.state_itemsize


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model held one output token.

    id, logprob: the token that came, and the natural logarithm of its probability under the model's
    own distribution: before temperature, penalties and grammar. top: the same of the likeliest ids,
    best first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one call; `prompt_tokens == cached_tokens + computed_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float
    cached_by_tier: tuple[tuple[str, int], ...] = ()
