"""In-process runtime for hybrid language models: agent sessions hold a handle on one radix cache.

The names below are for users and are loaded when first asked for, so that `import agentcache` stays
light. Code inside the package imports the submodules instead.

>>> import agentcache
>>> agentcache.CacheConfig(budget="1MiB").budget_bytes
1048576
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentcache.config import CacheConfig
    from agentcache.errors import (
        AgentCacheError,
        AmbiguousTip,
        BudgetTooSmall,
        ConfigError,
        HistoryMismatch,
        InvalidRequest,
        LeaseError,
        ModelError,
        ModelNotFound,
        ModelTooLarge,
        PromptTooLong,
        RequestCancelled,
        RequestError,
        RequestTooLarge,
        RuntimeClosed,
        SessionClosed,
        SessionError,
        StoreDamaged,
        StoreError,
        StoreUnavailable,
        StoreVersion,
        TraceDecodeError,
        TraceError,
        TraceFormatError,
        TraceNotFound,
        UnknownPolicy,
        UnknownTip,
        UnsupportedModel,
        UnsupportedOption,
    )
    from agentcache.events import Event
    from agentcache.runtime import Runtime
    from agentcache.session import Delta, MissReport, Session, Turn, TurnStream
    from agentcache.store.trajectories import Store
    from agentcache.types import TokenLogprob, Usage

__all__ = [
    "AgentCacheError",
    "AmbiguousTip",
    "BudgetTooSmall",
    "CacheConfig",
    "ConfigError",
    "Delta",
    "Event",
    "HistoryMismatch",
    "InvalidRequest",
    "LeaseError",
    "MissReport",
    "ModelError",
    "ModelNotFound",
    "ModelTooLarge",
    "PromptTooLong",
    "RequestCancelled",
    "RequestError",
    "RequestTooLarge",
    "Runtime",
    "RuntimeClosed",
    "Session",
    "SessionClosed",
    "SessionError",
    "Store",
    "StoreDamaged",
    "StoreError",
    "StoreUnavailable",
    "StoreVersion",
    "TokenLogprob",
    "TraceDecodeError",
    "TraceError",
    "TraceFormatError",
    "TraceNotFound",
    "Turn",
    "TurnStream",
    "UnknownPolicy",
    "UnknownTip",
    "UnsupportedModel",
    "UnsupportedOption",
    "Usage",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "CacheConfig": "agentcache.config",
    "Delta": "agentcache.session",
    "Event": "agentcache.events",
    "MissReport": "agentcache.session",
    "Runtime": "agentcache.runtime",
    "Session": "agentcache.session",
    "Store": "agentcache.store.trajectories",
    "TokenLogprob": "agentcache.types",
    "Turn": "agentcache.session",
    "TurnStream": "agentcache.session",
    "Usage": "agentcache.types",
}
"""Where a public name lives; names not listed are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES.get(name, "agentcache.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
