"""Our attention function for transformers' attention interface: history is read where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentcache.kernels.paged_attention import segment_attention

if TYPE_CHECKING:
    from agentcache.engine.cache_layers import ForwardContext, PagedKVLayer

__all__ = ["ATTENTION_NAME", "register_attention"]

ATTENTION_NAME = "agentcache"


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    agentcache: ForwardContext | None = None,
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of the new tokens over each span's history and themselves.

    query [B, Hq, T, D]; key, value [B, Hkv, T, ...] of the new tokens, or of the whole history
    where the layer hands that out; returns [B, T, Hq, Dv]. s_aux [Hq], sinks [B, Hq, T, 1]: logits
    that join the denominator. position_bias [B or 1, Hq, T, keys]: added to the scores, aligned
    with the last key. prefix: keys, values [M, Hkv, ...] that every token sees besides, whatever
    the window. attention_mask [B, 1, T, keys]: read where the layer is `masked`, and nowhere else.
    Attention over keys that no layer stored, and without a pass, is none of the cache's and is
    computed as it is asked for.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None:
        raise NotImplementedError("attention scores with a soft cap are not supported")
    layer: PagedKVLayer | None = getattr(key, "agentcache_layer", None)
    if layer is None and agentcache is None:
        return _plain(query, key, value, attention_mask, scale), None
    context = layer.context if layer is not None else agentcache
    assert context is not None
    reader = layer or context.gathered
    assert reader is not None, "attention over keys that no layer has stored"
    reader.unread = False
    if reader.masked:
        context.gathered = None
        assert attention_mask is not None, "sparse attention without a mask"
        return _masked(query, key, value, attention_mask, scale, s_aux), None
    out = []
    for b, span in enumerate(context.spans):
        history, new_key, new_value = (
            _in_place(reader, b, key[b], value[b])
            if layer is not None
            else _gathered(span.start, span.stop, key[b], value[b])
        )
        extra = s_aux if sinks is None else sinks[b, :, :, 0]
        bias = None
        if position_bias is not None:
            of_span = position_bias[b if len(position_bias) > 1 else 0]
            num_keys = sum(len(keys) for keys, _ in history) + new_key.shape[1]
            bias = _as_long_as(of_span, num_keys)
        out.append(
            segment_attention(
                query[b],
                history,
                new_key,
                new_value,
                scale=scale,
                window=reader.window,
                prefix=prefix,
                sinks=extra,
                bias=bias,
            )
        )
    context.gathered = None
    return torch.stack(out), None


_Parts = tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor]


def _in_place(reader: PagedKVLayer, b: int, key: torch.Tensor, value: torch.Tensor) -> _Parts:
    """History as runs of the arena, and the new tokens."""
    keys, values = reader.context.pools.kv[reader.layer_idx]
    runs = reader.context.places[reader.kind].history[b]
    history = [(keys[at : at + num], values[at : at + num]) for at, num in runs]
    if reader.context.exact and history:
        history = [(torch.cat([k for k, _ in history]), torch.cat([v for _, v in history]))]
    return history, key, value


def _gathered(start: int, stop: int, key: torch.Tensor, value: torch.Tensor) -> _Parts:
    """History and new tokens out of keys and values [heads, padding + stop, ...]."""
    key, value = key[:, -stop:], value[:, -stop:]
    past = key[:, :start].transpose(0, 1), value[:, :start].transpose(0, 1)
    return [past], key[:, start:], value[:, start:]


def _as_long_as(bias: torch.Tensor, length: int) -> torch.Tensor:
    """The bias [H, T, keys] of `length` keys: the last ones, nothing known of earlier ones."""
    return F.pad(bias, (max(0, length - bias.shape[-1]), 0))[..., -length:]


_QUERY_BLOCK_LEN = 64  # scores are a real tensor, as large as this many queries make it


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention to what a mask [B, 1, T, keys] says: True where a key is seen, or an addend."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
    dtype = torch.promote_types(query.dtype, torch.float32)
    keys, values = (half.to(dtype)[:, :, None] for half in (key, value))
    queries = query.to(dtype).unflatten(1, (key.shape[1], -1))  # [B, Hkv, group, T, D]
    out = []
    for start in range(0, query.shape[2], _QUERY_BLOCK_LEN):
        block = slice(start, start + _QUERY_BLOCK_LEN)
        scores = queries[..., block, :] @ keys.transpose(-1, -2) * scale
        scores += mask[:, :, None, block].to(dtype)
        if sinks is not None:
            column = sinks.to(dtype).view(1, *scores.shape[1:3], 1, 1)
            scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], dim=-1)
        out.append(scores.softmax(-1)[..., : key.shape[2]] @ values)
    return torch.cat(out, dim=-2).flatten(1, 2).transpose(1, 2).to(query.dtype)


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention without a cache, as asked for: [B, T, Hq, Dv]."""
    group = query.shape[1] // key.shape[1]
    out = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(group, 1),
        value.repeat_interleave(group, 1),
        attn_mask=mask,
        scale=scale,
    )
    return out.transpose(1, 2)


def register_attention() -> str:
    """Make the function known to transformers; returns the name to set on a model."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, paged_attention_forward)
    return ATTENTION_NAME
