"""Leaf types that cross rooms: shapes, counts and names, all frozen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "FEW_TOKENS",
    "BackendName",
    "FinishReason",
    "IntArray",
    "Kind",
    "LayerKind",
    "Mixer",
    "ModelShape",
    "TokenLogprob",
    "Usage",
    "Vote",
    "WeightFormat",
]

IntArray = npt.NDArray[np.int32]
"""Token ids or slots, one dimension, int32."""

FEW_TOKENS = 8
"""What is always computed at the end of a prompt, and too little to be worth a checkpoint: the
reply header and one more."""

BackendName = Literal["auto", "native", "transformers"]
"""What computes a model: layers of our own, transformers' modeling code, or the better of both."""

WeightFormat = Literal["unchanged", "int8"]
"""What weights are kept as: what they were loaded as, or whole numbers of 8 bits with one scale for
each output of a linear map."""

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

    Sizes are counts of elements. A layer with two mixers side by side counts as two.

    attention: `num_heads` queries of width `head_dim`; `num_kv_heads` keys of the same width and
    values of width `value_dim` (0: the same), none where it reads another layer's. window: how many
    tokens one sees, itself included (None: all before it). gate_dim: columns of other projections,
    such as a gate on its output. input_dim: width of what it reads (0: the model's). Latent
    attention has kv_rank: the width of what is cached and then expanded to keys and values of every
    head; `rope_dim` of a head's width are a key that all share. query_rank: the width that queries
    come through.

    mamba2: `num_heads`, `head_dim`, `state_dim`, `num_groups`, `conv_width`. Other recurrences have
    what corresponds to these. mamba1: channels in `num_heads`; time steps come through `gate_rank`.
    Without `state_dim` a state is one number a channel, and two gates are projected in blocks of
    `gate_rank`. delta: keys of width `state_dim` in `num_groups` heads, values of width `head_dim`
    in `num_heads`; decay_dim: columns of the decays (0: one a head); gate_rank: the width that
    decays and output gate come through (0: straight from the input). conv: channels in `num_heads`,
    of which `num_groups` copies are projected (0: no projections).

    mlp_dim: width of the MLP that follows (0: none), of all experts that one token visits together.
    mlp_matrices: 3 where it is gated, else 2. router_dim: columns of what chooses experts.
    """

    mixer: Mixer
    num_heads: int
    head_dim: int
    num_kv_heads: int = 0
    state_dim: int = 0
    num_groups: int = 0
    conv_width: int = 0
    mlp_dim: int = 0
    window: int | None = None
    value_dim: int = 0
    gate_dim: int = 0
    input_dim: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    decay_dim: int = 0
    gate_rank: int = 0
    mlp_matrices: int = 3
    router_dim: int = 0

    @property
    def token_elements(self) -> int:
        """Elements that attention keeps of one token."""
        if self.kv_rank:  # the latent, not what it is expanded to
            return self.kv_rank + self.rope_dim
        return self.num_kv_heads * (self.head_dim + (self.value_dim or self.head_dim))


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
        """The layers that attend; one that reads another's KV keeps none of its own."""
        return tuple(layer for layer in self.layers if layer.mixer == "attention")

    @property
    def state_layers(self) -> tuple[LayerKind, ...]:
        """The layers that keep a recurrent state."""
        return tuple(layer for layer in self.layers if layer.mixer not in ("attention", "none"))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token leaves for good in all attention layers; windows are no part of it.

        They go with the checkpoint: what a boundary needs of them has one size at any length.
        """
        if self.token_bytes is not None:
            return self.token_bytes
        full = (layer for layer in self.attention_layers if layer.window is None)
        return self.kv_itemsize * sum(layer.token_elements for layer in full)

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint: recurrent and convolution state of all state layers, and the
        window of each layer that has one."""
        if self.checkpoint_bytes is not None:
            return self.checkpoint_bytes
        total = 0
        for layer in self.state_layers:
            inner = layer.num_heads * layer.head_dim
            conv_dim = inner + 2 * layer.num_groups * layer.state_dim
            # RG-LRU is the one whose state has no dimension of its own
            width = max(1, layer.state_dim) if layer.mixer == "mamba1" else layer.state_dim
            total += inner * width + conv_dim * max(0, layer.conv_width - 1)
        return total * self.state_itemsize + self.window_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of one whole window in every attention layer that has one."""
        return self.kv_itemsize * sum(
            layer.window * layer.token_elements
            for layer in self.attention_layers
            if layer.window is not None
        )


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
