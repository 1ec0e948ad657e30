"""Which session a call belongs to: by name, by a graph's thread, or by what it says.

A name stands for one session and its branches. A branch is a session of its own, a child of the
first one, with one line of descent: parallel calls, sub-agents and forks of a thread each have
theirs, so that none takes another's place.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentcache import AmbiguousTip, InvalidRequest, RuntimeClosed
from agentcache.integrations._openai import read_session_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from agentcache import Session

__all__ = ["Place", "SessionBook", "Visit", "namespace_without_ids", "place_of"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call comes from.

    key: the session's name; None where nobody gave one. thread: of the graph. step: the checkpoint
    and the task it comes from, the same again when the task is run again.
    """

    key: str | None = None
    thread: str | None = None
    step: tuple[str, str] | None = None

    @property
    def checkpoint_id(self) -> str | None:
        return None if self.step is None else self.step[0]


def place_of(session_id: Any = None, thread_id: Any = None) -> Place:
    """The place of the call that is being made: in a running graph, or where the caller says."""
    info = _execution_info()
    if info is not None:
        step = (info.checkpoint_id, info.checkpoint_ns)
        thread = info.thread_id if thread_id is None else thread_id
        namespace = namespace_without_ids(info.checkpoint_ns)
    else:
        step, thread, namespace = None, thread_id, ""
    if thread is not None:
        thread = _checked_id(thread, "thread_id")
    if session_id is not None:
        return Place(_checked_id(session_id, "session_id"), thread, step)
    return Place(None if thread is None else f"{thread}:{namespace}", thread, step)


def namespace_without_ids(checkpoint_ns: str) -> str:
    """A checkpoint namespace without the ids of its tasks, so the same in every run.

    >>> namespace_without_ids("tools:6aae3fd6-b18f|model:c189bb33-006d")
    'tools|model'
    """
    return "|".join(part.partition(":")[0] for part in checkpoint_ns.split("|"))


def _execution_info() -> Any:
    """What langgraph says of the running task; None outside of a graph."""
    if "langgraph.runtime" not in sys.modules:
        return None  # then no graph can be running
    from langgraph.runtime import get_runtime

    try:
        return getattr(get_runtime(), "execution_info", None)
    except (RuntimeError, KeyError):
        return None


def _checked_id(value: Any, name: str) -> str:
    text = read_session_id(str(value), name)
    if not text:
        raise InvalidRequest(f"{name} is empty; give a name or leave it out")
    return text


@dataclass(slots=True, eq=False)
class Branch:
    """One line of descent. known: digests of its messages, reply included. turns: by checkpoint."""

    session: Session
    family: _Family
    known: tuple[int, ...] = ()
    step: tuple[str, str] | None = None
    turns: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    used_at: int = 0

    def shared_len(self, given: tuple[int, ...]) -> int:
        """How many leading messages are the same."""
        pairs = enumerate(zip(self.known, given, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.known), len(given)))

    def is_begin_of(self, given: tuple[int, ...]) -> bool:
        return 0 < len(self.known) < len(given) and given[: len(self.known)] == self.known

    def is_left_by(self, given: tuple[int, ...], shared: int) -> bool:
        """Whether nothing that was said after the shared part is said again: another
        continuation, and no edited version of the same one."""
        return set(self.known[shared:]).isdisjoint(given[shared:])


@dataclass(slots=True, eq=False)
class Visit:
    """A branch in use by one call. Leaving the `with` block gives it back."""

    book: SessionBook
    branch: Branch
    place: Place
    known: tuple[int, ...] = ()
    turn: int | None = None

    @property
    def session(self) -> Session:
        return self.branch.session

    def finish(self, known: tuple[int, ...], turn: int) -> None:
        """The call made a turn: what its branch knows now, and how many turns lead here."""
        self.known, self.turn = known, turn

    def close(self) -> None:
        """Give the branch back."""
        self.book.leave(self)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(slots=True, eq=False)
class _Family:
    """The branches of one name. over: it was forgotten, and calls under way end their session."""

    thread: str | None
    over: bool = False
    branches: list[Branch] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(2))


