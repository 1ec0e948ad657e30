"""What a turn says about itself, in OpenAI's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agentcache import TokenLogprob, Turn, Usage

__all__ = ["TokenTexts", "finish_reason_of", "logprobs_of", "usage_of"]


def finish_reason_of(turn: Turn, message: Mapping[str, Any]) -> str:
    """ "stop", "length" or "tool_calls", for the message that the caller gets to see."""
    if turn.finish_reason in ("length", "prefill"):
        return "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


def usage_of(usage: Usage) -> dict[str, Any]:
    """Token counts; what was computed of the prompt is what the cache gained by it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_creation_tokens": usage.computed_tokens,
        },
    }


class TokenTexts(Protocol):
    """What is needed of a tokenizer to name its tokens; `Runtime.tokenizer` has it."""

    @property
    def is_byte_level(self) -> bool:
        """Whether `token_bytes` can be asked."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for."""
        ...

    def decode_after(self, ids: Iterable[int]) -> str:
        """The text of ids that follow others."""
        ...


def logprobs_of(
    logprobs: Iterable[TokenLogprob] | None, tokenizer: TokenTexts
) -> dict[str, Any] | None:
    """Log-probabilities of a reply's tokens, its end included; None where none were asked for.

    What is no whole character stands as U+FFFD in `token`.
    """
    if logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode_after([token])
        raw = tokenizer.token_bytes(token) if tokenizer.is_byte_level else text.encode()
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    content = [
        {**entry(item.id, item.logprob), "top_logprobs": [entry(*pair) for pair in item.top]}
        for item in logprobs
    ]
    return {"content": content, "refusal": None}
