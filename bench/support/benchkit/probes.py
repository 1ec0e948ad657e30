"""Bare forward passes over a runtime's own pools: what a call costs with nothing around it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from agentcache.engine.backend import Batch, Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from agentcache.cache import Lease
    from agentcache.runtime import Runtime
    from agentcache.types import IntArray

__all__ = ["forward", "standing_at"]


@contextmanager
def standing_at(runtime: Runtime, tokens: IntArray, length: int) -> Iterator[Lease]:
    """A lease that holds the state after `tokens[:length]` and room for the rest.

    On the engine thread, between two calls. `tokens[:length]` has to end at a checkpoint. Whatever
    is computed is thrown away at the end: the cache is as it was.
    """
    cache = runtime.cache
    lease = cache.acquire(runtime.namespace(None).digest(), tokens, limit=length)
    try:
        if lease.boundary != length:
            raise RuntimeError(f"the cache holds {lease.boundary} tokens of this, not {length}")
        cache.reserve(lease, len(tokens))
        yield lease
    finally:
        cache.release(lease)


def forward(runtime: Runtime, lease: Lease, tokens: IntArray, start: int) -> torch.Tensor:
    """One pass over `tokens[start:]`, with the last token's logits and nothing else."""
    engine = runtime.engine
    new = tokens[start:]
    span = Span(
        new, start, lease.table, lease.row, logits_at=(len(new) - 1,), windows=lease.windows
    )
    return engine.backend.forward(Batch((span,), engine.pools))[0]