class SessionBook:
    """The sessions of one chat model. Any number of threads may use it.

    open_session: makes a session from an id and its parent's. digests_of: digests of a session's
    messages. At most `max_sessions` names with `max_branches` each are kept; the least recently
    used go first, and what they computed stays in the cache by its content.
    """

    def __init__(
        self,
        open_session: Callable[[str | None, str | None], Session],
        digests_of: Callable[[Sequence[Mapping[str, Any]]], tuple[int, ...]],
        *,
        max_sessions: int,
        max_branches: int,
    ) -> None:
        self._open = open_session
        self._digests_of = digests_of
        self._max_sessions = max_sessions
        self._max_branches = max_branches
        self._families: OrderedDict[str | None, _Family] = OrderedDict()
        self._lock = threading.RLock()
        self._clock = itertools.count()

    def enter(self, place: Place, given: tuple[int, ...], lead: int) -> Visit:
        """The branch for a list of messages, of which the first `lead` are system messages.

        May wait for the engine.
        """
        surplus: list[Branch] = []
        with self._lock:
            family = self._family(place, surplus)
            branch, source = self._choose(family, place, given, lead)
            if branch is None and source is None:
                branch = self._add(family, self._open_next(place.key, family), surplus)
            taken = branch or source
            assert taken is not None
            self._take(taken)
        self._close(surplus)
        if source is not None:
            taken = self._fork(place, family, source)
        return Visit(self, taken, place)

    def _choose(
        self, family: _Family, place: Place, given: tuple[int, ...], lead: int
    ) -> tuple[Branch | None, Branch | None]:
        """A branch to go on with, or else one to fork from."""
        branches = family.branches
        extended = [branch for branch in branches if branch.is_begin_of(given)]
        if extended:
            best = max(extended, key=lambda b: (len(b.known), not b.calls))
            return (None, best) if best.calls else (best, None)
        idle = [branch for branch in branches if not branch.calls]
        for branch in idle:
            is_again = branch.step == place.step and branch.known[: len(given)] == given
            if is_again or not branch.known:
                return branch, None
        shared = [(branch.shared_len(given), branch) for branch in branches]
        deepest, nearest = max(shared, key=lambda pair: pair[0], default=(0, None))
        if nearest is not None and deepest > lead and nearest.is_left_by(given, deepest):
            return None, nearest
        edited = [(n, b) for n, b in shared if not b.calls and not b.is_left_by(given, n)]
        found = max(edited, key=lambda pair: pair[0], default=(0, None))[1]
        return found, None if found is not None else self._relative(family, given)

    def _relative(self, family: _Family, given: tuple[int, ...]) -> Branch | None:
        """The branch of another node of the thread that the list goes on from."""
        if family.thread is None:
            return None
        others = (f for f in self._families.values() if f.thread == family.thread)
        begun = [b for other in others for b in other.branches if b.is_begin_of(given)]
        return max(begun, key=lambda b: len(b.known), default=None)

    def _family(self, place: Place, surplus: list[Branch]) -> _Family:
        family = self._families.get(place.key)
        if family is None:
            family = self._families[place.key] = _Family(place.thread)
        self._families.move_to_end(place.key)
        family.branches = [b for b in family.branches if not b.session.closed]
        for key in list(self._families)[: max(0, len(self._families) - self._max_sessions)]:
            if not any(branch.calls for branch in self._families[key].branches):
                surplus += self._drop(key)
        return family

    def _open_next(self, key: str | None, family: _Family) -> Branch:
        if key is None:
            return Branch(self._open(None, None), family)
        if not any(branch.session.id == key for branch in family.branches):
            session = self._open(key, None)
            known = self._digests_of(session.messages) if len(session.tips) == 1 else ()
            return Branch(session, family, known)
        return Branch(self._open(f"{key}/branch-{next(family.numbers)}", key), family)

    def _add(self, family: _Family, branch: Branch, surplus: list[Branch]) -> Branch:
        family.branches.append(branch)
        idle = sorted((b for b in family.branches if not b.calls), key=lambda b: b.used_at)
        over = len(family.branches) - self._max_branches
        for old in [b for b in idle if b is not branch][: max(0, over)]:
            family.branches.remove(old)
            surplus.append(old)
        return branch

    def _take(self, branch: Branch) -> None:
        branch.calls += 1
        branch.used_at = next(self._clock)

    def _fork(self, place: Place, family: _Family, source: Branch) -> Branch:
        """A branch that stands where another one stands. Waits for the engine, without the lock."""
        surplus: list[Branch] = []
        forked: Branch | None = None
        try:
            with suppress(AmbiguousTip):  # somebody else goes on with that session as well
                turns = dict(source.turns) if source.family is family else {}
                forked = Branch(source.session.fork(), family, source.known, None, turns)
        finally:
            with self._lock:
                source.calls -= 1
        with self._lock:
            forked = forked or self._open_next(place.key, family)
            self._take(self._add(family, forked, surplus))
        self._close(surplus)
        return forked

    def leave(self, visit: Visit) -> None:
        """The call is over."""
        branch, place = visit.branch, visit.place
        with self._lock:
            branch.calls -= 1
            is_over = branch.family.over
            if visit.turn is not None:
                branch.known, branch.step = visit.known, place.step
                if place.checkpoint_id is not None:
                    branch.turns[place.checkpoint_id] = visit.turn
        if is_over:
            self._close([branch])

    def session(self, id: str) -> Session | None:
        """The session of that id, if a call has opened it here."""
        with self._lock:
            found = (b.session for f in self._families.values() for b in f.branches)
            return next((session for session in found if session.id == id), None)

    def at_checkpoint(self, checkpoint_id: str) -> tuple[Session, int] | None:
        """The session a graph's checkpoint led to, and after how many of its turns."""
        with self._lock:
            branches = [b for f in self._families.values() for b in f.branches]
            found = [b for b in branches if checkpoint_id in b.turns]
            if not found:
                return None
            oldest = min(found, key=lambda b: len(b.turns))
            return oldest.session, oldest.turns[checkpoint_id]

    def release(self, id: str) -> None:
        """Close the session of that id, a branch that is at its end."""
        with self._lock:
            for family in self._families.values():
                over = [b for b in family.branches if b.session.id == id]
                family.branches = [b for b in family.branches if b not in over]
                if over:
                    break
            else:
                over = []
        self._close(over)

    def forget(self, name: str) -> int:
        """Close what belongs to a thread or a session of that name; how many sessions it was."""
        with self._lock:
            keys = [k for k, f in self._families.items() if name in (k, f.thread)]
            over = [branch for key in keys for branch in self._drop(key)]
        self._close(over)
        return len(over)

    def close(self) -> None:
        """Close every session."""
        with self._lock:
            over = [branch for key in list(self._families) for branch in self._drop(key)]
        self._close(over)

    def _drop(self, key: str | None) -> list[Branch]:
        family = self._families.pop(key)
        family.over = True
        return family.branches

    @staticmethod
    def _close(branches: Sequence[Branch]) -> None:
        for branch in branches:
            with suppress(RuntimeClosed):
                branch.session.close()
