"""The sessions that requests have named: which are open, what they did lately."""

from __future__ import annotations

from collections import OrderedDict, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from agentcache.integrations.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache import Runtime, Session, Turn
    from agentcache.integrations.server.threads import Threads

__all__ = ["SessionTable", "TurnNote", "Used"]

_KEPT_TURNS = 64

Key = tuple[str | None, str]


@dataclass(slots=True)
class TurnNote:
    """One finished turn.

    number: of the turns noted in its session, from 1. index: how many turns lead to its end. miss:
    in words; None where all but the last few tokens was reused.
    """

    number: int
    index: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    ttft_s: float
    miss: str | None = None
    report: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class _Entry:
    session: Session
    num_running: int = 0
    turns: deque[TurnNote] = field(default_factory=lambda: deque(maxlen=_KEPT_TURNS))

    def next_number(self) -> int:
        """The number of the next turn that is noted."""
        return self.turns[-1].number + 1 if self.turns else 1


class Used:
    """A session while a call uses it."""

    def __init__(self, session: Session, entry: _Entry | None, threads: Threads) -> None:
        self.session = session
        self._entry = entry
        self._threads = threads

    def note(self, turn: Turn) -> None:
        """Keep what the turn cost. Why it cost that is worked out after the answer."""
        if self._entry is None:
            return  # nobody can ask for it
        usage = turn.usage
        note = TurnNote(
            number=self._entry.next_number(),
            index=turn.index,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            computed_tokens=usage.computed_tokens,
            output_tokens=usage.output_tokens,
            ttft_s=usage.ttft_s,
        )
        self._entry.turns.append(note)
        self._threads.later(lambda: _explain(note, turn))


def _explain(note: TurnNote, turn: Turn) -> None:
    miss = turn.miss
    if miss is not None:
        note.miss, note.report = str(miss), miss.to_json()


class SessionTable:
    """Named sessions by tenant and id, least recently used first. On the event loop.

    A session that is not in use is closed when there are more than `limit`: its tokens still hit by
    content until they are evicted.
    """

    def __init__(self, runtime: Runtime, threads: Threads, limit: int) -> None:
        self._runtime = runtime
        self._threads = threads
        self._limit = limit
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def use(self, tenant: str | None, id: str | None) -> Iterator[Used]:
        """The session of that id, opened if need be; without an id one that ends with the block."""
        if id is None:
            session = self._runtime.session(tenant=tenant)
            try:
                yield Used(session, None, self._threads)
            finally:
                session.close(wait=False)
            return
        entry = self._entries.get((tenant, id))
        if entry is None or entry.session.closed:
            entry = self._entries[tenant, id] = _Entry(self._runtime.session(id, tenant=tenant))
        self._entries.move_to_end((tenant, id))
        entry.num_running += 1
        self._make_room()
        try:
            yield Used(entry.session, entry, self._threads)
        finally:
            entry.num_running -= 1

    def adopt(self, tenant: str | None, session: Session) -> None:
        """Keep a session that was forked from one of these; a call may have named it already."""
        entry = self._entries.get((tenant, session.id))
        if entry is None or entry.session.closed:
            self._entries[tenant, session.id] = _Entry(session)
            self._make_room()

    def _make_room(self) -> None:
        """Close the sessions that were not used for longest, where there are too many."""
        too_many = len(self._entries) - self._limit
        if too_many > 0:
            idle = (key for key, entry in self._entries.items() if not entry.num_running)
            for key in list(islice(idle, too_many)):
                self._entries.pop(key).session.close(wait=False)

    def of_tenant(self, tenant: str | None) -> list[Session]:
        """The tenant's open sessions, most recently used last."""
        return [
            entry.session
            for (owner, _), entry in self._entries.items()
            if owner == tenant and not entry.session.closed
        ]

    def find(self, tenant: str | None, id: str) -> Session:
        """An open session. Raises ApiError 404."""
        return self._found(tenant, id).session

    def turns(self, tenant: str | None, id: str) -> list[TurnNote]:
        """Its last turns, oldest first. Raises ApiError 404."""
        return list(self._found(tenant, id).turns)

    def forget(self, tenant: str | None, id: str) -> Session:
        """Take a session out, for closing. Raises ApiError 404."""
        entry = self._found(tenant, id)
        del self._entries[tenant, id]
        return entry.session

    def everything(self) -> list[tuple[str | None, Session, list[TurnNote]]]:
        """All open sessions with their tenants and last turns."""
        return [
            (tenant, entry.session, list(entry.turns))
            for (tenant, _), entry in self._entries.items()
            if not entry.session.closed
        ]

    def _found(self, tenant: str | None, id: str) -> _Entry:
        entry = self._entries.get((tenant, id))
        if entry is None or entry.session.closed:
            raise ApiError(404, f"no open session {id[:80]!r}", param="session_id")
        return entry
