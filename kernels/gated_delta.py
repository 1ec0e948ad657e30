"""Gated delta rule: many tokens with states handed out at any position, or one token a row.

Per value head, with state `S` `[K, V]`, the recurrence over tokens `t` is

    S' = exp(decay_t) * S_{t-1}
    S_t = S' + beta_t * k_t (v_t - S'^T k_t)^T
    y_t = S_t^T q_t

`decay_t` is one number per head (Yang et al., "Gated Delta Networks", 2024) or one per key channel,
that is per row of `S` (Kimi Team, "Kimi Linear", 2025).

`gated_delta_reference` is that loop. `gated_delta` cuts the tokens into chunks. Inside a chunk the
corrections `v_t - S'^T k_t` depend on earlier ones through a triangular system, whose inverse is
built for many chunks at once; from chunk to chunk a few matrix products carry the state. A few
tokens alone are absorbed one by one.

What decays between two tokens is never a quotient of running products, which would overflow. A
chunk is halved again and again, and a pair of tokens meets where the halves of a block part them:
there its decay is what decays from the block's middle to the later token, times what decays from
the earlier token to the middle. All factors are at most one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "DeltaResult",
    "gated_delta",
    "gated_delta_reference",
    "gated_delta_update",
    "gated_delta_update_reference",
]

# Factors are cut here: e**-69 vanishes beside any float32 sum, but its products stay normal
# numbers. Arithmetic with denormals costs CPUs 20 to 100 times as much per element.
_MIN_LOG = -69.0
_MIN_FACTOR = 1e-30

# Chunks are prepared together, as many as have this many bytes of keys.
_SPAN_BYTES = 2 * 1024 * 1024

# So few tokens take less time one by one.
_FEW_TOKENS = 4

# Measured best on CPU. Work inside a chunk grows with it, passes over the state shrink with it.
_CHUNK_SIZE = 32


@dataclass(frozen=True, slots=True)
class DeltaResult:
    """What a scan returns: `y` `[B, T, H, V]` in the dtype of v; states `[B, H, K, V]` in float32.

    `states[i]` is the state after `state_positions[i]` tokens. No tensor shares memory with an
    argument or with another result.
    """

    y: Tensor
    final_state: Tensor
    states: tuple[Tensor, ...]


def gated_delta_update_reference(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The formula in float32; returns y and the new state, and leaves `state` as it is."""
    heads_per_key = v.shape[1] // k.shape[1]
    q32, k32 = (x.float().repeat_interleave(heads_per_key, dim=1) for x in (q, k))
    decayed = _per_channel(decay.float(), v).exp().unsqueeze(-1) * state
    correction = v.float() - (decayed * k32.unsqueeze(-1)).sum(-2)
    update = k32.unsqueeze(-1) * (beta.float().unsqueeze(-1) * correction).unsqueeze(-2)
    new_state = decayed + update
    return (new_state * q32.unsqueeze(-1)).sum(-2).to(v.dtype), new_state


