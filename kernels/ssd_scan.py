"""Mamba-2 state-space scan over many tokens (SSD), with states handed out at any position.

Per head, with state `S` `[P, N]`, the recurrence over tokens `t` is

    S_t = exp(dt_t * A) * S_{t-1} + dt_t * x_t B_t^T
    y_t = S_t C_t + D * x_t

`ssd_scan_reference` is that loop. `ssd_scan` cuts the tokens into chunks: inside a chunk the
outputs are a masked matrix product with decay weights, between chunks the state is carried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["ScanResult", "ssd_scan", "ssd_scan_reference"]

_LOG2_E = math.log2(math.e)

# Exponents are cut here: 2**-100 vanishes beside any float32 sum, but its products stay normal
# numbers. Denormals and exp's underflow path cost CPUs 20 to 100 times as much per element.
_MIN_LOG2 = -100.0

# Decay weights of several chunks are built at once, as many as fill about half of an L2 cache.
_WEIGHTS_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What a scan returns: `y` `[B, T, H, P]` in the dtype of x; states `[B, H, P, N]` in float32.

    `states[i]` is the state after `state_positions[i]` tokens. No tensor shares memory with an
    argument or with another result.
    """

    y: Tensor
    final_state: Tensor
    states: tuple[Tensor, ...]


def ssd_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token in float32. Shapes as in `ssd_scan`; returns y and state."""
    batch, num_tokens, num_heads, head_dim = x.shape
    heads_per_group = num_heads // B.shape[2]
    x32, dt32 = x.float(), dt.float()
    B32 = B.float().repeat_interleave(heads_per_group, dim=2)
    C32 = C.float().repeat_interleave(heads_per_group, dim=2)
    state = x32.new_zeros(batch, num_heads, head_dim, B.shape[3])
    if initial_state is not None:
        state = state + initial_state
    ys = []
    for t in range(num_tokens):
        decay = torch.exp(dt32[:, t] * A.float())
        update = (dt32[:, t, :, None] * x32[:, t])[..., None] * B32[:, t, :, None, :]
        state = decay[..., None, None] * state + update
        ys.append((state * C32[:, t, :, None, :]).sum(-1))
    y = torch.stack(ys, dim=1)
    if D is not None:
        y = y + D.float()[:, None] * x32
    return y.to(x.dtype), state


@torch.no_grad()
def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 32,
    state_positions: Sequence[int] = (),
) -> ScanResult:
    """Scan T >= 1 tokens and return outputs, final state and the states at `state_positions`.

    Args:
        x: inputs `[B, T, H, P]`; strides are free here and below.
        dt: step sizes `[B, T, H]`, bias, softplus and clamp already applied.
        A: decay rates `[H]`, negative.
        B, C: input and output projections `[B, T, G, N]`; G divides H.
        D: skip weights `[H]`, or None for none.
        initial_state: `[B, H, P, N]`, read only; None means zeros.
        chunk_size: tokens per chunk. 32 measured best on CPU: work inside a chunk grows with it,
            passes over the state shrink with it.
        state_positions: counts of absorbed tokens in `0..T`, ascending, at which to return states.

    Computes in float32 (decay sums in float64), without gradients.

    >>> import torch
    >>> x, dt = torch.randn(1, 100, 2, 8), torch.full((1, 100, 2), 0.1)
    >>> bc = torch.randn(1, 100, 1, 16)
    >>> result = ssd_scan(x, dt, torch.tensor([-1.0, -2.0]), bc, bc, state_positions=[70])
    >>> result.states[0].shape
    torch.Size([1, 2, 8, 16])
    """
    batch, num_tokens, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    _check(num_tokens, num_heads, num_groups, chunk_size, state_positions)
    x32, dt32, B32, C32 = x.float(), dt.float(), B.float(), C.float()
    log2_rate = A.double() * _LOG2_E
    skip = None if D is None else D.float()
    y = torch.empty(batch, num_tokens, num_heads, head_dim, device=x.device)
    if initial_state is None:
        state = y.new_zeros(batch, num_heads, head_dim, state_dim)
    else:
        state = torch.empty(batch, num_heads, head_dim, state_dim, device=x.device)
        state.copy_(initial_state)
    states = tuple(torch.empty_like(state) for _ in state_positions)

    # One sequence and one group at a time: every operand is then a view of the caller's tensors
    # that matrix products read in place. Passes over many tokens mostly have one sequence.
    heads_per_group = num_heads // num_groups
    for b in range(batch):
        for g in range(num_groups):
            heads = slice(g * heads_per_group, (g + 1) * heads_per_group)
            part = _Part(
                x32[b, :, heads],
                dt32[b, :, heads],
                log2_rate[heads],
                B32[b, :, g],
                C32[b, :, g],
                None if skip is None else skip[heads],
                y[b, :, heads],
                state[b, heads],
                [(p, s[b, heads]) for p, s in zip(state_positions, states, strict=True)],
            )
            part.run(chunk_size)
    return ScanResult(y.to(x.dtype), state, states)


def _check(
    num_tokens: int,
    num_heads: int,
    num_groups: int,
    chunk_size: int,
    state_positions: Sequence[int],
) -> None:
    if num_tokens < 1:
        raise ValueError("ssd_scan got 0 tokens; pass at least 1")
    if num_heads % num_groups:
        raise ValueError(f"{num_heads} heads do not divide into {num_groups} groups")
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


def _spans(num_tokens: int, chunk_size: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, chunk length) of runs of equal chunks: no chunk is ever padded.

    A few chunks and a rest are taken as one chunk: that costs less than a second round of calls.
    """
    rest = num_tokens % chunk_size
    if rest and num_tokens < 4 * chunk_size:
        yield 0, num_tokens, num_tokens
        return
    yield 0, num_tokens - rest, chunk_size
    if rest:
        yield num_tokens - rest, num_tokens, rest


