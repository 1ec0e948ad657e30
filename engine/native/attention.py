"""Attention over pages, of several sequences in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentcache.kernels import row_gates, rows
from agentcache.kernels.paged_attention import segment_attention
from agentcache.kernels.row_attention import attend
from agentcache.types import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from agentcache.engine.native.layers import RMSNorm
    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import KVPlaces, Pass
    from agentcache.engine.native.rope import Rope

__all__ = ["Attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention with fewer heads of keys than of queries, where there are.

    qkv: queries, keys and values in one product, [N, (Hq + 2 Hkv) * D]. kind, window: of its KV.
    sinks: [Hq] logits that join the denominator. soft_cap: bounds the scaled scores, softly.
    gated: queries come with as many gates, whose sigmoid the output is multiplied by.
    """

    layer_idx: int
    qkv: Linear
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    kind: str = Kind.FULL.value
    window: int | None = None
    sinks: Tensor | None = None
    soft_cap: float | None = None
    gated: bool = False

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        q, k, v, gate = self._project(x, tokens)
        keys, values = tokens.pools.kv[self.layer_idx]
        places = tokens.places(self.kind)
        places.store(keys, k)
        places.store(values, v)
        steps = tokens.steps if rows.steps_apart(q) and not tokens.exact else 0
        if steps == len(q):
            return self._leave(self._step_all(q, keys, values, places), gate)
        out = torch.empty_like(q)
        if steps:
            out[:steps] = self._step_all(q[:steps], keys, values, places)
        seen = zip(tokens.bounds[steps:], places.history[steps:], strict=True)
        for bounds, runs in seen:
            history = [(keys[at : at + num], values[at : at + num]) for at, num in runs]
            if tokens.exact and history:
                history = [(torch.cat([h[0] for h in history]), torch.cat([h[1] for h in history]))]
            out[bounds] = segment_attention(
                q[bounds].transpose(0, 1),
                history,
                k[bounds].transpose(0, 1),
                v[bounds].transpose(0, 1),
                scale=self.scale,
                window=self.window,
                sinks=self.sinks,
                soft_cap=self.soft_cap,
            )
        return self._leave(out, gate)

    def _step_all(self, q: Tensor, keys: Tensor, values: Tensor, places: KVPlaces) -> Tensor:
        """Of the spans of one token."""
        return attend(
            q,
            keys,
            values,
            places.of_steps,
            scale=self.scale,
            sinks=self.sinks,
            soft_cap=self.soft_cap,
        )

    def _leave(self, out: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None and row_gates.takes(gate, torch.sigmoid):
            out = row_gates.opened(gate, torch.sigmoid, out)
        elif gate is not None:
            out = out * gate.sigmoid()
        return self.out(out.flatten(1))

    def _project(self, x: Tensor, tokens: Pass) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [N, Hq, D], keys and values [N, Hkv, D], and gates [N, Hq, D] if there are."""
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        mixed = self.qkv(x)
        gate = None
        if self.gated:  # head by head a query and its gate
            both, k, v = mixed.split([2 * width, kv_width, kv_width], -1)
            q, gate = both.unflatten(-1, (self.num_heads, 2, -1)).unbind(-2)
        else:
            q, k, v = mixed.split([width, kv_width, kv_width], -1)
            q = q.unflatten(-1, (self.num_heads, -1))
        k, v = (part.unflatten(-1, (self.num_kv_heads, -1)) for part in (k, v))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        if self.rope is not None:
            q, k = self.rope.turn(q, tokens), self.rope.turn(k, tokens)
        return q, k, v, gate
