"""One token's attention to the latents of its sequence, for each of several rows, on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentcache.kernels import rows
from agentcache.kernels.row_attention import attend_gathered
from agentcache.kernels.row_moves import as_type

if rows.IS_COMPILED:
    from agentcache.kernels import _rows

if TYPE_CHECKING:
    from agentcache.kernels.row_attention import KeyRuns

__all__ = ["attend", "attend_reference", "attends"]

_SPLITS = 8
"""Most parts that the latents of a row are gone through in, as in `_rows.h`."""
_LANES = 16
"""Numbers that the compiled loops take at a time; a latent's width is a multiple of it."""
_MOST_WIDTH = 2048
"""Of a latent and its shared key; 32 of them lie on a thread's stack, in float32."""


def attend_reference(
    q: Tensor,
    latents: Tensor,
    shared: Tensor,
    runs: KeyRuns,
    expand: Tensor,
    *,
    key_dim: int,
    scale: float,
) -> Tensor:
    """The formula in float32, with keys and values made of all latents. Shapes as in `attend`."""
    slots, is_there = runs.slots
    both = torch.einsum("hdc,rnc->rhnd", expand.float(), latents[slots].float())
    common = shared[slots].float()[:, None].expand(-1, len(expand), -1, -1)
    keys = torch.cat([both[..., :key_dim], common], -1)
    scores = torch.einsum("rhd,rhnd->rhn", q.float(), keys) * scale
    weights = scores.masked_fill(~is_there[:, None], float("-inf")).softmax(-1)
    return torch.einsum("rhn,rhnd->rhd", weights, both[..., key_dim:]).flatten(1).to(q.dtype)


def attend(
    q: Tensor,
    latents: Tensor,
    shared: Tensor,
    runs: KeyRuns,
    expand: Tensor,
    *,
    key_dim: int,
    scale: float,
) -> Tensor:
    """Attention of one token each of R sequences to all latents of its own (arXiv:2405.04434,
    section 2.1), which are keys and values of all heads as they lie: queries are brought among
    them, and what is found back to values.

    q: [R, H, K + S]. latents: [slots, rank], shared: [slots, S]; slots may lie any distance apart.
    runs: where the latents of each row lie, its own included. expand: [H, K + V, rank]; of a latent
    it makes a head's K = key_dim numbers of a key, behind which come the S that heads share, and
    its V of a value. Returns [R, H * V]. A row comes out the same whatever other rows there are,
    and wherever its latents lie; long sequences are gone through in parts, as in `row_attention`.
    """
    if not _attends(q, latents, shared, expand):
        return _attend_gathered(q, latents, shared, runs, expand, key_dim, scale)
    num_rows, num_heads, query_dim = q.shape
    rank, shared_dim = latents.shape[1], query_dim - key_dim
    width = -(-(rank + shared_dim) // _LANES) * _LANES
    to_values, threads = expand[:, key_dim:], torch.get_num_threads()
    wide, among = as_type(q, torch.float32), torch.empty((num_rows, num_heads, width))
    _rows.enter_latents(
        wide.data_ptr(),
        expand.data_ptr(),
        rows.KINDS[expand.dtype],
        expand.stride(0),
        among.data_ptr(),
        num_rows,
        num_heads,
        key_dim,
        shared_dim,
        rank,
        width,
        threads,
    )
    part = torch.empty(num_rows * _SPLITS * num_heads * (rank + 2))
    found = torch.empty((num_heads, num_rows, rank))
    _rows.attend_latents(
        among.data_ptr(),
        latents.data_ptr(),
        shared.data_ptr(),
        rows.KINDS[latents.dtype],
        latents.stride(0),
        shared.stride(0),
        runs.pairs.data_ptr(),
        runs.firsts.data_ptr(),
        num_rows,
        num_heads,
        rank,
        shared_dim,
        width,
        scale,
        part.data_ptr(),
        found.data_ptr(),
        threads,
    )
    y = torch.empty((num_rows, num_heads * to_values.shape[1]), dtype=q.dtype)
    _rows.leave_latents(
        found.data_ptr(),
        to_values.data_ptr(),
        rows.KINDS[expand.dtype],
        expand.stride(0),
        y.data_ptr(),
        rows.KINDS[y.dtype],
        num_rows,
        num_heads,
        to_values.shape[1],
        rank,
        threads,
    )
    return y


def _attend_gathered(
    q: Tensor,
    latents: Tensor,
    shared: Tensor,
    runs: KeyRuns,
    expand: Tensor,
    key_dim: int,
    scale: float,
) -> Tensor:
    """By PyTorch, among the latents, with nothing read on the host."""
    wide, to_keys, to_values = q.float(), expand[:, :key_dim].float(), expand[:, key_dim:].float()
    moved = torch.einsum("rhk,hkc->rhc", wide[..., :key_dim], to_keys)

    def read(slots: Tensor) -> tuple[Tensor, Tensor]:
        found = latents[slots].float()
        return torch.cat([found, shared[slots].float()], -1)[:, :, None], found[:, :, None]

    moved = torch.cat([moved, wide[..., key_dim:]], -1)
    widths = latents.shape[1] + shared.shape[1], latents.shape[1]
    found = attend_gathered(moved, read, runs, (1, *widths), scale=scale)
    return torch.einsum("rhc,hvc->rhv", found, to_values).flatten(1).to(q.dtype)


def attends(q: Tensor, latents: Tensor, shared: Tensor, expand: Tensor) -> bool:
    """Whether these are to be given to `attend`: by the compiled form, or since steps go apart."""
    on_device = rows.steps_apart(q) and not rows.takes(q)
    return on_device or _attends(q, latents, shared, expand)


def _attends(q: Tensor, latents: Tensor, shared: Tensor, expand: Tensor) -> bool:
    """Whether the compiled form takes these."""
    rank = latents.shape[1]
    return (
        all(map(rows.takes, (q, latents, expand)))
        and latents.dtype == shared.dtype
        and latents.stride(1) == shared.stride(1) == 1
        and expand.is_contiguous()
        and rank % _LANES == 0
        and rank + shared.shape[1] <= _MOST_WIDTH
    )