def gated_delta_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token in float32. Shapes as in `gated_delta`; y and state."""
    batch, num_tokens, num_heads, value_dim = v.shape
    state = torch.zeros(batch, num_heads, k.shape[-1], value_dim, device=v.device)
    if initial_state is not None:
        state = state + initial_state
    ys = []
    for t in range(num_tokens):
        token = (x[:, t] for x in (q, k, v, decay, beta))
        y, state = gated_delta_update_reference(state, *token)
        ys.append(y)
    return torch.stack(ys, dim=1), state


@torch.no_grad()
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    chunk_size: int = _CHUNK_SIZE,
    state_positions: Sequence[int] = (),
) -> DeltaResult:
    """Scan T >= 1 tokens and return outputs, final state and the states at `state_positions`.

    Args:
        q, k: queries and keys `[B, T, G, K]`, normalised and scaled as the model wants them; G
            divides H. Strides are free here and below.
        v: values `[B, T, H, V]`.
        decay: logarithms of the decay, at most 0: `[B, T, H]`, or `[B, T, H, K]` per key channel.
        beta: how much of a correction is written `[B, T, H]`.
        initial_state: `[B, H, K, V]`, read only; None means zeros.
        chunk_size: tokens per chunk.
        state_positions: counts of absorbed tokens in `0..T`, ascending, at which to return states.

    Computes in float32, without gradients.

    >>> import torch
    >>> q, v = torch.randn(1, 100, 2, 8), torch.randn(1, 100, 4, 16)
    >>> k = torch.nn.functional.normalize(torch.randn(1, 100, 2, 8), dim=-1)
    >>> decay, beta = torch.full((1, 100, 4), -0.1), torch.full((1, 100, 4), 0.5)
    >>> result = gated_delta(q, k, v, decay, beta, state_positions=[70])
    >>> result.states[0].shape
    torch.Size([1, 4, 8, 16])
    """
    batch, num_tokens, num_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    _check_shapes(q, k, v, decay, beta, initial_state)
    _check_run(num_tokens, chunk_size, state_positions)
    y = torch.empty(batch, num_tokens, num_heads, value_dim, device=v.device)
    state = torch.empty(batch, num_heads, key_dim, value_dim, device=v.device)
    if initial_state is None:
        state.zero_()
    else:
        state.copy_(initial_state)
    states = tuple(torch.empty_like(state) for _ in state_positions)
    factors = _factors(decay, v)
    for b in range(batch):
        captures = [(p, s[b]) for p, s in zip(state_positions, states, strict=True)]
        tokens = _Tokens(q[b], k[b], v[b], factors[b], beta[b], y[b])
        tokens.scan(chunk_size, state[b], captures)
    return DeltaResult(y.to(v.dtype), state, states)


@torch.no_grad()
def gated_delta_update(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """Absorb one token per row into `state`, in place, and return y `[R, H, V]` in v's dtype.

    The decode step of `gated_delta`, and the same formula.

    Args:
        state: `[R, H, K, V]` float32, changed in place. Rows may lie any distance apart; a row
            itself is contiguous.
        q, k: queries and keys `[R, G, K]`; G divides H.
        v: values `[R, H, V]`.
        decay: logarithms of the decay `[R, H]` or `[R, H, K]`.
        beta: how much of the correction is written `[R, H]`.

    Computes in float32, without gradients. Key and query read the old state together, each already
    with the decay, so that there are three passes over the state: read, decay, add.

    >>> import torch
    >>> state, one = torch.zeros(1, 1, 4, 8), torch.ones(1, 1)
    >>> key, value = torch.eye(4)[1].view(1, 1, 4), torch.ones(1, 1, 8)
    >>> y = gated_delta_update(state, key, key, value, -one, one)
    >>> y[0, 0, 0].item(), state[0, 0, :, 0].tolist()
    (1.0, [0.0, 1.0, 0.0, 0.0])
    """
    _check_shapes(q, k, v, decay, beta, state)
    return _absorb(state, q, k, v, _factors(decay, v), beta).to(v.dtype)


def _absorb(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, factors: Tensor, beta: Tensor
) -> Tensor:
    """`gated_delta_update` with factors `[R, H, 1 or K]` of decay; returns y in float32."""
    readers = torch.stack([k, q], dim=2).float()
    if k.shape[1] != v.shape[1]:
        readers = readers.repeat_interleave(v.shape[1] // k.shape[1], dim=1)
    decayed = readers * factors.unsqueeze(2)
    if state.is_contiguous():
        found = torch.matmul(decayed, state)
    else:
        # One row at a time: its heads are then a batch of matrices that is read in place.
        rows = zip(decayed, state, strict=True)
        found = torch.stack([torch.bmm(reader, row) for reader, row in rows])
    k32, q32 = readers.unbind(2)
    update = (v - found[:, :, 0]).mul_(beta.unsqueeze(-1))
    overlap: Tensor = torch.linalg.vecdot(q32, k32)
    state.mul_(factors.unsqueeze(-1)).addcmul_(k32.unsqueeze(-1), update.unsqueeze(-2))
    return found[:, :, 1].addcmul(update, overlap.unsqueeze(-1))


def _factors(decay: Tensor, v: Tensor) -> Tensor:
    """What is left after a decay: `[..., H, 1 or K]` in float32, contiguous."""
    return _per_channel(decay.float(), v).clamp(min=_MIN_LOG).exp_()


def _per_channel(decay: Tensor, v: Tensor) -> Tensor:
    """Decay `[..., H, 1]` if it is one number per head, or `[..., H, K]`."""
    return decay if decay.dim() == v.dim() else decay.unsqueeze(-1)


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None
) -> None:
    """Refuse shapes that would broadcast: each must be what those of k and v make it."""
    *lead, num_heads, value_dim = v.shape
    num_groups, key_dim = k.shape[-2:]
    if num_heads % num_groups:
        raise ValueError(f"{num_heads} heads do not divide into {num_groups} groups of keys")
    per_key, per_head = (*lead, num_groups, key_dim), (*lead, num_heads)
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "q": (q, per_key),
        "k": (k, per_key),
        "decay": (decay, (*per_head, key_dim) if decay.dim() == v.dim() else per_head),
        "beta": (beta, per_head),
        "state": (state, (lead[0], num_heads, key_dim, value_dim)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; values of shape {tuple(v.shape)} and "
                f"keys of shape {tuple(k.shape)} take {shape}"
            )


def _check_run(num_tokens: int, chunk_size: int, state_positions: Sequence[int]) -> None:
    if num_tokens < 1:
        raise ValueError("gated_delta got 0 tokens; pass at least 1")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
    previous = 0
    for position in state_positions:
        if not previous <= position <= num_tokens:
            raise ValueError(
                f"state position {position} is out of order or outside 0..{num_tokens}; "
                "pass ascending counts of absorbed tokens"
            )
        previous = position


Captures = list[tuple[int, Tensor]]
"""Counts of absorbed tokens, with where the state `[H, K, V]` after them belongs."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """One sequence: q, k `[T, G, K]`, v, y `[T, H, V]`, factors `[T, H, 1 or K]`, beta `[T, H]`.

    y is filled; factors are the exponentials of the decay.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    factors: Tensor
    beta: Tensor
    y: Tensor

    def scan(self, chunk_size: int, state: Tensor, captures: Captures) -> None:
        """Move `state` `[H, K, V]` over all tokens, and fill `captures` on the way."""
        for position, capture in captures:
            if position == 0:
                capture.copy_(state)
        token_bytes = 4 * self.v.shape[1] * self.k.shape[2]
        chunks_per_span = max(1, _SPAN_BYTES // (chunk_size * token_bytes))
        for start, stop, chunk_len in _spans(len(self.v), chunk_size, chunks_per_span):
            inside = [(p - start, capture) for p, capture in captures if start < p <= stop]
            if chunk_len <= _FEW_TOKENS:
                self._step(slice(start, stop), state, inside)
                continue
            y = _Span.of(self, slice(start, stop), chunk_len).carry(state, inside)
            self.y[start:stop].unflatten(0, (-1, chunk_len)).copy_(y.permute(1, 2, 0, 3))

    def _step(self, at: slice, state: Tensor, captures: Captures) -> None:
        """Move `state` over some tokens one by one; captures count from the first of them."""
        inputs = (self.q, self.k, self.v, self.factors, self.beta)
        tokens = zip(*(x[at].unsqueeze(1) for x in inputs), strict=True)
        for i, (token, y) in enumerate(zip(tokens, self.y[at], strict=True), start=1):
            y.copy_(_absorb(state.unsqueeze(0), *token)[0])
            for position, capture in captures:
                if position == i:
                    capture.copy_(state)


def _spans(
    num_tokens: int, chunk_size: int, chunks_per_span: int
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, chunk length) of runs of equal chunks: no chunk is ever padded."""
    whole = num_tokens - num_tokens % chunk_size
    span_len = chunks_per_span * chunk_size
    for start in range(0, whole, span_len):
        yield start, min(start + span_len, whole), chunk_size
    if whole < num_tokens:
        yield whole, num_tokens, num_tokens - whole


@dataclass(frozen=True, slots=True)
class _Span:
    """Some chunks (c) of L tokens, prepared for a state to be carried through.

    k `[G, c, L, K]`, v `[H, c, L, V]`, factors `[H, c, L, D]` with D = 1 or K. readers
    `[H, c, 2 * L, K]`: keys, then queries, that read the state a chunk begins with. writers
    `[H, c, L, K]`: keys as far as they are left at the chunk's end. kept `[H, c, D, 1]`: what is
    left of the state there. solver `[H, c, L, L]`: takes what each token finds missing in the
    first state to what it writes. scores `[H, c, L, L]`: what each token reads of what was written.
    """

    k: Tensor
    v: Tensor
    factors: Tensor
    readers: Tensor
    writers: Tensor
    kept: Tensor
    solver: Tensor
    scores: Tensor

    @staticmethod
    def of(tokens: _Tokens, at: slice, chunk_len: int) -> _Span:
        q, k, v, factors, beta = (
            _by_head(x[at], chunk_len)
            for x in (tokens.q, tokens.k, tokens.v, tokens.factors, tokens.beta.unsqueeze(-1))
        )
        weigh = _scores_by_head if factors.shape[-1] == 1 else _scores_by_channel
        decays, scores, overlaps = weigh(q, k, factors)
        from_start, to_end = (
            x.unflatten(0, (len(k), -1)) for x in (decays.from_start, decays.to_end)
        )
        grouped_q, grouped_k = q.unsqueeze(1), k.unsqueeze(1)
        readers = torch.empty(*v.shape[:2], 2 * chunk_len, k.shape[3], device=k.device)
        by_group = readers.unflatten(0, (len(k), -1))
        torch.mul(grouped_k, from_start, out=by_group[..., :chunk_len, :])
        torch.mul(grouped_q, from_start, out=by_group[..., chunk_len:, :])
        one = torch.eye(chunk_len, device=k.device).expand_as(overlaps)
        solver = torch.linalg.solve_triangular(
            overlaps.mul_(beta), one, upper=False, unitriangular=True
        )
        return _Span(
            k,
            v,
            factors,
            readers,
            (grouped_k * to_end).flatten(0, 1),
            decays.from_start[:, :, -1].unsqueeze(-1),
            solver * beta.transpose(2, 3),
            scores,
        )

    def carry(self, state: Tensor, captures: Captures) -> Tensor:
        """Move `state` over the chunks; returns outputs `[H, c, L, V]`.

        captures count from the span's first token.
        """
        num_heads, num_chunks, chunk_len, value_dim = self.v.shape
        read, written = torch.empty(
            2, num_chunks, num_heads, chunk_len, value_dim, device=state.device
        )
        for i in range(num_chunks):
            found = torch.bmm(self.readers[:, i], state)
            missing = self.v[:, i] - found[:, :chunk_len]
            torch.bmm(self.solver[:, i], missing, out=written[i])
            read[i] = found[:, chunk_len:]
            first = i * chunk_len
            for position, capture in captures:
                if first < position < first + chunk_len:
                    self._capture(i, position - first, state, written[i], capture)
            state.mul_(self.kept[:, i]).baddbmm_(self.writers[:, i].transpose(1, 2), written[i])
            for position, capture in captures:
                if position == first + chunk_len:
                    capture.copy_(state)
        inside = torch.matmul(self.scores, written.transpose(0, 1))
        return inside.add_(read.transpose(0, 1))

    def _capture(self, i: int, length: int, state: Tensor, written: Tensor, out: Tensor) -> None:
        """The state after `length` tokens of chunk i, which begins with `state`."""
        factors = self.factors[:, i, :length]
        later = F.pad(factors[:, 1:].flip(1), (0, 0, 1, 0), value=1.0)
        to_there = later.cumprod(1).flip(1).clamp_(min=_MIN_FACTOR)
        kept = (factors[:, :1] * to_there[:, :1]).clamp_(min=_MIN_FACTOR)
        keys = self.k[:, i, :length].repeat_interleave(len(self.v) // len(self.k), dim=0)
        torch.mul(state, kept.transpose(1, 2), out=out)
        out.baddbmm_((keys * to_there).transpose(1, 2), written[:, :length])


def _by_head(x: Tensor, chunk_len: int) -> Tensor:
    """`[T, H, ...]` as contiguous `[H, c, L, ...]` in float32."""
    chunks = x.unflatten(0, (-1, chunk_len)).permute(2, 0, 1, 3)
    return torch.empty(chunks.shape, device=x.device).copy_(chunks)


@dataclass(frozen=True, slots=True)
class _Decays:
    """What decays within blocks of tokens, `[H, c, L, D]` each, for blocks that are being doubled.

    from_start: from a block's start over a token. to_end: from after a token to its block's end.
    """

    from_start: Tensor
    to_end: Tensor

    def doublings(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Join blocks pairwise until one is left; L is a power of two.

        Yields their length, and before each join `from_start` of the later and `to_end` of the
        earlier blocks, `[H, c, L / 2 / length, length, D]`.
        """
        length = 1
        while length < self.from_start.shape[2]:
            starts, ends = (x.unflatten(2, (-1, 2, length)) for x in (self.from_start, self.to_end))
            (earlier, later), to_middle = starts.unbind(3), ends[:, :, :, 0]
            yield length, later, to_middle
            to_middle.mul_(later[..., -1:, :]).clamp_(min=_MIN_FACTOR)
            later.mul_(earlier[..., -1:, :]).clamp_(min=_MIN_FACTOR)
            length *= 2

    @staticmethod
    def of(factors: Tensor) -> _Decays:
        """Blocks of one token each, padded to a power of two with tokens that change nothing."""
        padding = (1 << (factors.shape[2] - 1).bit_length()) - factors.shape[2]
        from_start = F.pad(factors, (0, 0, 0, padding), value=1.0)
        if not padding:
            from_start = from_start.clone()
        return _Decays(from_start, torch.ones_like(from_start))

    def cut(self, length: int) -> _Decays:
        """Without the padding."""
        return _Decays(self.from_start[:, :, :length], self.to_end[:, :, :length])


def _scores_by_head(q: Tensor, k: Tensor, factors: Tensor) -> tuple[_Decays, Tensor, Tensor]:
    """Decays over the chunk; what each token reads of each before it, `[H, c, L, L]`, by query and
    by key. Of those by key only what is below the diagonal has a meaning."""
    num_groups, chunk_len = len(k), k.shape[2]
    decays = _Decays.of(factors)
    padded_len = decays.from_start.shape[2]
    between = torch.eye(padded_len, device=k.device).repeat(*factors.shape[:2], 1, 1)
    for length, later, to_middle in decays.doublings():
        torch.mul(later, to_middle.transpose(3, 4), out=_lower_blocks(between, length))
    by_group = between[..., :chunk_len, :chunk_len].unflatten(0, (num_groups, -1))
    keys = k.transpose(2, 3)
    scores, overlaps = (
        (by_group * torch.matmul(x, keys).unsqueeze(1)).flatten(0, 1) for x in (q, k)
    )
    return decays.cut(chunk_len), scores, overlaps


def _scores_by_channel(q: Tensor, k: Tensor, factors: Tensor) -> tuple[_Decays, Tensor, Tensor]:
    """As `_scores_by_head`, where decay stands inside the product of each pair."""
    chunk_len, heads_per_key = k.shape[2], len(factors) // len(k)
    decays = _Decays.of(factors)
    padded_len = decays.from_start.shape[2]
    q, k = (
        F.pad(x, (0, 0, 0, padded_len - chunk_len)).repeat_interleave(heads_per_key, 0)
        for x in (q, k)
    )
    scores, overlaps = torch.zeros(2, *k.shape[:2], padded_len, padded_len, device=k.device)
    scores.diagonal(dim1=2, dim2=3).copy_(torch.linalg.vecdot(q, k))
    for length, later, to_middle in decays.doublings():
        queries, keys = (x.unflatten(2, (-1, 2, length)) for x in (q, k))
        left = torch.cat([queries[:, :, :, 1] * later, keys[:, :, :, 1] * later], dim=3)
        products = torch.matmul(left, (keys[:, :, :, 0] * to_middle).transpose(3, 4))
        _lower_blocks(scores, length).copy_(products[..., :length, :])
        _lower_blocks(overlaps, length).copy_(products[..., length:, :])
    scores, overlaps = (x[..., :chunk_len, :chunk_len].contiguous() for x in (scores, overlaps))
    return decays.cut(chunk_len), scores, overlaps


def _lower_blocks(table: Tensor, length: int) -> Tensor:
    """Where later blocks meet the earlier ones they are joined with, in a table `[..., L, L]` of
    all pairs of tokens: a view `[..., L / 2 / length, length, length]`."""
    pairs = table.unflatten(3, (-1, 2 * length)).unflatten(2, (-1, 2 * length))
    joined: Tensor = pairs.diagonal(dim1=2, dim2=4).movedim(-1, 2)
    return joined[..., length:, :length]
