"""FLOPs and bytes of a prefix, from the sizes of a model: what a hit saves and what it holds.

A multiply-add counts as 2. Only work that differs between models is counted: matrix products, the
attention over the history, the convolution and the recurrence of a state layer. Norms, residuals,
rotations and softmax are left out.

The formulas are those published with Marconi (Pan et al., MLSys 2025), where L tokens of width D
with state size N cost 8LD² + 4L²D in an attention layer, 12LD² + 16LDN + 10LD in a state layer and
16LD² in an MLP, put into a layer's real sizes. Three differences remain, each of them deliberate:

- attention: a token looks at itself and at what precedes it, so L tokens make L(L+1)/2 pairs. The
  published 4L²D counts the masked half too. Causal counting is what makes the cost of a prefix and
  of its remainder add up to the cost of the whole.
- state layer: its terms agree for inner width 2D and one group; the projection of the time step and
  the convolution, which the published sum leaves out, are added.
- MLP: three matrices (gated) of any width; the published figure is two of width 4D, which a gated
  one of width 8D/3 equals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentcache.types import LayerKind, ModelShape

__all__ = [
    "attention_flops",
    "checkpoint_bytes",
    "kv_bytes",
    "mamba2_flops",
    "mlp_flops",
    "prefill_flops",
]


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
        if layer.mixer == "attention":
            total += attention_flops(layer, shape.hidden_dim, start, stop)
        elif layer.mixer != "none":
            total += mamba2_flops(layer, shape.hidden_dim, num_tokens)
        total += mlp_flops(layer, shape.hidden_dim, num_tokens)
    return total


def attention_flops(layer: LayerKind, hidden_dim: int, start: int, stop: int) -> int:
    """FLOPs of one attention mixer over tokens [start, stop) after `start` cached ones.

    Projections of queries, keys, values and output; then, for each token, scores and weighted
    values over itself and everything before it.
    """
    query_dim = layer.num_heads * layer.head_dim
    kv_dim = layer.num_kv_heads * layer.head_dim
    projections = 2 * hidden_dim * (2 * query_dim + 2 * kv_dim) * (stop - start)
    num_pairs = (stop * (stop + 1) - start * (start + 1)) // 2
    return projections + 4 * query_dim * num_pairs


def mamba2_flops(layer: LayerKind, hidden_dim: int, num_tokens: int) -> int:
    """FLOPs of one Mamba-2 mixer over `num_tokens` tokens, whatever their position.

    Other recurrences are counted by it too: they project, convolve and update states of the same
    sizes, with other small factors.

    The recurrence is counted in its plain form: per state element one multiply-add each for the
    decay, the outer product that comes in and the output. A chunked scan does more arithmetic for
    the same result.
    """
    inner = layer.num_heads * layer.head_dim
    conv_dim = inner + 2 * layer.num_groups * layer.state_dim
    in_projection = 2 * hidden_dim * (inner + conv_dim + layer.num_heads)
    out_projection = 2 * inner * hidden_dim
    convolution = 2 * layer.conv_width * conv_dim
    recurrence = 6 * inner * layer.state_dim
    elementwise = 5 * inner  # skip (2), two activations, gate
    per_token = in_projection + out_projection + convolution + recurrence + elementwise
    return per_token * num_tokens


def mlp_flops(layer: LayerKind, hidden_dim: int, num_tokens: int) -> int:
    """FLOPs of the gated MLP after one mixer: gate, up and down projection."""
    return 6 * hidden_dim * layer.mlp_dim * num_tokens


def checkpoint_bytes(shape: ModelShape) -> int:
    """Bytes of one checkpoint: the states of all state layers at one position."""
    return shape.state_bytes


def kv_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Bytes of the KV that `num_tokens` tokens leave in all attention layers."""
    return shape.kv_bytes_per_token * num_tokens
