"""What the engine needs to know of a model family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from agentcache.pools.layout import KVSpec, StateSpec
    from agentcache.types import ModelShape

__all__ = ["Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of transformers.

    shape: sizes for cost and memory, from (config, KV dtype). kv_specs, state_specs: what each
    layer keeps per token and per sequence. install: make a loaded model compute over our pools.
    """

    model_type: str
    shape: Callable[[Any, torch.dtype], ModelShape]
    kv_specs: Callable[[Any], tuple[KVSpec, ...]]
    state_specs: Callable[[Any, torch.dtype], tuple[StateSpec, ...]]
    install: Callable[[torch.nn.Module], None]
