"""Attention of new tokens to a history that lies in contiguous runs, read where it lies.

Every run gives a partial result: the attention to that run alone, and the log-sum-exp of its
scores. Two partial results merge exactly, weighted by `exp(lse)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["segment_attention", "segment_attention_reference"]

# Attention to some of the tokens: out [1, Hkv, group * T, D], and the log-sum-exp of the scores,
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
) -> Tensor:
    """One softmax over the concatenated history in float32. Shapes as in `segment_attention`."""
    num_heads, num_new, _ = q.shape
    group = num_heads // k_new.shape[0]
    keys = torch.cat([*(k.transpose(0, 1) for k, _ in history), k_new], dim=1).float()
    values = torch.cat([*(v.transpose(0, 1) for _, v in history), v_new], dim=1).float()
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = q.float() @ keys.transpose(1, 2) * scale
    past_len = keys.shape[1] - num_new
    hidden = torch.ones(num_new, keys.shape[1], dtype=torch.bool, device=q.device)
    scores = scores.masked_fill(hidden.triu(past_len + 1), float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)


def segment_attention(
    q: Tensor,
    history: Sequence[tuple[Tensor, Tensor]],
    k_new: Tensor,
    v_new: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attention of T new tokens to all of `history` and, causally, to each other.

    Args:
        q: queries `[Hq, T, D]`.
        history: runs (k, v) of earlier tokens, each `[n, Hkv, D]` with n >= 0 and a contiguous
            last dimension; other strides are free. Read in place: memory taken by a call does
            not grow with n.
        k_new, v_new: keys and values of the new tokens, `[Hkv, T, D]`; Hkv divides Hq.
        scale: factor on the scores.

    Returns `[T, Hq, D]` in the dtype of q. Partial results merge in float32.

    >>> import torch
    >>> q, kv = torch.randn(4, 3, 8), torch.randn(2, 3, 8)
    >>> run = torch.randn(16, 2, 8)
    >>> segment_attention(q, [(run, run)], kv, kv, scale=8**-0.5).shape
    torch.Size([3, 4, 8])
    """
    num_heads, num_new, head_dim = q.shape
    num_kv_heads = k_new.shape[0]
    flash = _flash_takes(q, v_new)
    attend_run = _attend_run_flash if flash else _attend_run_plain
    queries = q.contiguous().view(1, num_kv_heads, -1, head_dim)
    merged = _attend_new(queries, k_new, v_new, scale, flash)
    for k, v in history:
        if k.shape[0] == 0:
            continue
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            raise ValueError(
                f"history strides are {k.stride()} and {v.stride()}; "
                "the last dimension must be contiguous"
            )
        for partial in attend_run(queries, k, v, scale):
            merged = _merge(merged, partial)
    out, _ = merged
    out = out.view(num_kv_heads, num_heads // num_kv_heads, num_new, -1)
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def _flash_takes(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.dtype in _FLASH_DTYPES and v.shape[-1] == q.shape[-1]


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> _Partial:
    """PyTorch's CPU kernel on `[batch, heads, tokens, D]`, which takes strides as they are."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )
    return out.float(), lse


def _attend_new(q: Tensor, k: Tensor, v: Tensor, scale: float, flash: bool) -> _Partial:
    """Causal attention among the new tokens: q `[1, Hkv, group * T, D]`, k and v `[Hkv, T, D]`."""
    num_kv_heads, num_new, _ = k.shape
    # Causality needs the tokens by themselves: key heads become the batch, the group the heads.
    by_group = q.view(num_kv_heads, -1, num_new, q.shape[-1])
    keys, values = k[:, None], v[:, None]
    if num_new == 1:
        dtype = _merge_dtype(q)
        out = values.to(dtype).repeat(1, by_group.shape[1], 1, 1)
        lse = (by_group.to(dtype) * keys.to(dtype)).sum(-1).mul_(scale)
    elif flash:
        keys, values = (
            (t if t.stride(-1) == 1 else t.contiguous()).expand(-1, by_group.shape[1], -1, -1)
            for t in (keys, values)
        )
        out, lse = _flash(by_group, keys, values, scale, causal=True)
    else:
        hidden = torch.ones(num_new, num_new, dtype=torch.bool, device=q.device).triu(1)
        out, lse = _plain(by_group, keys, values, scale, hidden)
    return out.flatten(1, 2)[None], lse.flatten(1, 2)[None]


def _attend_run_flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Iterator[_Partial]:
    """Attention of q `[1, Hkv, group * T, D]` to a run of k and v `[n, Hkv, D]`.

    With fewer key heads and query blocks than threads, equal pieces of the run enter as a batch.
    """
    run_len, num_kv_heads, head_dim = k.shape
    num_tasks = num_kv_heads * -(-q.shape[2] // _QUERY_BLOCK_LEN)
    num_pieces = min(torch.get_num_threads() // num_tasks, run_len // _MIN_PIECE_LEN)
    if num_pieces <= 1:
        yield _flash(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale, causal=False)
        return
    rest = run_len % num_pieces
    shape = (num_pieces, run_len // num_pieces, num_kv_heads, head_dim)
    keys, values = (t[: run_len - rest].view(shape).transpose(1, 2) for t in (k, v))
    out, lse = _flash(q.expand(num_pieces, -1, -1, -1), keys, values, scale, causal=False)
    yield from zip(out.split(1), lse.split(1), strict=True)
    if rest:
        yield from _attend_run_flash(q, k[-rest:], v[-rest:], scale)


def _attend_run_plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Iterator[_Partial]:
    """As `_attend_run_flash`, for devices and dtypes without that kernel."""
    for keys, values in zip(k.split(_PLAIN_PIECE_LEN), v.split(_PLAIN_PIECE_LEN), strict=True):
        yield _plain(q, keys.transpose(0, 1), values.transpose(0, 1), scale, None)


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None) -> _Partial:
    """q `[..., T, D]`, k and v `[..., n, D]` broadcast; `hidden` `[T, n]` marks pairs to skip."""
    dtype = _merge_dtype(q)
    scores = torch.matmul(q.to(dtype), k.to(dtype).transpose(-1, -2)).mul_(scale)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    return torch.matmul(scores.sub_(lse[..., None]).exp_(), v.to(dtype)), lse


def _merge_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _merge(one: _Partial, other: _Partial) -> _Partial:
    (out, lse), (other_out, other_lse) = one, other
    # The share of the other, exp(other_lse) / (exp(lse) + exp(other_lse)), without overflow.
    share = torch.sigmoid(other_lse - lse)[..., None]
    return torch.lerp(out, other_out, share), torch.logaddexp(lse, other_lse)
