"""A whole model: embedding, layers, norm, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache.engine.native.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from agentcache.engine.native.layers import Block, RMSNorm
    from agentcache.engine.native.packing import Pass

__all__ = ["NativeModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeModel:
    """embedding: [vocab, width]. blocks: of all layers, in order. The embedding is multiplied by
    `embedding_scale`, logits by `logits_scale`; soft_cap bounds them."""

    embedding: Tensor
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Linear
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    soft_cap: float | None = None

    def logits(self, tokens: Pass) -> Tensor:
        """Of the tokens whose logits are asked for, [wanted, vocab] float32."""
        x = self.embedding[tokens.ids]
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        for block in self.blocks:
            x = block(x, tokens)
        logits = self.head(self.norm(x[tokens.wanted()])).float()
        if self.logits_scale != 1:
            logits = logits * self.logits_scale
        if self.soft_cap is not None:
            logits = (logits / self.soft_cap).tanh() * self.soft_cap
        return logits

    def linears(self) -> Iterator[Linear]:
        """All linear maps of the blocks, in order; not the head."""
        for block in self.blocks:
            yield from _linears(block)


def _linears(part: Any) -> Iterator[Linear]:
    """The linear maps in a layer of ours, and in what it holds."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, (tuple, list)):
        for each in part:
            yield from _linears(each)
    elif type(part).__module__.startswith(__package__):
        names = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in names or vars(part):
            yield from _linears(getattr(part, name, None))
