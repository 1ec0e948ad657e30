"""Families by their `model_type`: how a model is put together from a config and named weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentcache.engine.native.families.bamba import bamba
from agentcache.engine.native.families.falcon_h1 import falcon_h1
from agentcache.engine.native.families.granite import granite_hybrid
from agentcache.engine.native.families.jamba import jamba
from agentcache.engine.native.families.kimi import kimi_linear
from agentcache.engine.native.families.lfm2 import lfm2, lfm2_moe
from agentcache.engine.native.families.llama import gemma3, llama, qwen3
from agentcache.engine.native.families.nemotron import nemotron_h
from agentcache.engine.native.families.qwen3_next import qwen3_5, qwen3_5_moe, qwen3_next

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.weights import Weights

__all__ = ["NATIVE"]

NATIVE: dict[str, Callable[[Any, Weights], NativeModel]] = {
    "granitemoehybrid": granite_hybrid,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "nemotron_h": nemotron_h,
    "jamba": jamba,
    "kimi_linear": kimi_linear,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe_text": qwen3_5_moe,
    "gemma3_text": gemma3,
}
"""What makes a model of a config and its weights. Raises ModelError where they do not fit."""
