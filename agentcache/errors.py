"""Every error this package raises, as one tree.

AgentCacheError
├── ConfigError                 a setting that cannot work, found at start
│   ├── BudgetTooSmall          the byte budget cannot hold one working request
│   ├── UnsupportedOption       an option this version or this combination cannot honour
│   └── UnknownPolicy           a policy name nobody registered
├── ModelError
│   ├── ModelNotFound           neither an embedded name, a local folder, nor a cached Hub id
│   ├── ModelTooLarge           weights and cache budget do not fit into memory
│   └── UnsupportedModel        a model that is not proven, or cannot work
├── RequestError                one call cannot be served; others are not affected
│   ├── InvalidRequest          empty prompt, ids outside the vocabulary, bad sampling arguments
│   ├── PromptTooLong           longer than the model's limit
│   ├── RequestTooLarge         does not fit the byte budget even alone
│   └── RequestCancelled        the caller closed the stream or cancelled the task
├── SessionError
│   ├── SessionClosed           a call on a closed handle
│   ├── AmbiguousTip            several tips stand; name one
│   ├── UnknownTip              a tip or turn the session does not have
│   └── HistoryMismatch         `chat` on a history that `generate` made
├── TraceError                  a recorded trajectory cannot be read
│   ├── TraceNotFound
│   ├── TraceDecodeError        truncated, not JSON or not UTF-8: carries the offset
│   └── TraceFormatError        JSON of an unknown or malformed trajectory format
├── StoreError                  a database of turns cannot be used
│   ├── StoreUnavailable        cannot be reached, is locked, or its disk is full
│   ├── StoreDamaged            corrupt, or no database at all
│   └── StoreVersion            a schema of another version, or of another program
├── LeaseError                  a lease or lock used against its contract (a defect of the caller)
└── RuntimeClosed               the runtime was closed, or its engine thread ended
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "AgentCacheError",
    "AmbiguousTip",
    "BudgetTooSmall",
    "ConfigError",
    "HistoryMismatch",
    "InvalidRequest",
    "LeaseError",
    "ModelError",
    "ModelNotFound",
    "ModelTooLarge",
    "PromptTooLong",
    "RequestCancelled",
    "RequestError",
    "RequestTooLarge",
    "RuntimeClosed",
    "SessionClosed",
    "SessionError",
    "StoreDamaged",
    "StoreError",
    "StoreUnavailable",
    "StoreVersion",
    "TraceDecodeError",
    "TraceError",
    "TraceFormatError",
    "TraceNotFound",
    "UnknownPolicy",
    "UnknownTip",
    "UnsupportedModel",
    "UnsupportedOption",
]


class AgentCacheError(Exception):
    """Base of every error raised by this package."""


class ConfigError(AgentCacheError):
    """A setting that cannot work."""


class BudgetTooSmall(ConfigError):
    """The budget cannot hold one working request.

    `budget_bytes` is what was given, `minimum_bytes` the smallest workable budget.
    """

    def __init__(self, budget_bytes: int, minimum_bytes: int) -> None:
        super().__init__(
            f"budget of {budget_bytes} bytes is below the smallest workable budget of "
            f"{minimum_bytes} bytes for this model; raise the budget to at least that"
        )
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes


class UnsupportedOption(ConfigError):
    """An option this version or this combination of options cannot honour."""


class UnknownPolicy(ConfigError):
    """A policy name that is not registered."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(f"unknown policy {name!r}; known policies: {', '.join(sorted(known))}")
        self.name = name


class ModelError(AgentCacheError):
    """A model cannot be used."""


class ModelNotFound(ModelError):
    """Neither an embedded name, a local folder, nor a Hub id in the local cache."""


class ModelTooLarge(ModelError):
    """Weights and cache budget do not fit into the memory that is available; nothing was loaded."""

    def __init__(self, weight_bytes: int, cache_bytes: int, available_bytes: int) -> None:
        super().__init__(
            f"the model's weights take {weight_bytes} bytes and the cache {cache_bytes}, but only "
            f"{available_bytes} bytes of memory are available; lower the budget, load in a smaller "
            "dtype, free memory, or take a smaller model"
        )
        self.weight_bytes = weight_bytes
        self.cache_bytes = cache_bytes
        self.available_bytes = available_bytes


class UnsupportedModel(ModelError):
    """A model that is not proven, which `unproven=True` would admit, or one that cannot work."""


class RequestError(AgentCacheError):
    """One call cannot be served; the runtime and other calls go on."""


class InvalidRequest(RequestError):
    """The arguments of a call make no sense."""


class PromptTooLong(RequestError):
    """Prompt and reply are longer than the model allows."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"prompt and reply need {num_tokens} tokens, the model's limit is {limit}; "
            "shorten the messages or lower max_new_tokens"
        )
        self.num_tokens = num_tokens
        self.limit = limit


class RequestTooLarge(RequestError):
    """The request does not fit the byte budget even with everything idle evicted."""

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"the request needs {needed_bytes} bytes, the budget leaves {budget_bytes} for it; "
            "raise the budget or shorten the prompt"
        )
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes


class RequestCancelled(RequestError):
    """The caller closed the stream or cancelled the task; what it held was given back."""


class SessionError(AgentCacheError):
    """A session handle was used in a way its state does not allow."""


class SessionClosed(SessionError):
    """The handle was closed; open the id again for a new, empty session."""


class AmbiguousTip(SessionError):
    """The session stands at several tips and the call did not name one."""


class UnknownTip(SessionError):
    """The session has no such tip or turn."""


class HistoryMismatch(SessionError):
    """`chat` needs a history of messages; this one was made by `generate`."""


class TraceError(AgentCacheError):
    """A recorded trajectory cannot be read. `path`, and `line` or `offset` where known."""

    def __init__(
        self,
        path: str | Path,
        problem: str,
        remedy: str,
        *,
        line: int | None = None,
        offset: int | None = None,
    ) -> None:
        where = str(path)
        if line is not None:
            where += f", line {line}"
        if offset is not None:
            where += f", offset {offset}"
        super().__init__(f"{where}: {problem}; {remedy}")
        self.path = str(path)
        self.problem = problem
        self.remedy = remedy
        self.line = line
        self.offset = offset


class TraceNotFound(TraceError):
    """No such file or folder."""


class TraceDecodeError(TraceError):
    """Truncated, not JSON, or not UTF-8."""


class TraceFormatError(TraceError):
    """JSON, but no trajectory format that is known, or one with wrong types."""


class StoreError(AgentCacheError):
    """A database of turns cannot be used. Raised at start and by readers, never by a call."""


class StoreUnavailable(StoreError):
    """It cannot be reached, is locked by another program, or its disk is full."""


class StoreDamaged(StoreError):
    """It is corrupt, or no database at all."""


class StoreVersion(StoreError):
    """Its schema is of another version, or of another program."""


class LeaseError(AgentCacheError):
    """A lease or a lock was released twice or used after its release."""


class RuntimeClosed(AgentCacheError):
    """The runtime was closed, or its engine thread ended."""
