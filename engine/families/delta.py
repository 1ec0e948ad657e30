"""Delta rules, gated per head (qwen3_next and kin) or per key channel (KDA)."""

from __future__ import annotations

from agentcache.engine.families.base import Family

__all__ = ["FAMILIES"]

FAMILIES = (
    Family(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lara_mini"),
        mixer="delta",
        install="agentcache.engine.mixers.delta:install_delta",
        captures="mixer",
        traps=("lara_mini: freshly initialised it forgets at once, which hides a lost state",),
    ),
    Family(
        ("kimi_linear", "bailing_hybrid"),
        mixer="delta",
        install="agentcache.engine.mixers.kda:install_kda",
        captures="mixer",
        gathers=True,
        traps=("what is cached of attention is a latent, expanded to keys and values afterwards",),
    ),
)
