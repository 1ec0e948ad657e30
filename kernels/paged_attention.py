"""Attention of new tokens to a history that lies in contiguous runs, read where it lies.

Every run gives a partial result: the attention to that run alone, and the log-sum-exp of its
scores. Two partial results merge exactly, weighted by `exp(lse)`. Where a token sees nothing of a
run its lse is the lowest finite number, which weighs as much as -inf and keeps merges from NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["segment_attention", "segment_attention_reference"]

# Attention to some of the tokens: out [1, Hkv, group * T, Dv], and the log-sum-exp of the scores,
# [1, Hkv, group * T]. A group's queries share a key head: they are as many more query tokens.
_Partial = tuple[Tensor, Tensor]

# The CPU kernel divides its work among threads by key head and blocks of this many queries.
_QUERY_BLOCK_LEN = 32

# A run is split over idle threads only into pieces at least this long.
_MIN_PIECE_LEN = 1024

# The plain form sees a run in pieces of this length: its scores are a real tensor.
_PLAIN_PIECE_LEN = 2048

_FLASH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def segment_attention_reference(
    q: Tensor,
    history: Sequence[tuple[Tensor, Tensor]],
    k_new: Tensor,
    v_new: Tensor,
    scale: float,
    *,
    window: int | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """One softmax over the concatenated history in float32. Shapes as in `segment_attention`."""
    num_heads, num_new, _ = q.shape
    group = num_heads // k_new.shape[0]
    keys = torch.cat([*(k.transpose(0, 1) for k, _ in history), k_new], dim=1).float()
    values = torch.cat([*(v.transpose(0, 1) for _, v in history), v_new], dim=1).float()
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = q.float() @ keys.transpose(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias.float()
    past_len = keys.shape[1] - num_new
    everything = torch.ones(num_new, keys.shape[1], dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(everything.triu(past_len + 1), float("-inf"))
    if window is not None:
        scores = scores.masked_fill(everything.tril(past_len - window), float("-inf"))
    if prefix is not None:
        k, v = (half.transpose(0, 1).float().repeat_interleave(group, 0) for half in prefix)
        before = q.float() @ k.transpose(1, 2) * scale
        if soft_cap is not None:
            before = soft_cap * torch.tanh(before / soft_cap)
        scores = torch.cat([before, scores], dim=-1)
        values = torch.cat([v, values], dim=1)
    if sinks is not None:
        column = sinks.float().reshape(num_heads, -1, 1).expand(-1, num_new, -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : values.shape[1]]
    return (weights @ values).transpose(0, 1).to(q.dtype)


def segment_attention(
    q: Tensor,
    history: Sequence[tuple[Tensor, Tensor]],
    k_new: Tensor,
    v_new: Tensor,
    *,
    scale: float,
    window: int | None = None,
    prefix: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of T new tokens to all of `history` and, causally, to each other.

    Args:
        q: queries `[Hq, T, D]`.
        history: runs (k, v) of earlier tokens, k `[n, Hkv, D]` and v `[n, Hkv, Dv]` with n >= 0
            and a contiguous last dimension; other strides are free. Read in place: memory taken
            by a call does not grow with n.
        k_new, v_new: keys `[Hkv, T, D]` and values `[Hkv, T, Dv]` of the new tokens; Hkv divides
            Hq.
        scale: factor on the scores.
        window: how many keys a token sees at most, its own and those right before it; at least 1.
            History that no new token sees is not read. None: a token sees all before it.
        prefix: one more run, in front of the history and no part of it: every token sees it
            whatever the window, and `bias` has no columns for it.
        sinks: logits without a value, `[Hq]` or `[Hq, T]`, that only join the denominator:
            `out = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j))`, which is the attention
            without a sink times `sigmoid(logsumexp(s) - sink)`.
        bias: added to the scaled scores, `[Hq, T, N + T]` with N the length of the whole history,
            whatever the window; the last column belongs to the last new token. May be -inf. What
            is given for pairs that causality or the window hides does not matter. Read in place
            if contiguous and in float32 or the dtype of q.
        soft_cap: bounds the scaled scores, before `bias`: `soft_cap * tanh(score / soft_cap)`, more
            than 0. PyTorch's CPU kernel has none, so capped attention takes the plain form. Sinks
            are not capped.

    Returns `[T, Hq, Dv]` in the dtype of q; zeros for a token that sees no key at all. Partial
    results merge in float32. Raises ValueError where an argument is not as above.

    >>> import torch
    >>> q, kv = torch.randn(4, 3, 8), torch.randn(2, 3, 8)
    >>> run = torch.randn(16, 2, 8)
    >>> segment_attention(q, [(run, run)], kv, kv, scale=8**-0.5).shape
    torch.Size([3, 4, 8])
    """
    num_heads, num_new, head_dim = q.shape
    num_kv_heads = k_new.shape[0]
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; it bounds scores and must be more than 0")
    flash = soft_cap is None and _flash_takes(q, v_new)
    attend_run = (
        _attend_run_flash if flash else functools.partial(_attend_run_plain, soft_cap=soft_cap)
    )
    queries = q.contiguous().view(1, num_kv_heads, -1, head_dim)
    sight = None
    if window is not None or bias is not None:
        sight = _sight(q, history, num_kv_heads, window, bias)
    merged = _attend_new(queries, k_new, v_new, scale, flash, sight, soft_cap)
    for k, v, mask in _visible_runs(history, sight):
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            raise ValueError(
                f"history strides are {k.stride()} and {v.stride()}; "
                "the last dimension must be contiguous"
            )
        for partial in attend_run(queries, k, v, scale, mask):
            merged = _merge(merged, partial)
    if prefix is not None and prefix[0].shape[0] > 0:
        for partial in attend_run(queries, *prefix, scale, None):
            merged = _merge(merged, partial)
    out, lse = merged
    if sinks is not None:
        out = out * torch.sigmoid(lse - _as_lse(sinks, q, lse))[..., None]
    out = out.view(num_kv_heads, num_heads // num_kv_heads, num_new, -1)
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


@dataclass(frozen=True, slots=True)
class _Sight:
    """Which keys the new tokens see and what is added to the scores, by position."""

    past_len: int
    num_new: int
    window: int | None
    bias: Tensor | None  # [Hkv, group, T, past_len + T]
    group: int
    like: Tensor  # masks are made on its device, for its dtype

    @property
    def first_seen(self) -> int:
        """The first position that any new token sees."""
        return 0 if self.window is None else max(0, self.past_len + 1 - self.window)

    @property
    def first_seen_by_all(self) -> int:
        """The first position that the last new token sees, and so all before it do."""
        total_len = self.past_len + self.num_new
        return 0 if self.window is None else max(0, total_len - self.window)

    def mask(self, start: int, stop: int) -> Tensor | None:
        """Addend to scores at these positions `[Hkv or 1, group or 1, T, stop - start]`.

        It is -inf where the key is hidden from the token. None if there is nothing to add.
        """
        bias = None if self.bias is None else self.bias[..., start:stop]
        if start >= self.first_seen_by_all and stop <= self.past_len + 1:
            return bias
        keys = torch.arange(start, stop, device=self.like.device)
        queries = torch.arange(self.num_new, device=self.like.device)[:, None] + self.past_len
        hidden = keys > queries
        if self.window is not None:
            hidden |= keys <= queries - self.window
        if bias is None:
            bias = self.like.new_zeros(1, 1, *hidden.shape, dtype=_merge_dtype(self.like))
        return bias.masked_fill(hidden, float("-inf"))

    def mask_of_new(self) -> Tensor | None:
        """The mask among the new tokens; None where causality is all there is to it."""
        if self.bias is None and self.first_seen_by_all <= self.past_len:
            return None
        return self.mask(self.past_len, self.past_len + self.num_new)

    def mask_of_run(self, start: int, stop: int) -> Tensor | None:
        """The mask `[1, Hkv or 1, group * T, stop - start]` of positions in the history."""
        mask = self.mask(start, stop)
        if mask is None:
            return None
        return mask.expand(-1, self.group, -1, -1).flatten(1, 2)[None]


def _sight(
    q: Tensor,
    history: Sequence[tuple[Tensor, Tensor]],
    num_kv_heads: int,
    window: int | None,
    bias: Tensor | None,
) -> _Sight:
    num_heads, num_new, _ = q.shape
    past_len, group = sum(k.shape[0] for k, _ in history), num_heads // num_kv_heads
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a token sees itself, so it must be 1 or more")
    if bias is not None:
        expected = (num_heads, num_new, past_len + num_new)
        if bias.shape != expected:
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}; give one column for every token of the "
                f"history and of the new ones, {expected}"
            )
        bias = bias.unflatten(0, (num_kv_heads, group))
    return _Sight(past_len, num_new, window, bias, group, q)


