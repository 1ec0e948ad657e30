"""Stop strings looked for in a stream of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, however it is cut.

    The match that is complete first wins, among those the one that begins first: so the outcome is
    the same as for text that arrives character by character. Raises InvalidRequest for an empty
    stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise InvalidRequest(f"stop is the string {stops!r}; give a list of strings")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise InvalidRequest(
                    f"stop string {index} is {stop!r}; give texts of at least one character"
                )
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found; None so far."""
        return self._matched

    def push(self, text: str) -> tuple[str, bool]:
        """(text safe to emit, whether a stop string was found).

        Text that could begin a stop string is held back; once one was found nothing more comes out.
        """
        if self._matched is not None:
            return "", True
        pending = self._held + text
        found = self._first_match(pending)
        if found is not None:
            start, self._matched = found
            self._held = ""
            return pending[:start], True
        keep = self._undecided_len(pending)
        safe = pending[: len(pending) - keep]
        self._held = pending[len(safe) :]
        return safe, False

    def flush(self) -> str:
        """Text that was held back when the stream ended without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """(where it begins, which one) of the match that is complete first."""
        starts = [(text.find(stop), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _undecided_len(self, text: str) -> int:
        """Length of the longest suffix that is the beginning of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
