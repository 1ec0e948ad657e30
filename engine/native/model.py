"""A whole model: embedding, layers, norm, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.native.linear import Roundable
from agentcache.kernels import row_gates, row_moves

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from agentcache.engine.native.layers import Block, RMSNorm
    from agentcache.engine.native.linear import Linear
    from agentcache.engine.native.packing import Pass

__all__ = ["NativeModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeModel:
    """embedding: a row for each token id; head: a logit for each. They are the same object where
    their weights are the same. blocks: of all layers, in order. The embedding is multiplied by
    `embedding_scale`, logits by `logits_scale`; soft_cap bounds them."""

    embedding: Linear
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Linear
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, tokens: Pass) -> Tensor:
        """Of the tokens whose logits are asked for, [wanted, vocab] float32."""
        x = row_moves.scale(self.embedding.rows_of(tokens.ids), self.embedding_scale)
        for block in self.blocks:
            x = block(x, tokens)
            tokens.next_block()
        wanted = tokens.wanted()
        x = self.norm(x if wanted is None else x[wanted])
        logits = row_moves.scale(row_moves.as_type(self.head(x), torch.float32), self.logits_scale)
        if self.soft_cap is not None:
            logits = row_gates.soft_cap(logits, self.soft_cap)
        return logits

    def roundable(self) -> Iterator[Roundable]:
        """All that may be rounded, each once, in order."""
        yield self.embedding
        yield from _roundable(self.blocks)
        if self.head is not self.embedding:
            yield self.head


def _roundable(part: Any) -> Iterator[Roundable]:
    """What may be rounded in a layer of ours, and in what it holds."""
    if isinstance(part, Roundable):
        yield part
    elif isinstance(part, (tuple, list)):
        for each in part:
            yield from _roundable(each)
    elif type(part).__module__.startswith(__package__):
        names = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in names or vars(part):
            yield from _roundable(getattr(part, name, None))
