"""Attention alone: full, in windows, or both in turns. Nothing to replace."""

from __future__ import annotations

from typing import Any

from agentcache.engine.families.base import Family

__all__ = ["FAMILIES"]


def _sees_both_ways(config: Any) -> str | None:
    if getattr(config, "use_bidirectional_attention", None):
        return "its tokens see later ones, so no prefix of it can be kept"
    return None


FAMILIES = (
    Family(("llama", "qwen3")),
    Family(("gemma3_text",), refuses=_sees_both_ways),
    Family(
        ("gemma3n_text", "gemma4_text"),
        refuses=_sees_both_ways,
        traps=(
            "the last layers read the KV of earlier ones: KV is known by its tensor, not its layer",
            "sizes of heads differ between full and windowed layers",
        ),
    ),
    Family(
        ("gpt_oss", "mimo_v2_flash", "granite_swa"),
        traps=(
            "sinks of zero are not absent: each adds one to the denominator",
            "mimo_v2_flash: values are narrower than keys, and windowed layers have more heads",
        ),
    ),
)
