"""When a factor of a policy is tuned, and on which requests."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.policy.base import Served

__all__ = ["ALPHAS", "AlphaTuner", "Tuning"]

ALPHAS = (0.0, *(0.1 * 2 ** (step / 2) for step in range(20)))
"""The factors that are tried: from 0.1 to 72, each 1.4 times the one before.

Most work per byte freed has a long checkpoint in the middle, which frees itself alone: beside it
entries that give up their KV all lie below a few hundredths, so it takes a large factor to tell
them apart.
"""


class AlphaTuner(Protocol):
    """Finds the factor that would have served a log of requests best."""

    def start(self, log: Sequence[Served]) -> None:
        """Begin a search, unless one is running. Must not keep a runtime's caller waiting."""
        ...

    def result(self) -> float | None:
        """What a search has found, once; None while it runs, and where none was started."""
        ...


class Tuning:
    """A log of the latest requests, and when a tuner looks at it.

    The bootstrap window ends with `window` times as many requests as had come by the first
    eviction, and `fewest` after it at least: in less, what comes back at all has hardly done so.
    Once more is tuned when the hit rate has moved by more than `drift` since, and as many requests
    as the log held have come. The log is bounded in requests and in tokens.
    """

    def __init__(
        self,
        tuner: AlphaTuner,
        *,
        window: int = 5,
        most_requests: int = 500,
        most_tokens: int = 8_000_000,
        fewest: int = 32,
        drift: float = 0.1,
    ) -> None:
        self._tuner = tuner
        self._window = window
        self._most_requests = most_requests
        self._most_tokens = most_tokens
        self._fewest = fewest
        self._drift = drift
        self._log: deque[Served] = deque()
        self._log_tokens = 0
        self._num_served = 0
        self._tune_at: int | None = None
        self._rate = _HitRate()
        self._tuned_rate: float | None = None

    def evicted(self) -> None:
        """An entry had to leave."""
        if self._tune_at is None:
            self._tune_at = max(self._window * self._num_served, self._num_served + self._fewest)

    def served(self, request: Served) -> float | None:
        """Take note of a request; the factor that was found meanwhile, if there is news."""
        self._note(replace(request, tokens=request.tokens.copy()))
        self._num_served += 1
        self._rate.add(request.cached_len, request.prompt_len)
        if self._is_due():
            self._tuned_rate = self._rate.value
            self._tune_at = self._num_served + max(len(self._log), self._fewest)
            self._tuner.start(tuple(self._log))
        return self._tuner.result()

    def _is_due(self) -> bool:
        if self._tune_at is None or self._num_served < self._tune_at:
            return False
        if self._tuned_rate is None:
            return True
        return abs(self._rate.value - self._tuned_rate) > self._drift

    def _note(self, request: Served) -> None:
        self._log.append(request)
        self._log_tokens += len(request.tokens)
        while len(self._log) > self._most_requests or (
            self._log_tokens > self._most_tokens and len(self._log) > 1
        ):
            self._log_tokens -= len(self._log.popleft().tokens)


class _HitRate:
    """Reused over asked tokens, of about the latest 64 requests."""

    _KEPT = 1 - 1 / 64

    def __init__(self) -> None:
        self._cached = self._asked = 0.0

    @property
    def value(self) -> float:
        return self._cached / self._asked if self._asked else 0.0

    def add(self, cached: int, asked: int) -> None:
        self._cached = self._KEPT * self._cached + cached
        self._asked = self._KEPT * self._asked + asked
