"""Sessions by id: their tips, who is whose parent, and when a session is over."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from agentcache.errors import AmbiguousTip, SessionClosed, SessionError, UnknownTip

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.sessions.refs import SessionRef

__all__ = ["MAX_TIPS", "Registry", "SessionRecord", "Tip"]

MAX_TIPS = 64
"""Most tips of one session; each costs a comparison per call, and its history."""

H = TypeVar("H", bound=Sized)


@dataclass(frozen=True, slots=True, eq=False)
class Tip(Generic[H]):
    """One end of a session's branches: the history up to a turn's end. Immutable but for its mark.

    number: unique within the session. index: how many turns lead here. ref: what it holds in the
    tree while it is a tip.
    """

    number: int
    index: int
    history: H
    ref: SessionRef
    parent: Tip[H] | None

    def ancestor(self, index: int) -> Tip[H]:
        """The tip at the end of turn `index` on this tip's path. Raises UnknownTip."""
        tip: Tip[H] | None = self
        while tip is not None and tip.index > index:
            tip = tip.parent
        if tip is None or tip.index != index:
            raise UnknownTip(f"there is no turn {index}; this path has turns 1 to {self.index}")
        return tip


@dataclass(slots=True, eq=False)
class SessionRecord(Generic[H]):
    """A session's state. Callers on many threads share it: every method takes its lock.

    A closed record stays closed; its id opened again gets a new record of the next generation, so a
    late finish of an old call cannot touch the new session.
    """

    id: str
    tenant: str | None
    generation: int
    parent: str | None = None
    priority: int = 0
    shared_head: bool = False
    expect_s: float | None = None
    closed: bool = False
    announced: bool = False
    forks: int = 0
    _tips: dict[int, Tip[H]] = field(default_factory=dict)  # the one used last at the end
    _numbers: int = 0
    _calls: int = 0
    _prompt_tokens: int = 0
    _cached_tokens: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def check_open(self) -> None:
        """Raises SessionClosed."""
        if self.closed:
            raise SessionClosed(
                f"session {self.id!r} is closed; open the id again for a new, empty session"
            )

    def tips(self) -> tuple[Tip[H], ...]:
        """The standing tips, oldest first."""
        with self._lock:
            return tuple(self._tips[number] for number in sorted(self._tips))

    def tip(self, number: int | None) -> Tip[H] | None:
        """The named tip, or the only one; None before the first turn.

        Raises UnknownTip, or AmbiguousTip where several stand and none is named.
        """
        with self._lock:
            standing = sorted(self._tips)
            if number is not None:
                if number not in self._tips:
                    raise UnknownTip(f"no tip {number}; the session stands at {standing}")
                return self._tips[number]
            if len(standing) > 1:
                raise AmbiguousTip(
                    f"session {self.id!r} stands at {len(standing)} tips; "
                    f"pass tip= one of {standing}"
                )
            return self._tips[standing[0]] if standing else None

    def use(self, tip: Tip[H]) -> None:
        """A call goes on from the tip, which makes it the one used last."""
        with self._lock:
            if tip.number in self._tips:
                self._tips[tip.number] = self._tips.pop(tip.number)

    def advance(
        self, base: Tip[H] | None, shared_len: int, history: H, ref: SessionRef
    ) -> tuple[Tip[H] | None, list[SessionRef]]:
        """A turn that began at tip `base` ended. Returns the new tip and the marks to leave.

        The new tip takes the place of `base`, also where it shares only the first `shared_len`
        tokens of it; its path goes on from the last turn that it shares whole. Parallel turns on
        one tip leave one tip each, up to `MAX_TIPS`: beyond them the tip that no call has used for
        longest is none any more. On a session closed meanwhile there is no new tip, and the turn's
        own mark is to be left.
        """
        with self._lock:
            if self.closed:
                return None, [ref]
            self._numbers += 1
            parent = base
            while parent is not None and len(parent.history) > shared_len:
                parent = parent.parent
            index = 1 if parent is None else parent.index + 1
            tip = Tip(self._numbers, index, history, ref, parent)
            return tip, self._stand(tip, base)

    def stand_at(
        self, leaving: Tip[H] | None, target: Tip[H] | None, ref: SessionRef | None
    ) -> list[SessionRef]:
        """Stand at `target` with mark `ref` instead of `leaving`; the marks to leave."""
        with self._lock:
            self.check_open()
            moved = None
            if target is not None:
                assert ref is not None
                self._numbers += 1
                moved = Tip(self._numbers, target.index, target.history, ref, target.parent)
            return self._stand(moved, leaving)

    def _stand(self, tip: Tip[H] | None, instead_of: Tip[H] | None) -> list[SessionRef]:
        """One tip in place of another; the marks to leave."""
        gone = None if instead_of is None else self._tips.pop(instead_of.number, None)
        left = [] if gone is None else [gone.ref]
        if tip is not None:
            self._tips[tip.number] = tip
        while len(self._tips) > MAX_TIPS:
            left.append(self._tips.pop(next(iter(self._tips))).ref)
        return left

    def count(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Add one finished call."""
        with self._lock:
            self._calls += 1
            self._prompt_tokens += prompt_tokens
            self._cached_tokens += cached_tokens

    def counts(self) -> dict[str, int]:
        """Calls and tokens so far."""
        with self._lock:
            return {
                "calls": self._calls,
                "prompt_tokens": self._prompt_tokens,
                "cached_tokens": self._cached_tokens,
            }

    def next_fork_id(self) -> str:
        """A fresh id for a fork that was given none."""
        with self._lock:
            self.forks += 1
            return f"{self.id}/fork-{self.forks}"

    def close(self) -> list[SessionRef]:
        """No more turns; the marks to leave. Twice is the same as once."""
        with self._lock:
            self.closed = True
            refs = [tip.ref for tip in self.tips()]
            self._tips.clear()
            return refs


class Registry(Generic[H]):
    """All sessions of a runtime by (tenant, id)."""

    def __init__(self) -> None:
        self._records: dict[tuple[str | None, str], SessionRecord[H]] = {}
        self._lock = threading.RLock()  # a handle may be collected while it is held
        self._generation = 0

    def open(
        self,
        id: str | None,
        tenant: str | None,
        parent: str | None,
        priority: int,
        shared_head: bool | None = None,
    ) -> SessionRecord[H]:
        """The open session of that id, or a new one; without an id always a new one.

        A priority given for an open session is its priority from now on. Raises SessionError for
        another parent than it has, or another `shared_head`.
        """
        with self._lock:
            self._generation += 1
            name = self._fresh(f"session-{self._generation}", tenant) if id is None else id
            record = self._records.get((tenant, name))
            if record is not None and not record.closed:
                if parent not in (None, record.parent):
                    raise SessionError(
                        f"session {name!r} is open with parent {record.parent!r}, not {parent!r}"
                    )
                if shared_head not in (None, record.shared_head):
                    raise SessionError(
                        f"session {name!r} is open with shared_head={record.shared_head}; "
                        "close it first"
                    )
                record.priority = priority or record.priority
            else:
                record = SessionRecord(
                    name, tenant, self._generation, parent, priority, bool(shared_head)
                )
                self._records[tenant, name] = record
            return record

    def _fresh(self, stem: str, tenant: str | None) -> str:
        """`stem`, or the first numbered variant of it that is no session's id."""
        names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
        return next(name for name in names if (tenant, name) not in self._records)

    def fork(self, source: SessionRecord[H], id: str | None) -> SessionRecord[H]:
        """A new session with `source` as its parent. Raises SessionError if the id is open."""
        with self._lock:
            name = self._fresh(source.next_fork_id(), source.tenant) if id is None else id
            child = self.create(name, source.tenant, source.id, source.priority)
            child.shared_head = source.shared_head
            return child

    def create(
        self, id: str, tenant: str | None, parent: str | None, priority: int
    ) -> SessionRecord[H]:
        """A new session. Raises SessionError if the id is open."""
        with self._lock:
            present = self._records.get((tenant, id))
            if present is not None and not present.closed:
                raise SessionError(f"session {id!r} is already open; choose another id")
            self._generation += 1
            record: SessionRecord[H] = SessionRecord(id, tenant, self._generation, parent, priority)
            self._records[tenant, id] = record
            return record

    def forget(self, record: SessionRecord[H]) -> None:
        """Drop a closed record."""
        with self._lock:
            key = (record.tenant, record.id)
            if self._records.get(key) is record:
                del self._records[key]

    def __iter__(self) -> Iterator[SessionRecord[H]]:
        with self._lock:
            return iter(list(self._records.values()))
