"""Gated DeltaNet (arXiv:2412.06464), over the rows of several sequences in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from agentcache.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from agentcache.kernels.gated_delta import gated_delta, gated_delta_update

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from agentcache.engine.native.layers import GatedNorm, Linear
    from agentcache.engine.native.packing import Pass, Run

__all__ = ["DeltaRule", "GatedDelta"]

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """A short convolution and the gated delta rule behind it, with the states of both.

    H heads of values of width V, over G heads of keys and of queries of width K. conv_weight
    [C, taps] with C = 2 G K + H V channels: queries, keys, values. act: on what is convolved.
    """

    layer_idx: int
    conv_weight: Tensor
    conv_bias: Tensor | None
    act: Callable[[Tensor], Tensor]
    num_key_heads: int
    key_dim: int
    num_heads: int
    value_dim: int

    def __call__(self, mixed: Tensor, decay: Tensor, beta: Tensor, tokens: Pass) -> Tensor:
        """Channels [N, C] to [N, H, V]. decay: its logarithm, [N, H] or by key channel [N, H, K].
        beta: how much of a correction is written, [N, H]."""
        parts = []
        if tokens.steps:
            at = slice(0, tokens.steps)
            parts.append(self._step(mixed[at], decay[at], beta[at], tokens))
        for run in tokens.runs:
            parts.append(self._extend(mixed[run.at], decay[run.at], beta[run.at], run, tokens))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Channels [..., C] as queries and keys [..., G, K], normalised in float32, and values
        [..., H, V]."""
        heads, width = self.num_key_heads, self.num_key_heads * self.key_dim
        x = self.act(convolved)
        qk = x[..., : 2 * width].float().unflatten(-1, (2 * heads, self.key_dim))
        qk = qk * torch.rsqrt(torch.linalg.vecdot(qk, qk).unsqueeze(-1) + _NORM_EPS)
        q, k = qk.split([heads, heads], -2)
        v = x[..., 2 * width :].unflatten(-1, (self.num_heads, self.value_dim))
        return q * self.key_dim**-0.5, k, v

    def _step(self, mixed: Tensor, decay: Tensor, beta: Tensor, tokens: Pass) -> Tensor:
        """One token of each of several sequences; their states move on in place."""
        all_convs = tokens.pools.state[self.layer_idx, "conv"]
        all_states = tokens.pools.state[self.layer_idx, "recurrent"]
        conv, state = all_convs[tokens.rows], all_states[tokens.rows]
        q, k, v = self._split(causal_conv1d_update(mixed, conv, self.conv_weight, self.conv_bias))
        y = gated_delta_update(state, q, k, v, decay, beta)
        if isinstance(tokens.rows, list):
            all_convs[tokens.rows], all_states[tokens.rows] = conv, state
        return y

    def _extend(self, mixed: Tensor, decay: Tensor, beta: Tensor, run: Run, tokens: Pass) -> Tensor:
        """Several tokens of one sequence, with the states at its captures set aside."""
        row, at = run.span.row, run.positions
        convs = tokens.pools.state[self.layer_idx, "conv"]
        states = tokens.pools.state[self.layer_idx, "recurrent"]
        conv = causal_conv1d(
            mixed[None],
            self.conv_weight,
            self.conv_bias,
            convs[row : row + 1],
            state_positions=at,
        )
        scan = gated_delta(
            *self._split(conv.y),
            decay[None],
            beta[None],
            initial_state=states[row : row + 1],
            state_positions=at,
        )
        for capture, window, state in zip(run.inside, conv.states, scan.states, strict=True):
            convs[capture.row], states[capture.row] = window[0], state[0]
        convs[row], states[row] = conv.final_state[0], scan.final_state[0]
        return scan.y[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """The delta rule with one decay per head.

    project: the rule's channels, gates [H V], and what strengths and decays are made of, [H] each,
    in one product. A (negative), dt_bias: [H] float32. norm: of each head by itself.
    """

    project: Linear
    rule: DeltaRule
    A: Tensor
    dt_bias: Tensor
    norm: GatedNorm
    out: Linear

    def __call__(self, x: Tensor, tokens: Pass) -> Tensor:
        rule, heads = self.rule, self.rule.num_heads
        sizes = [len(rule.conv_weight), heads * rule.value_dim, heads, heads]
        mixed, gate, b, a = self.project(x).split(sizes, -1)
        decay = self.A * F.softplus(a.float() + self.dt_bias)
        y = rule(mixed, decay, b.sigmoid(), tokens)
        return self.out(self.norm(y, gate.unflatten(-1, (heads, -1))).flatten(1))
