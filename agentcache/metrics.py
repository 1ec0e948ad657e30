"""Counters that rooms add to and `stats()` reads; one owner per runtime, no globals."""

from __future__ import annotations

from collections import Counter, defaultdict

__all__ = ["Metrics"]


class Metrics:
    """Named monotonic counters, grouped: `add("evictions", "state")`.

    >>> metrics = Metrics()
    >>> metrics.add("filed", "state", 2)
    >>> metrics.group("filed")
    {'state': 2}
    """

    def __init__(self) -> None:
        self._groups: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, group: str, name: str, amount: int = 1) -> None:
        """Add `amount` to one counter."""
        self._groups[group][name] += amount

    def get(self, group: str, name: str) -> int:
        """One counter; 0 if nothing was ever added."""
        return self._groups.get(group, Counter())[name]

    def group(self, group: str) -> dict[str, int]:
        """All counters of one group."""
        return dict(self._groups.get(group, Counter()))
