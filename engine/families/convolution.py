"""Short convolutions as the only state: exact at any position, from their inputs alone."""

from __future__ import annotations

from agentcache.engine.families.base import Family

__all__ = ["FAMILIES"]

FAMILIES = (
    Family(("lfm2", "lfm2_moe", "lfm3"), mixer="conv", captures="conv"),
    Family(
        ("inkling_text", "inkling2_text"),
        mixer="conv",
        captures="conv",
        traps=(
            "four convolutions per layer, of two widths, always float32",
            "a bias by relative distance, aligned with the last key",
            "inkling2: attention over blocks comes through the same interface and is not causal",
        ),
    ),
    Family(
        ("zaya",),
        mixer="conv",
        refuses=lambda config: (
            "its delayed values begin at a bias, not at zero" if config.attention_bias else None
        ),
        traps=("only the last columns are handed to the cache, already joined with the old ones",),
    ),
)
