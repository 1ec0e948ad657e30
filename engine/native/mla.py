"""Multi-head latent attention: what is cached is one latent a token, shared by all heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from agentcache.kernels import row_latent
from agentcache.kernels.paged_attention import segment_attention
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentcache.engine.native.layers import RMSNorm
    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import Pass

__all__ = ["LatentAttention", "LowRank"]


@dataclass(frozen=True, slots=True)
class LowRank:
    """`up(norm(down(x)))`: a map through a narrow middle."""

    down: Linear
    norm: RMSNorm
    up: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.up(self.norm(self.down(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Causal attention of H heads over latents [R] and keys [S] that all heads share.

    A head's key is K numbers of the latent behind the shared S; its value is V numbers of the
    latent. queries: [N, H (K + S)]. compress: latent and shared key in one product, [N, R + S];
    latents are cached as keys and shared keys as values, normed. expand: [H, K + V, R]. There are
    no positions in it.

    Two ways to the same: keys and values are made of all latents, or, with few new tokens, latents
    are attended to as they are, by queries that were brought among them. Spans of one token go the
    second way together, by kernels for a few rows where there are such.
    """

    layer_idx: int
    queries: Callable[[Tensor], Tensor]
    compress: Linear
    norm: RMSNorm
    expand: Tensor
    out: Linear
    shared_dim: int
    key_dim: int

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        q = self.queries(x).unflatten(-1, (len(self.expand), -1))
        new = self._store(x, tokens)
        steps, parts = tokens.steps, []
        if steps:
            parts.append(self._step_all(q[:steps], new, tokens))
        if tokens.runs:
            history = tokens.places(Kind.FULL.value).history[steps:]
            for run, runs in zip(tokens.runs, history, strict=True):
                attend = self._expanded if self._pays(len(run.span.ids)) else self._among_latents
                parts.append(attend(q[run.at], _joined(new, run.at), [self._past(runs, tokens)]))
        return self.out(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _pays(self, num_new: int) -> bool:
        """Whether it pays to expand a history for so many new tokens: for each of its tokens H R
        (K + V) products, to save some in the scores and sums of each new one."""
        rank, width = self.expand.shape[2], self.expand.shape[1]
        return num_new * (2 * rank + self.shared_dim - width) > rank * width

    def _store(self, x: Tensor, tokens: Pass) -> tuple[Tensor, Tensor]:
        """Cache what is new; returns latents [N, R] and shared keys [N, S]."""
        latent, shared = self.compress(x).split([self.expand.shape[2], self.shared_dim], -1)
        latent = self.norm(latent)
        keys, values = tokens.pools.kv[self.layer_idx]
        places = tokens.places(Kind.FULL.value)
        places.store(keys, latent[:, None])
        places.store(values, shared[:, None])
        return latent, shared

    def _step_all(self, q: Tensor, new: tuple[Tensor, Tensor], tokens: Pass) -> Tensor:
        """Of the spans of one token, queries [R, H, K + S] to [R, H V]. new: of all tokens."""
        latents, shared = (half[:, 0] for half in tokens.pools.kv[self.layer_idx])
        places = tokens.places(Kind.FULL.value)
        if row_latent.attends(q, latents, shared, self.expand):
            return row_latent.attend(
                q,
                latents,
                shared,
                places.of_steps,
                self.expand,
                key_dim=self.key_dim,
                scale=self._scale,
            )
        past = [self._past(runs, tokens) for runs in places.history[: len(q)]]
        return self._among_latents(q, _joined(new, slice(len(q))), past)

    def _past(self, runs: tuple[tuple[int, int], ...], tokens: Pass) -> Tensor:
        """A history's latents and shared keys, [n, R + S]."""
        halves = tokens.pools.kv[self.layer_idx]
        if not runs:
            return torch.cat([half[:0, 0] for half in halves], -1)
        return torch.cat(
            [torch.cat([half[at : at + num, 0] for half in halves], -1) for at, num in runs]
        )

    def _among_latents(self, q: Tensor, new: Tensor, past: list[Tensor]) -> Tensor:
        """Queries [T, H, K + S], of one sequence or of one token of each of several, to [T, H V].

        A latent and its shared key are the one key of all heads, and its value.
        """
        rank, size = self.expand.shape[2], len(q) // len(past)
        to_keys, to_values = self.expand[:, : self.key_dim], self.expand[:, self.key_dim :]
        moved = torch.bmm(q[..., : self.key_dim].transpose(0, 1), to_keys).transpose(0, 1)
        moved = torch.cat([moved, q[..., self.key_dim :]], -1)
        found = torch.cat(
            [
                self._attend(of_one, [(latents[:, None],) * 2], fresh[:, None], fresh[:, None])
                for of_one, latents, fresh in zip(
                    moved.split(size), past, new.split(size), strict=True
                )
            ]
        )
        found = torch.bmm(found[..., :rank].transpose(0, 1), to_values.transpose(1, 2))
        return found.transpose(0, 1).flatten(1)

    def _expanded(self, q: Tensor, new: Tensor, past: list[Tensor]) -> Tensor:
        """Queries [T, H, K + S] of one sequence to [T, H V]."""
        (history,) = past
        latents, shared = torch.cat([history, new]).split(
            [self.expand.shape[2], self.shared_dim], -1
        )
        both = F.linear(latents, self.expand.flatten(0, 1)).unflatten(-1, self.expand.shape[:2])
        keys = torch.cat(
            [both[..., : self.key_dim], shared[:, None].expand(-1, len(self.expand), -1)], -1
        )
        values, at = both[..., self.key_dim :], len(history)
        width = values.shape[-1]
        if width < keys.shape[-1]:  # of one width the kernel for it takes them
            values = F.pad(values, (0, keys.shape[-1] - width))
        found = self._attend(q, [(keys[:at], values[:at])], keys[at:], values[at:])
        return found[..., :width].flatten(1)

    def _attend(
        self, q: Tensor, history: list[tuple[Tensor, Tensor]], keys: Tensor, values: Tensor
    ) -> Tensor:
        """All [tokens, heads, width]."""
        return segment_attention(
            q.transpose(0, 1),
            history,
            keys.transpose(0, 1),
            values.transpose(0, 1),
            scale=self._scale,
        )

    @property
    def _scale(self) -> float:
        """Of the scores."""
        return math.sqrt(1 / (self.key_dim + self.shared_dim))


def _joined(halves: tuple[Tensor, Tensor], at: slice) -> Tensor:
    """Latents and shared keys of some tokens side by side, [n, R + S]."""
    return torch.cat([half[at] for half in halves], -1)
