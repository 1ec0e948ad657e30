"""What a simulation is to do, and what it found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentcache.errors import ConfigError
from agentcache.replay.results import percentile
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ANY_ADMISSION", "Setup", "SimResult"]

ANY_ADMISSION = "any"
"""The admission of what takes its checkpoints where it likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings of one run.

    policy, admission: by name. budget_bytes: None for no limit; budget_share: what share of the
    trace's need that is, where it was given as one. page_size: tokens of a page of KV. hints:
    whether sessions, marks and all else that a handle knows are told; without them requests come as
    to a server. charge_running: whether running requests take their memory out of the budget, as in
    a runtime; chunk_len is then the most tokens of one pass, and captures the most checkpoints.
    seed: of what a policy draws.

    Raises ConfigError for a value that cannot work.
    """

    policy: str = "auto"
    admission: str = "structural"
    budget_bytes: int | None = None
    budget_share: float | None = None
    page_size: int = 16
    hints: bool = True
    charge_running: bool = False
    chunk_len: int = 512
    captures: int = 2
    seed: int = 0

    @property
    def block_len(self) -> int | None:
        """Tokens between the checkpoints of an admission that takes them at every block."""
        name, _, length = self.admission.partition(":")
        if name != "every-block":
            return None
        return int(length) if length.isdigit() and int(length) else 16

    def __post_init__(self) -> None:
        for name in ("page_size", "chunk_len"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; it has to be at least 1")
        if self.budget_bytes is not None and self.budget_bytes < 1:
            raise ConfigError(f"a budget of {self.budget_bytes} bytes; give at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """What one run did.

    cached: tokens reused, per request; None where it was refused. computed: those left to compute.
    flops_saved: share of the prefill FLOPs. peak_bytes: most bytes held between two requests, or at
    any time where running requests count. evictions: entries by kind. filed: checkpoints, and
    tokens of KV. reused: how much of that was reused at least once. held: pages held at the end, by
    kind. policy_s, cache_s: seconds of CPU that the policy took, and all of the cache. most_tokens:
    set where this is no run, but a number of tokens that no run can reuse more than.
    """

    trace: str
    setup: Setup
    prompt_tokens: int
    num_requests: int
    cached: tuple[int | None, ...] = ()
    computed: tuple[int, ...] = ()
    flops_saved: float = 0.0
    peak_bytes: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict)
    filed: Mapping[str, int] = field(default_factory=dict)
    reused: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    policy_s: float = 0.0
    cache_s: float = 0.0
    most_tokens: int | None = None

    @property
    def refused(self) -> int:
        """Requests that did not fit."""
        return sum(each is None for each in self.cached)

    @property
    def cached_tokens(self) -> int:
        if self.most_tokens is not None:
            return self.most_tokens
        return sum(each or 0 for each in self.cached)

    @property
    def hit_rate(self) -> float:
        """Reused over prompt tokens; 0 without prompts."""
        return _ratio(self.cached_tokens, self.prompt_tokens)

    def reuse(self, kind: Kind) -> float:
        """Which share of what was filed was reused at least once."""
        return _ratio(self.reused.get(kind.value, 0), self.filed.get(kind.value, 0))

    def to_json(self) -> dict[str, Any]:
        """The run as plain JSON values; rates are fractions, and what only a run has is null where
        this is none."""
        setup = self.setup
        row: dict[str, Any] = {
            "trace": self.trace,
            "policy": setup.policy,
            "admission": setup.admission,
            "hints": setup.hints,
            "budget_bytes": setup.budget_bytes,
            "budget_share": setup.budget_share,
            "page_size": setup.page_size,
            "requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hit_rate": self.hit_rate,
        }
        run = {
            "refused": self.refused,
            "flops_saved": self.flops_saved,
            "computed_p50": percentile(self.computed, 50),
            "computed_p95": percentile(self.computed, 95),
            "peak_bytes": self.peak_bytes,
            "evictions": sum(self.evictions.values()),
            "state_reuse": self.reuse(Kind.STATE),
            "kv_reuse": self.reuse(Kind.FULL),
            "cpu_us_per_request": 1e6 * _ratio(self.policy_s, self.num_requests),
            "cache_us_per_request": 1e6 * _ratio(self.cache_s, self.num_requests),
        }
        is_run = self.most_tokens is None
        return row | (run if is_run else dict.fromkeys(run))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
