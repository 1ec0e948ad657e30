"""Recording on a thread of its own, so that neither the engine nor a reply waits for a database."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.store.base import FinishedTurn, SessionKey
    from agentcache.store.database import Database
    from agentcache.store.writing import TurnWriter

__all__ = ["ThreadRecorder"]

_LOG = logging.getLogger("agentcache")


class ThreadRecorder:
    """A `Recorder` that writes on a thread of its own; see there for what callers may rely on.

    capacity: how many finished turns may wait before further calls do. A turn that cannot be
    written is logged and counted, and lost. now: unix seconds.
    """

    def __init__(
        self,
        database: Database,
        writer: TurnWriter,
        *,
        capacity: int,
        now: Callable[[], float],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._writer = writer
        self._capacity = capacity
        self._now = now
        self._end = end
        # Handles may be collected, and closed by that, inside anything that allocates: hence a
        # queue and a lock that may be entered again.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition(threading.RLock())
        self._waiting: Counter[SessionKey] = Counter()
        self._num = Counter(written=0, failed=0)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="agentcache-store", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def is_ready(self, session: SessionKey) -> bool:
        with self._changed:
            return self._waiting[session] == 0 and self._waiting.total() < self._capacity

    def wait(self, session: SessionKey) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready(session))

    def add(self, turn: FinishedTurn) -> None:
        at = self._now()
        with self._changed:
            if self._closed:
                return
            self._waiting[turn.session] += 1
            self._jobs.put(lambda: self._write(turn, at))

    def close_session(self, session: SessionKey) -> None:
        at = self._now()
        with self._changed:
            if not self._closed:
                self._jobs.put(lambda: self._write_end(session, at))

    def flush(self) -> None:
        done = threading.Event()
        with self._changed:
            if self._closed:
                return
            self._jobs.put(done.set)
        done.wait()

    def counts(self) -> dict[str, int]:
        with self._changed:
            return {**self._num, "waiting": self._waiting.total()}

    def close(self) -> None:
        with self._changed:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        self._jobs.put(None)
        self._thread.join()
        atexit.unregister(self.close)
        self._end()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and with it the turn, which may be all that keeps a long history

    def _write(self, turn: FinishedTurn, at: float) -> None:
        done = self._try(
            lambda: self._writer.write(self._database, turn, at),
            f"a turn of session {turn.session.id[:80]!r}",
        )
        with self._changed:
            self._num["written" if done else "failed"] += 1
            self._waiting[turn.session] -= 1
            if not self._waiting[turn.session]:
                del self._waiting[turn.session]
            self._changed.notify_all()

    def _write_end(self, session: SessionKey, at: float) -> None:
        self._try(
            lambda: self._writer.close_session(self._database, session, at),
            f"the end of session {session.id[:80]!r}",
        )

    def _try(self, write: Callable[[], None], what: str) -> bool:
        """Whether it was written; nothing that goes wrong here may end the thread."""
        try:
            write()
        except Exception as error:  # the top of the thread
            _LOG.error("%s was not stored: %s", what, error)
            return False
        return True
