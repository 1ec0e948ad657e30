"""Families by their `model_type`: how a model is put together from a config and named weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentcache.engine.native.families.granite import granite_hybrid
from agentcache.engine.native.families.llama import gemma3, llama, qwen3

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["NATIVE"]

NATIVE: dict[str, Callable[[Any, Weights], NativeModel]] = {
    "granitemoehybrid": granite_hybrid,
    "llama": llama,
    "qwen3": qwen3,
    "gemma3_text": gemma3,
}
"""What makes a model of a config and its weights. Raises ModelError where they do not fit."""