@dataclass(frozen=True, slots=True)
class _Part:
    """The heads of one group in one sequence: read `x`..`D`, fill `y` and `captures`, step `state`.

    x, y `[T, H, P]`, dt `[T, H]`, log2_rate `[H]` float64, B, C `[T, N]`, D `[H]`,
    state `[H, P, N]`; captures pair a count of absorbed tokens with its destination `[H, P, N]`.
    """

    x: Tensor
    dt: Tensor
    log2_rate: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    y: Tensor
    state: Tensor
    captures: list[tuple[int, Tensor]]

    def run(self, chunk_size: int) -> None:
        self._capture_at(0)
        for start, stop, chunk_len in _spans(self.x.shape[0], chunk_size):
            self._scan_chunks(start, stop, chunk_len)

    def _scan_chunks(self, start: int, stop: int, chunk_len: int) -> None:
        """Scan tokens start..stop, whole chunks of `chunk_len`."""
        tokens = slice(start, stop)
        num_chunks, num_heads, head_dim = (stop - start) // chunk_len, *self.x.shape[1:]
        by_head = (num_chunks, chunk_len, num_heads, head_dim)
        x, y = self.x[tokens].view(by_head), self.y[tokens].view(by_head)
        B, C = (t[tokens].view(num_chunks, chunk_len, -1) for t in (self.B, self.C))
        decays = _Decays.of(self.dt[tokens].view(*by_head[:3], 1), self.log2_rate)
        span_len = max(1, min(num_chunks, _WEIGHTS_BYTES // (4 * num_heads * chunk_len**2)))
        scratch = _Scratch.allocate(span_len, *by_head[1:], x.device)
        flat_y = y.view(num_chunks, chunk_len, -1)
        flat_state = self.state.view(num_heads * head_dim, -1)
        for first in range(0, num_chunks, span_len):
            span = slice(first, min(first + span_len, num_chunks))
            inside = scratch.outputs_inside(span, x, B, C, decays)
            inputs = scratch.state_inputs(span, x, decays)
            for i in range(span.start, span.stop):
                torch.mm(C[i], flat_state.t(), out=flat_y[i])
                token = start + i * chunk_len
                self._capture_inside(token, token + chunk_len, decays.log2_sums[i])
                self.state.mul_(decays.chunk[i])
                flat_state.addmm_(inputs[i - first], B[i])
                self._capture_at(token + chunk_len)
            out = y[span].mul_(decays.from_start[span]).addcmul_(inside, decays.rest[span])
            if self.D is not None:
                out.addcmul_(x[span], self.D[:, None])

    def _capture_at(self, position: int) -> None:
        """Fill the captures at `position`, which `state` stands at."""
        for capture_position, capture in self.captures:
            if capture_position == position:
                capture.copy_(self.state)

    def _capture_inside(self, start: int, stop: int, log2_sums: Tensor) -> None:
        """Fill captures strictly inside the chunk start..stop, whose first state is `state`."""
        for position, capture in self.captures:
            if not start < position < stop:
                continue
            tokens = slice(start, position)
            total = log2_sums[position - start - 1]
            to_end = (total - log2_sums[: position - start]).clamp_(_MIN_LOG2).exp2_().float()
            inputs = self.x[tokens] * (to_end * self.dt[tokens, :, None])
            carried = total.clamp(_MIN_LOG2).exp2_().float()
            torch.mul(self.state, carried[..., None], out=capture)
            capture.flatten(0, 1).addmm_(inputs.flatten(1).t(), self.B[tokens])


@dataclass(frozen=True, slots=True)
class _Decays:
    """Decay factors of all chunks (c) and their tokens (L), made from running sums of log2 decay.

    A float32 sum that has grown large no longer resolves a small difference, as between tokens
    with slow decay that follow one with fast decay. So sums are float64, `log2_sums`, and where
    a table of pairwise differences needs float32 they are split in two float32 parts: `head`
    enters the table, and the small rest is a factor on each side of it.
    Every field is `[c, L, H, 1]` but where noted.
    """

    log2_sums: Tensor
    head: Tensor  # [c, H, L, 1]
    from_start: Tensor  # on what the chunk's first state gives to a token
    rest: Tensor  # the rest's factor on the receiving token
    source: Tensor  # dt and the rest's factor on the giving token
    to_end: Tensor  # dt and decay from a token to the chunk's end
    chunk: Tensor  # [c, H, 1, 1]: over the whole chunk

    @staticmethod
    def of(dt: Tensor, log2_rate: Tensor) -> _Decays:
        """From dt `[c, L, H, 1]` and log2_rate `[H]`."""
        sums = torch.cumsum(dt * log2_rate[:, None], dim=1)
        factors = torch.empty(4, *dt.shape, device=dt.device)
        source, to_end, rest, from_start = factors.unbind()
        from_start.copy_(sums)
        head = from_start.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        torch.sub(sums, from_start, out=rest)
        torch.neg(rest, out=source)
        torch.sub(sums[:, -1:], sums, out=to_end)
        factors.clamp_(min=_MIN_LOG2).exp2_()
        factors[:2].mul_(dt)
        return _Decays(sums, head, from_start, rest, source, to_end, from_start[:, -1, :, None])


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Buffers for a span of chunks, reused by the spans of a scan so that they stay in cache."""

    weights: Tensor  # [s, H, L, L]
    sources: Tensor  # [s, H, L, P]
    inside: Tensor  # [s, H, L, P]
    inputs: Tensor  # [s, L, H, P]

    @staticmethod
    def allocate(
        span_len: int, chunk_len: int, num_heads: int, head_dim: int, device: torch.device
    ) -> _Scratch:
        by_head = (span_len, num_heads, chunk_len, head_dim)
        return _Scratch(
            torch.empty(span_len, num_heads, chunk_len, chunk_len, device=device),
            torch.empty(by_head, device=device),
            torch.empty(by_head, device=device),
            torch.empty(span_len, chunk_len, num_heads, head_dim, device=device),
        )

    def outputs_inside(
        self, span: slice, x: Tensor, B: Tensor, C: Tensor, decays: _Decays
    ) -> Tensor:
        """What the tokens of each chunk give to each other, `[s, L, H, P]`, a view of scratch."""
        num = span.stop - span.start
        scores = torch.bmm(C[span], B[span].transpose(1, 2)).tril_()
        head = decays.head[span]
        weights = torch.sub(head, head.transpose(2, 3), out=self.weights[:num])
        # Pairs above the diagonal are positive: cut before exp2, so that none overflows.
        weights.clamp_(_MIN_LOG2, 0).exp2_().mul_(scores[:, None])
        sources, inside = self.sources[:num], self.inside[:num]
        torch.mul(x[span].transpose(1, 2), decays.source[span].transpose(1, 2), out=sources)
        torch.bmm(weights.flatten(0, 1), sources.flatten(0, 1), out=inside.flatten(0, 1))
        return inside.transpose(1, 2)

    def state_inputs(self, span: slice, x: Tensor, decays: _Decays) -> Tensor:
        """What each chunk's tokens add to the state, before the product with B: `[s, H*P, L]`."""
        inputs = self.inputs[: span.stop - span.start]
        torch.mul(x[span], decays.to_end[span], out=inputs)
        return inputs.flatten(2).transpose(1, 2)
