"""Time, passed in: what reads a clock takes one as an argument."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float:
        """Seconds since some fixed point; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    now = staticmethod(time.perf_counter)


class ManualClock:
    """A clock that moves only when told, for tests and simulations.

    >>> clock = ManualClock()
    >>> clock.advance(2.5)
    >>> clock.now()
    2.5
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` >= 0."""
        assert seconds >= 0
        self._now += seconds
