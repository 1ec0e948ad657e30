"""Runtimes on small real models, built on the spot."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, GraniteMoeHybridConfig

from agentcache.config import CacheConfig
from agentcache.engine.tiny_hybrid import build, hybrid_path, tiny_hybrid_config
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from agentcache.types import BackendName


def micro_config(**changes: Any) -> GraniteMoeHybridConfig:
    """`tiny-hybrid` at four layers of width 64: a forward pass takes a few milliseconds."""
    config = tiny_hybrid_config()
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    settings: dict[str, Any] = {
        **config.to_dict(),
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "shared_intermediate_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        **changes,
    }
    return GraniteMoeHybridConfig(**settings)


@cache
def micro_model() -> Any:
    """The micro model; runtimes only read it, so all of them may share it."""
    return build(micro_config())


@cache
def tokenizer() -> Any:
    """The embedded tokenizer, with its chat template."""
    return AutoTokenizer.from_pretrained(hybrid_path("tiny-hybrid"))


def micro_runtime(
    *,
    poison: bool = True,
    verify: bool | float = False,
    seed: int = 0,
    backend: BackendName = "auto",
    **cache_settings: Any,
) -> Runtime:
    """A runtime on the micro model; freed memory is filled with NaN."""
    settings = {"budget": "16MiB", "page_size": 4, "prefill_chunk": 32, **cache_settings}
    return Runtime(
        micro_model(),
        tokenizer(),
        cache=CacheConfig(**settings),
        verify=verify,
        poison=poison,
        seed=seed,
        backend=backend,
    )


def idle_counts(runtime: Runtime) -> dict[str, int]:
    """What has to be the same before a call and after it failed."""
    stats = runtime.stats()
    return {
        "leases": stats["leases"],
        "running": stats["bytes"]["running"]["used"],
        "full": stats["bytes"]["full"]["used"],
        "state": stats["bytes"]["state"]["used"],
    }
