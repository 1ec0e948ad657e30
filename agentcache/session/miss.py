"""Why a call did not reuse more: from what was known and what was found."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from agentcache.session.turn import MissReason, MissReport
from agentcache.types import FEW_TOKENS, Kind

if TYPE_CHECKING:
    from agentcache.engine.tokenizer import Tokenizer
    from agentcache.session.prompts import Prompt, PromptBuilder
    from agentcache.tree.radix_tree import Match

__all__ = ["explain_miss"]

_SHOWN = 12
"""Tokens of text shown on either side."""


def explain_miss(
    prompt: Prompt, match: Match, builder: PromptBuilder, tokenizer: Tokenizer
) -> MissReport | None:
    """A report, or None where all but the last few tokens was reused and the prompt kept to its
    tip.

    Only what the caller's own namespace and session hold enters the report.
    """
    if len(prompt.ids) - match.boundary <= FEW_TOKENS and not prompt.leaves_tip:
        return None
    at, reason = _reason(prompt, match)
    message = builder.message_at(prompt, at)
    known = prompt.tip.history.ids if prompt.tip is not None else prompt.ids[:0]
    return MissReport(
        at_token=at,
        message=message,
        reason=reason,
        vetoed_by=match.vetoed_by,
        kv_len=match.lens.get(Kind.FULL, 0),
        state_len=match.lens.get(Kind.STATE, 0),
        window_len=match.lens.get(Kind.SWA, 0),
        expected=tokenizer.decode(known[at : at + _SHOWN].tolist()),
        got=tokenizer.decode(prompt.ids[at : at + _SHOWN].tolist()),
        evicted_at=_evicted_at(prompt) if reason == "evicted" else None,
        fallback=prompt.rendered.fallback if prompt.rendered is not None else None,
        line=_changed_line(prompt, message) if reason == "diverged" else None,
    )


def _changed_line(prompt: Prompt, message: tuple[int, str] | None) -> tuple[int, str] | None:
    """The first line of a message's content that is another one than in the tip's history."""
    if message is None or prompt.tip is None:
        return None
    index, role = message
    both = [
        messages[index] if index < len(messages) else {}
        for messages in (prompt.tip.history.messages, prompt.messages)
    ]
    contents = [one.get("content") for one in both if one.get("role") == role]
    texts = [content.split("\n") for content in contents if isinstance(content, str)]
    if len(texts) < 2:
        return None
    for number, (was, now) in enumerate(zip_longest(*texts, fillvalue=""), start=1):
        if was != now:
            return number, now
    return None


def _reason(prompt: Prompt, match: Match) -> tuple[int, MissReason]:
    tip = prompt.tip
    if tip is None:
        known = match.known_len
        if known - match.boundary <= FEW_TOKENS:
            return known, "new"
        return known, "window_gap" if match.vetoed_by == Kind.SWA else "no_checkpoint"
    if match.boundary < min(tip.history.frontier, prompt.shared_len) and not prompt.leaves_tip:
        return prompt.shared_len, "evicted"
    if prompt.leaves_tip:
        return prompt.shared_len, "diverged"
    return len(tip.history.ids), "new"


def _evicted_at(prompt: Prompt) -> float | None:
    assert prompt.tip is not None
    return prompt.tip.ref.frontier.node.evicted_at
