"""What a call returns: the turn, and why it did not reuse more."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from agentcache.engine.verify import VerifyResult
    from agentcache.types import FinishReason, IntArray, Usage

__all__ = ["MissReason", "MissReport", "Turn"]

MissReason = Literal[
    "new", "diverged", "no_checkpoint", "evicted", "window_gap", "adapter", "fingerprint"
]


@dataclass(frozen=True, slots=True)
class MissReport:
    """Why a prompt, but for its last few tokens, was not reused whole.

    at_token: first token that differs from what was known, or the end of what was known.
    message: (index, role) of the message that holds it, where the prompt was made of messages.
    reason: "new": nothing beyond it was known; "diverged": the prompt leaves the session's history;
        "no_checkpoint": tokens were known further, but no state stands there; "evicted": the state
        was there and had to leave; the others belong to models and options of later versions.
    vetoed_by: the component that kept the boundary shortest ("full", "state"), if one did.
    kv_len, state_len: how far each alone would have allowed reuse, in tokens.
    expected, got: texts around the point, of the history and of the prompt.
    evicted_at: when the state left, on the runtime's clock.
    fallback: why a continued history had to be rendered as a whole, where the template forced it.
    """

    at_token: int
    message: tuple[int, str] | None
    reason: MissReason
    vetoed_by: str | None
    kv_len: int
    state_len: int
    expected: str
    got: str
    evicted_at: float | None = None
    fallback: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in ((name, getattr(self, name)) for name in self.__slots__)
        }


@dataclass(frozen=True, eq=False)
class Turn:
    """One finished call.

    ids: output ids [T] as sampled or absorbed, an end id included. text: without it. message: the
    reply in OpenAI form. tip, index: where the session stands now, and after how many turns; tip is
    None on a session that was closed meanwhile. logits: [T, vocab], the distribution each output id
    was taken from, if asked for.
    """

    ids: IntArray
    text: str
    message: dict[str, Any]
    finish_reason: FinishReason
    tip: int | None
    index: int
    usage: Usage
    explain: Callable[[], MissReport | None] = field(repr=False)
    verify: VerifyResult | None = None
    logits: torch.Tensor | None = field(default=None, repr=False)

    @cached_property
    def miss(self) -> MissReport | None:
        """Why less than the prompt but for its last few tokens was reused; None where it was not.

        Worked out when first asked for: finding the message may take a few renderings.
        """
        return self.explain()