def _visible_runs(
    history: Sequence[tuple[Tensor, Tensor]], sight: _Sight | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Runs (k, v, mask) of one token or more, without what no new token sees.

    A run is cut where all begin to see it, so that only the part before needs a band mask.
    """
    if sight is None:
        for k, v in history:
            if k.shape[0] > 0:
                yield k, v, None
        return
    run_start = 0
    for k, v in history:
        run_stop = run_start + k.shape[0]
        cut = min(max(run_start, sight.first_seen_by_all), run_stop)
        for start, stop in ((max(run_start, sight.first_seen), cut), (cut, run_stop)):
            if start < stop:
                part = slice(start - run_start, stop - run_start)
                yield k[part], v[part], sight.mask_of_run(start, stop)
        run_start = run_stop


def _as_lse(sinks: Tensor, q: Tensor, lse: Tensor) -> Tensor:
    """Sinks `[Hq]` or `[Hq, T]` in the shape and dtype of lse, `[1, Hkv, group * T]`."""
    by_token = q.shape[:2]
    if sinks.shape not in (by_token, by_token[:1]):
        raise ValueError(
            f"sinks have shape {tuple(sinks.shape)}; give one per head, {tuple(by_token[:1])}, "
            f"or one per head and token, {tuple(by_token)}"
        )
    return sinks.to(lse.dtype).view(q.shape[0], -1).expand(by_token).reshape(lse.shape)


def _flash_takes(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype in _FLASH_DTYPES and v.shape[-1] == q.shape[-1]


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> _Partial:
    """PyTorch's CPU kernel on `[batch, heads, tokens, D]`, which takes strides as they are."""
    if mask is not None and mask.dtype not in (torch.float32, q.dtype):
        mask = mask.float()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    if mask is not None:
        # where all keys are hidden the kernel gives zeros, but a log-sum-exp of 0
        nothing_seen = mask.amax(-1) == float("-inf")
        lse = lse.masked_fill(nothing_seen, torch.finfo(lse.dtype).min)
    return out.float(), lse


def _attend_new(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    flash: bool,
    sight: _Sight | None,
    soft_cap: float | None,
) -> _Partial:
    """Causal attention among the new tokens: q `[1, Hkv, group * T, D]`, k and v `[Hkv, T, D]`."""
    num_kv_heads, num_new, _ = k.shape
    # Causality needs the tokens by themselves: key heads become the batch, the group the heads.
    by_group = q.view(num_kv_heads, -1, num_new, q.shape[-1])
    keys, values = k[:, None], v[:, None]
    mask = None if sight is None else sight.mask_of_new()
    if num_new == 1 and mask is None:
        dtype = _merge_dtype(q)
        out = values.to(dtype).repeat(1, by_group.shape[1], 1, 1)
        lse = _capped((by_group.to(dtype) * keys.to(dtype)).sum(-1).mul_(scale), soft_cap)
    elif flash:
        keys, values = (
            (t if t.stride(-1) == 1 else t.contiguous()).expand(-1, by_group.shape[1], -1, -1)
            for t in (keys, values)
        )
        # a mask hides later tokens too; the flag spares the kernel whole blocks of them
        out, lse = _flash(by_group, keys, values, scale, mask, causal=True)
    else:
        if mask is None:
            mask = q.new_full((num_new, num_new), float("-inf")).triu(1)
        out, lse = _plain(by_group, keys, values, scale, mask, soft_cap)
    return out.flatten(1, 2)[None], lse.flatten(1, 2)[None]


def _attend_run_flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> Iterator[_Partial]:
    """Attention of q `[1, Hkv, group * T, D]` to a run of k and v `[n, Hkv, D]`.

    `mask` `[1, Hkv or 1, group * T, n]` is added to the scores. With fewer key heads and query
    blocks than threads, equal pieces of the run enter as a batch.
    """
    run_len, num_kv_heads, head_dim = k.shape
    num_tasks = num_kv_heads * -(-q.shape[2] // _QUERY_BLOCK_LEN)
    num_pieces = min(torch.get_num_threads() // num_tasks, run_len // _MIN_PIECE_LEN)
    if num_pieces <= 1:
        yield _flash(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale, mask)
        return
    rest = run_len % num_pieces
    shape = (num_pieces, run_len // num_pieces, num_kv_heads, head_dim)
    keys, values = (t[: run_len - rest].view(shape).transpose(1, 2) for t in (k, v))
    masks, mask_of_rest = None, None
    if mask is not None:
        masks = mask[0, ..., : run_len - rest].unflatten(-1, shape[:2]).movedim(-2, 0)
        mask_of_rest = mask[..., run_len - rest :]
    out, lse = _flash(q.expand(num_pieces, -1, -1, -1), keys, values, scale, masks)
    yield from zip(out.split(1), lse.split(1), strict=True)
    if rest:
        yield from _attend_run_flash(q, k[-rest:], v[-rest:], scale, mask_of_rest)


def _attend_run_plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    soft_cap: float | None = None,
) -> Iterator[_Partial]:
    """As `_attend_run_flash`, for devices, dtypes and value widths without that kernel, and for
    capped scores."""
    for start in range(0, k.shape[0], _PLAIN_PIECE_LEN):
        piece = slice(start, start + _PLAIN_PIECE_LEN)
        keys, values = k[piece].transpose(0, 1), v[piece].transpose(0, 1)
        masked = None if mask is None else mask[..., piece]
        yield _plain(q, keys, values, scale, masked, soft_cap)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    soft_cap: float | None,
) -> _Partial:
    """q `[..., T, D]`, k and v `[..., n, D]` and `mask` `[..., T, n]` broadcast."""
    dtype = _merge_dtype(q)
    scores = torch.matmul(q.to(dtype), k.to(dtype).transpose(-1, -2)).mul_(scale)
    scores = _capped(scores, soft_cap)
    if mask is not None:
        scores.add_(mask)
    lse = scores.logsumexp(-1)
    if mask is not None:
        # where all keys are hidden: a finite number keeps the weights, and the merge, from NaN
        lse.clamp_(min=torch.finfo(dtype).min)
    return torch.matmul(scores.sub_(lse[..., None]).exp_(), v.to(dtype)), lse


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    """Scaled scores, bounded in place where there is a cap."""
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def _merge_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _merge(one: _Partial, other: _Partial) -> _Partial:
    (out, lse), (other_out, other_lse) = one, other
    # The share of the other, exp(other_lse) / (exp(lse) + exp(other_lse)), without overflow.
    share = torch.sigmoid(other_lse - lse)[..., None]
    return torch.lerp(out, other_out, share), torch.logaddexp(lse, other_lse)
