"""What sessions hand to a store, and how: the contract between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentcache.types import FinishReason, IntArray, Usage

__all__ = ["FinishedTurn", "Recorder", "SessionKey"]


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Which session of a runtime. generation: unique in it; an id opened again has another."""

    id: str
    tenant: str | None
    parent: str | None
    generation: int


@dataclass(frozen=True, slots=True, eq=False)
class FinishedTurn:
    """A turn as its session saw it end. Nothing in it changes any more.

    session_closed: it was closed while the turn ran. tip, index: where the session stands now.
    history: stands for the trajectory after the turn, `history_ids`; after: for the one that the
    prompt went on from, of which it shares the first `shared_len` tokens. Both are only held
    weakly, and compared by identity. answer: None where no reply was asked for. miss: the report as
    JSON, worked out when called.
    """

    session: SessionKey
    session_closed: bool
    tip: int | None
    index: int
    history: object
    after: object | None
    shared_len: int
    prompt_ids: IntArray
    output_ids: IntArray
    history_ids: IntArray
    messages: Sequence[Mapping[str, Any]]
    answer: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    finish_reason: FinishReason
    usage: Usage
    miss: Callable[[], Mapping[str, Any] | None]


class Recorder(Protocol):
    """Takes the turns of one runtime. Safe from any thread."""

    def is_ready(self, session: SessionKey) -> bool:
        """Whether a call on that session may begin: its earlier turns are written, and not too many
        of others wait."""
        ...

    def wait(self, session: SessionKey) -> None:
        """Return when `is_ready`. For callers' threads; never called on the engine's."""
        ...

    def add(self, turn: FinishedTurn) -> None:
        """Have a turn written some time soon. Does not wait and does not fail."""
        ...

    def close_session(self, session: SessionKey) -> None:
        """Note that a session is over. Does not wait and does not fail."""
        ...

    def flush(self) -> None:
        """Return when all that was added so far is written, or has failed to be."""
        ...

    def counts(self) -> dict[str, int]:
        """Turns written, turns that could not be written, and turns that wait."""
        ...

    def close(self) -> None:
        """Write what waits and end. Twice is the same as once."""
        ...
