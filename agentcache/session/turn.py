"""What a call returns: the turn, and why it did not reuse more."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from agentcache.engine.verify import VerifyResult
    from agentcache.types import FinishReason, IntArray, TokenLogprob, Usage

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
        "no_checkpoint": tokens were known further, but no state stands there; "window_gap": the
        same for the window of attention layers that see only so far; "evicted": it was there and
        had to leave; the others belong to models and options of later versions.
    vetoed_by: the component that kept the boundary shortest ("full", "swa", "state"), if one did.
    kv_len, state_len, window_len: how far each alone would have allowed reuse, in tokens.
    expected, got: texts around the point, of the history and of the prompt.
    evicted_at: when the state left, on the runtime's clock.
    fallback: why a continued history had to be rendered as a whole, where the template forced it.
    line: (number from 1, text) of the line of that message's content that is not what it was.
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
    window_len: int = 0
    line: tuple[int, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in ((name, getattr(self, name)) for name in self.__slots__)
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MissReport:
        """The inverse of `to_json`. Raises TypeError where fields are missing or unknown, or have
        values that mean nothing."""
        report = cls(**values)
        for name, types in _JSON_TYPES.items():
            if not isinstance(getattr(report, name), types):
                raise TypeError(f"{name} is {getattr(report, name)!r}")
        if report.reason not in get_args(MissReason):
            raise TypeError(f"reason is {report.reason!r}")
        pairs: dict[str, Any] = {}
        for name in ("message", "line"):
            pair = getattr(report, name)
            if pair is not None and [type(part) for part in pair] != [int, str]:
                raise TypeError(f"{name} is {pair!r}")
            pairs[name] = pair if pair is None else (*pair,)
        return replace(report, **pairs)

    def __str__(self) -> str:
        """The report in words.

        >>> report = MissReport(7, (2, "tool"), "diverged", None, 7, 4, "12:01", "12:02")
        >>> print(report)
        The prompt leaves the session's history at token 7, in message 2 (tool): "12:01" was
        there, "12:02" is now. The recurrent state is known up to token 4, the KV up to token 7.
        """
        return textwrap.fill(self.summary, 88, break_long_words=False, break_on_hyphens=False)

    @property
    def summary(self) -> str:
        """The report in words, on one line."""
        parts = [self._why(), self._lens()]
        if self.fallback is not None:
            parts.append(f"The history was rendered as a whole: {self.fallback}.")
        return " ".join(" ".join(parts).split())

    def _why(self) -> str:
        where = f"token {self.at_token:,}"
        if self.message is not None:
            where += f", in message {self.message[0]} ({self.message[1]})"
        if self.reason == "diverged":
            was, now = _quoted(self.expected), _quoted(self.got)
            return (
                f"The prompt leaves the session's history at {where}: {was} was there, "
                f"{now} is now.{self._line()}"
            )
        if self.reason == "evicted":
            at = "" if self.evicted_at is None else f" at {self.evicted_at:.1f} s"
            return f"The prompt goes on from {where}, but what was kept there was evicted{at}."
        if self.reason == "new":
            return f"All that is known ends at {where}." if self.at_token else "Nothing is known."
        return f"The tokens are known up to {where}, but {_LACKING[self.reason]}."

    def _line(self) -> str:
        if self.line is None:
            return ""
        return f" The line that differs is line {self.line[0]}: {_quoted(self.line[1])}."

    def _lens(self) -> str:
        """How far each kind reaches, where they differ."""
        lens = {
            "the recurrent state": ("state", self.state_len),
            "the window": ("swa", self.window_len),
            "the KV": ("full", self.kv_len),
        }
        told = {
            name: end for name, (kind, end) in lens.items() if end or kind == self.vetoed_by
        }  # a kind that the model lacks reaches nowhere and vetoes nothing
        if len(set(told.values())) < 2:
            return ""
        known = ", ".join(f"{name} up to token {end:,}" for name, end in told.items())
        known = known.replace(" up to", " is known up to", 1)
        return f"{known[0].upper()}{known[1:]}."


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "at_token": (int,),
    "message": (list, NoneType),
    "reason": (str,),
    "vetoed_by": (str, NoneType),
    "kv_len": (int,),
    "state_len": (int,),
    "expected": (str,),
    "got": (str,),
    "evicted_at": (int, float, NoneType),
    "fallback": (str, NoneType),
    "window_len": (int,),
    "line": (list, NoneType),
}

_LACKING = {
    "no_checkpoint": "no checkpoint stands there",
    "window_gap": "no window is whole there",
    "adapter": "under another adapter",
    "fingerprint": "under another model",
}
"""By reason, what known tokens lack."""


def _quoted(text: str) -> str:
    """A text in quotes on one line, with escapes for what cannot be printed."""
    if not text:
        return "nothing"
    inside = "".join(json.dumps(c, ensure_ascii=not c.isprintable())[1:-1] for c in text)
    return f'"{inside}"'


@dataclass(frozen=True, eq=False)
class Turn:
    """One finished call.

    ids: output ids [T] as sampled or absorbed, an end id included. text: without it. message: the
    reply in OpenAI form. tip, index: where the session stands now, and after how many turns; tip is
    None on a session that was closed meanwhile. logits: [T, vocab], the distribution each output id
    was taken from, if asked for. logprobs: how likely the model held each output id, if asked for.
    malformed_calls: texts in the message's content that begin as tool calls and are none.
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
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    malformed_calls: tuple[str, ...] = ()

    @cached_property
    def miss(self) -> MissReport | None:
        """Why less than the prompt but for its last few tokens was reused; None where it was not.

        Worked out when first asked for: finding the message may take a few renderings.
        """
        return self.explain()
