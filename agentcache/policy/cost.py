"""FLOPs and bytes of a prefix, from the sizes of a model: what a hit saves and what it holds.

A multiply-add counts as 2. Only work that differs between models is counted: matrix products, the
attention over the history, the convolution and the recurrence of a state layer. Norms, residuals,
rotations and softmax are left out.

The formulas are those published with Marconi (Pan et al., MLSys 2025), where L tokens of width D
with state size N cost 8LD² + 4L²D in an attention layer, 12LD² + 16LDN + 10LD in a state layer and
16LD² in an MLP, put into a layer's real sizes. Two differences remain, both of them deliberate:

- attention: a token looks at itself and at what precedes it, so L tokens make L(L+1)/2 pairs. The
  published 4L²D counts the masked half too. Causal counting is what makes the cost of a prefix and
  of its remainder add up to the cost of the whole.
- state layer: its terms agree for inner width 2D and one group; the projection of the time step and
  the convolution, which the published sum leaves out, are added.

`PublishedShape` has the published figures to the letter, for comparison with published results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from agentcache.types import LayerKind, ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agentcache.types import Mixer

__all__ = [
    "FlopsModel",
    "LayerFlops",
    "PublishedShape",
    "attention_flops",
    "checkpoint_bytes",
    "kv_bytes",
    "layer_flops",
    "mlp_flops",
    "prefill_flops",
    "published_flops",
    "state_flops",
]

_Lengths = npt.NDArray[np.integer[Any]] | npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """FLOPs of one layer: of its matrix products and of the rest, per token; of a visible pair."""

    products: int
    rest: int = 0
    pair: int = 0


def prefill_flops(shape: ModelShape, start: int, stop: int, with_head: int = 1) -> int:
    """FLOPs of a forward pass over tokens [start, stop) when the first `start` are cached.

    `with_head` is how many of the computed tokens get logits (a prefill needs the last one's);
    no more than are computed can. Without the head, costs add up at any cut:

    >>> from agentcache.types import LayerKind, ModelShape
    >>> layer = LayerKind("attention", num_heads=2, head_dim=4, num_kv_heads=1, mlp_dim=16)
    >>> shape = ModelShape(hidden_dim=8, vocab_size=100, layers=(layer,), max_len=64)
    >>> whole = prefill_flops(shape, 0, 9, with_head=0)
    >>> whole == prefill_flops(shape, 0, 4, with_head=0) + prefill_flops(shape, 4, 9, with_head=0)
    True
    """
    assert 0 <= start <= stop, f"token range [{start}, {stop}) runs backwards"
    num_tokens = stop - start
    total = 2 * shape.hidden_dim * shape.vocab_size * min(with_head, num_tokens)
    for layer in shape.layers:
        flops = layer_flops(layer, shape.hidden_dim)
        total += (flops.products + flops.rest) * num_tokens
        if flops.pair:
            total += flops.pair * (_pairs(stop, layer.window) - _pairs(start, layer.window))
    return total


def layer_flops(layer: LayerKind, hidden_dim: int) -> LayerFlops:
    """What one layer costs, mixer and MLP together."""
    mixer = _MIXERS[layer.mixer](layer, hidden_dim)
    return LayerFlops(mixer.products + mlp_flops(layer, hidden_dim, 1), mixer.rest, mixer.pair)


def attention_flops(layer: LayerKind, hidden_dim: int, start: int, stop: int) -> int:
    """FLOPs of one attention mixer over tokens [start, stop) after `start` cached ones.

    Projections of queries, keys, values and output; then, for each token, scores and weighted
    values over itself and everything before it, as far as its window reaches.
    """
    flops = _attention(layer, hidden_dim)
    num_pairs = _pairs(stop, layer.window) - _pairs(start, layer.window)
    return flops.products * (stop - start) + flops.pair * num_pairs


def state_flops(layer: LayerKind, hidden_dim: int, num_tokens: int) -> int:
    """FLOPs of one recurrent or convolution mixer over `num_tokens` tokens, wherever they stand."""
    flops = _MIXERS[layer.mixer](layer, hidden_dim)
    return (flops.products + flops.rest) * num_tokens


def mlp_flops(layer: LayerKind, hidden_dim: int, num_tokens: int) -> int:
    """FLOPs of the MLP after one mixer: its matrices, of the experts a token visits, and what
    chooses these."""
    per_token = layer.mlp_matrices * layer.mlp_dim + layer.router_dim
    return 2 * hidden_dim * per_token * num_tokens


def checkpoint_bytes(shape: ModelShape) -> int:
    """Bytes of one checkpoint: all that a boundary needs besides the KV of every token before it.

    The states of all state layers at one position, and the window of each layer that has one.
    """
    return shape.state_bytes


def kv_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Bytes of the KV that `num_tokens` tokens leave in all attention layers without a window."""
    return shape.kv_bytes_per_token * num_tokens


def _pairs(num_tokens: int, window: int | None) -> int:
    """How many tokens `num_tokens` tokens see together, each itself and those before it."""
    inside = num_tokens if window is None else min(num_tokens, window)
    pairs = inside * (inside + 1) // 2
    return pairs if window is None else pairs + (num_tokens - inside) * window


def _attention(layer: LayerKind, hidden_dim: int) -> LayerFlops:
    value_dim = layer.value_dim or layer.head_dim
    query_out, value_out = layer.num_heads * layer.head_dim, layer.num_heads * value_dim
    input_dim = layer.input_dim or hidden_dim
    matrices = input_dim * layer.gate_dim + hidden_dim * value_out
    if layer.query_rank:
        matrices += layer.query_rank * (input_dim + query_out)
    else:
        matrices += input_dim * query_out
    if layer.kv_rank:
        # Each token's latent is expanded once. Code that expands the whole history anew at every
        # pass pays for cached tokens too; absorbed into queries and output it pays in the pairs.
        expanded = layer.head_dim - layer.rope_dim + value_dim
        matrices += input_dim * layer.token_elements
        matrices += layer.kv_rank * layer.num_heads * expanded
    else:
        matrices += input_dim * layer.token_elements
    return LayerFlops(2 * matrices, pair=2 * (query_out + value_out))


def _mamba2(layer: LayerKind, hidden_dim: int) -> LayerFlops:
    """The recurrence in its plain form: per state element one multiply-add each for the decay, the
    outer product that comes in and the output. A chunked scan does more arithmetic for the same.
    """
    inner = layer.num_heads * layer.head_dim
    conv_dim = inner + 2 * layer.num_groups * layer.state_dim
    products = 2 * hidden_dim * (inner + conv_dim + layer.num_heads) + 2 * inner * hidden_dim
    convolution = 2 * layer.conv_width * conv_dim
    recurrence = 6 * inner * layer.state_dim
    return LayerFlops(products, convolution + recurrence + _ELEMENTWISE * inner)


_ELEMENTWISE = 5
"""Per channel of a state layer: skip (2), two activations, gate."""


def _mamba1(layer: LayerKind, hidden_dim: int) -> LayerFlops:
    """As Mamba-2, but a decay per state element; B, C and time steps come after the convolution.

    RG-LRU, of which a state has no dimension: two gates in blocks; per channel the decay with its
    normaliser (3), what comes in (1) and the sum (2).
    """
    inner = layer.num_heads * layer.head_dim
    matrices = 3 * hidden_dim * inner  # input, gate, output
    if layer.state_dim:
        matrices += inner * (2 * layer.gate_rank + 2 * layer.state_dim)
        recurrence = 7 * inner * layer.state_dim
    else:
        matrices += 2 * inner * layer.gate_rank
        recurrence = 6 * inner
    convolution = 2 * layer.conv_width * inner
    return LayerFlops(2 * matrices, convolution + recurrence + _ELEMENTWISE * inner)


def _delta(layer: LayerKind, hidden_dim: int) -> LayerFlops:
    """A delta rule: per state element the decay (1), and one multiply-add each for what the state
    holds under the key, for the difference that is written, and for the output."""
    keys, values = layer.num_groups * layer.state_dim, layer.num_heads * layer.head_dim
    decays = layer.decay_dim or layer.num_heads
    matrices = hidden_dim * (2 * keys + 2 * values + layer.num_heads)  # q, k, v, output, step
    if layer.gate_rank:
        matrices += layer.gate_rank * (2 * hidden_dim + decays + values)
    else:
        matrices += hidden_dim * (decays + values)
    convolution = 2 * layer.conv_width * (2 * keys + values)
    recurrence = 7 * values * layer.state_dim
    return LayerFlops(2 * matrices, convolution + recurrence + _ELEMENTWISE * values)


def _conv(layer: LayerKind, hidden_dim: int) -> LayerFlops:
    """A short convolution between two gates, or without any."""
    channels, copies = layer.num_heads * layer.head_dim, layer.num_groups
    columns = copies + 1 if copies else 0
    gates = max(0, copies - 1) * channels
    return LayerFlops(2 * hidden_dim * columns * channels, 2 * layer.conv_width * channels + gates)


_MIXERS: Mapping[Mixer, Callable[[LayerKind, int], LayerFlops]] = {
    "attention": _attention,
    "mamba2": _mamba2,
    "mamba1": _mamba1,
    "delta": _delta,
    "conv": _conv,
    "none": lambda layer, hidden_dim: LayerFlops(0),
}


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """The cost of a whole prefix as a function of its length, cheap enough to ask at each eviction.

    linear: FLOPs of each token. pairs: (window, FLOPs of a visible pair) of the attention layers,
    those of one window together. All of it float64: a prefix of ten million tokens costs more than
    int64 holds.
    """

    linear: float
    pairs: tuple[tuple[int | None, float], ...] = ()

    @classmethod
    def of(cls, shape: ModelShape) -> FlopsModel:
        """The cost by a model's real sizes: `prefill_flops` without the head."""
        linear, pairs = 0, dict[int | None, int]()
        for layer in shape.layers:
            flops = layer_flops(layer, shape.hidden_dim)
            linear += flops.products + flops.rest
            if flops.pair:
                pairs[layer.window] = pairs.get(layer.window, 0) + flops.pair
        return cls(float(linear), tuple((window, float(each)) for window, each in pairs.items()))

    @overload
    def upto(self, num_tokens: float) -> float: ...
    @overload
    def upto(self, num_tokens: _Lengths) -> npt.NDArray[np.float64]: ...
    def upto(self, num_tokens: float | _Lengths) -> float | npt.NDArray[np.float64]:
        """FLOPs of the first `num_tokens` tokens, a number or an array of them.

        >>> FlopsModel(linear=10.0, pairs=((None, 2.0),)).upto(3)
        42.0
        >>> FlopsModel(linear=10.0, pairs=((2, 2.0),)).upto(np.array([1, 3]))
        array([12., 40.])
        """
        if isinstance(num_tokens, np.ndarray):
            return self._upto_each(num_tokens.astype(np.float64))
        total = self.linear * num_tokens
        for window, flops in self.pairs:
            inside = num_tokens if window is None else min(num_tokens, window)
            total += flops * (0.5 * inside * (inside + 1))
            if window is not None:
                total += flops * (num_tokens - inside) * window
        return total

    def between(self, start: float, stop: float) -> float:
        """FLOPs of tokens [start, stop) after `start` cached ones."""
        return self.upto(stop) - self.upto(start)

    def _upto_each(self, lengths: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        total = self.linear * lengths
        for window, flops in self.pairs:
            inside = lengths if window is None else np.minimum(lengths, window)
            total += flops * (0.5 * inside * (inside + 1))
            if window is not None:
                total += flops * (lengths - inside) * window
        return total


@dataclass(frozen=True, slots=True)
class PublishedShape:
    """A hybrid model as the article counts it: width D, state size N, layers, all in fp16.

    By default its 7B model of 24 state, 4 attention and 28 MLP layers. A state takes 2DN bytes and
    its convolution four columns of 2D + 2N; one token's KV takes 4D. Both per layer:

    >>> PublishedShape().state_bytes, PublishedShape().kv_bytes_per_token
    (26787840, 65536)
    """

    hidden_dim: int = 4096
    state_dim: int = 128
    state_layers: int = 24
    attention_layers: int = 4
    mlp_layers: int = 28

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint: recurrent and convolution state of all state layers."""
        conv = 2 * _PUBLISHED_CONV_WIDTH * (2 * self.hidden_dim + 2 * self.state_dim)
        return self.state_layers * (2 * self.hidden_dim * self.state_dim + conv)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV in all attention layers, which have as many keys as queries."""
        return self.attention_layers * 4 * self.hidden_dim

    def flops_model(self) -> FlopsModel:
        """The published cost of a prefix: 4L²D, that is 8D for each of L(L+1)/2 pairs less 4LD."""
        dim, state_dim = self.hidden_dim, self.state_dim
        linear = (
            self.state_layers * (12 * dim**2 + 16 * dim * state_dim + 10 * dim)
            + self.attention_layers * (8 * dim**2 - 4 * dim)
            + self.mlp_layers * 16 * dim**2
        )
        return FlopsModel(float(linear), ((None, float(self.attention_layers * 8 * dim)),))

    def shape(self) -> ModelShape:
        """The model of these sizes, with the published bytes; its attention layers lie evenly.

        Its cost by real sizes differs as the head of this module says: causal pairs, time step and
        convolution.
        """
        dim = self.hidden_dim
        state = LayerKind(
            "mamba2",
            num_heads=2 * dim // _PUBLISHED_HEAD_DIM,
            head_dim=_PUBLISHED_HEAD_DIM,
            state_dim=self.state_dim,
            num_groups=1,
            conv_width=_PUBLISHED_CONV_WIDTH,
            mlp_matrices=2,
        )
        heads = dim // _PUBLISHED_HEAD_DIM
        attention = LayerKind(
            "attention", heads, _PUBLISHED_HEAD_DIM, num_kv_heads=heads, mlp_matrices=2
        )
        num_layers = self.state_layers + self.attention_layers
        counted = [i * self.attention_layers // num_layers for i in range(num_layers + 1)]
        mixers = [attention if a < b else state for a, b in pairwise(counted)]
        mixers += [LayerKind("none", 0, 0, mlp_matrices=2)] * (self.mlp_layers - num_layers)
        with_mlp = (replace(each, mlp_dim=4 * dim) for each in mixers[: self.mlp_layers])
        return ModelShape(
            hidden_dim=dim,
            vocab_size=0,  # the article counts no head
            layers=(*with_mlp, *mixers[self.mlp_layers :]),
            max_len=2**31 - 1,
            kv_itemsize=2,
            state_itemsize=2,
            token_bytes=self.kv_bytes_per_token,
            checkpoint_bytes=self.state_bytes,
        )


_PUBLISHED_CONV_WIDTH = 4
_PUBLISHED_HEAD_DIM = 64


def published_flops(shape: PublishedShape, num_tokens: int) -> int:
    """FLOPs of a whole prefix to the letter of the article, exact.

    >>> published_flops(PublishedShape(2, 1, state_layers=1, attention_layers=0, mlp_layers=0), 3)
    300
    """
    dim, state_dim = shape.hidden_dim, shape.state_dim
    state = 12 * num_tokens * dim**2 + 16 * num_tokens * dim * state_dim + 10 * num_tokens * dim
    attention = 8 * num_tokens * dim**2 + 4 * num_tokens**2 * dim
    mlp = 16 * num_tokens * dim**2
    return shape.state_layers * state + shape.attention_layers * attention + shape.mlp_layers * mlp
