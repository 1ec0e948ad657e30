"""A call on its way through the runtime: its place, its time limit, and what is noted of it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache import RequestCancelled
from agentcache.integrations.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from agentcache import Delta, Session, Turn, TurnStream
    from agentcache.integrations.server.admission import Admission
    from agentcache.integrations.server.metrics import Metrics
    from agentcache.integrations.server.session_table import SessionTable
    from agentcache.integrations.server.threads import Threads
    from agentcache.integrations.server.tracing import Tracing

__all__ = ["Calls", "RunningCall", "Work"]

_STUCK_S = 5.0
"""A call that was ended but whose client does not read is dropped after so long."""


@dataclass(frozen=True, slots=True)
class Work:
    """What to run. start: begins the streamed turn; it renders and encodes, so it may take a while
    and runs on a thread of its own.

    operation, parameters: for traces. session_id: None for a session that ends with the call.
    """

    operation: str
    start: Callable[[Session], TurnStream]
    tenant: str | None
    session_id: str | None = None
    parameters: dict[str, Any] | None = None


class RunningCall:
    """A turn in the making: iterate for its deltas, then take the turn."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self._stream: TurnStream | None = None
        self._reason: ApiError | None = None
        self.is_finished = False
        self._task = asyncio.current_task()

    def attach(self, session: Session, stream: TurnStream) -> None:
        """The turn has begun."""
        self.session, self._stream = session, stream
        if self._reason is not None:
            stream.close()

    @property
    def session_id(self) -> str:
        """The session it runs on."""
        assert self.session is not None
        return self.session.id

    def stop(self, reason: ApiError) -> None:
        """End the call within a step; its client is told the reason."""
        if self._reason is not None:
            return
        self._reason = reason
        if self._stream is not None:
            self._stream.close()
        task = self._task
        if task is not None:
            asyncio.get_running_loop().call_later(
                _STUCK_S, lambda: None if self._stream is None else task.cancel()
            )

    def end(self) -> None:
        """Give everything back; a turn that is not over is cancelled."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    async def deltas(self) -> AsyncIterator[Delta]:
        """What comes, as it comes. Raises the reason where the call was stopped."""
        assert self._stream is not None
        try:
            async for delta in self._stream:
                yield delta
        except RequestCancelled:
            if self._reason is not None:
                raise self._reason from None
            raise
        if self._reason is not None:
            raise self._reason
        self.is_finished = True

    async def finish(self) -> Turn:
        """The turn, once it is over; deltas that were not taken are passed over."""
        async for _ in self.deltas():
            pass
        return self.turn

    @property
    def turn(self) -> Turn:
        """The finished turn."""
        assert self._stream is not None
        return self._stream.turn


class Calls:
    """Runs work on the runtime."""

    def __init__(
        self,
        admission: Admission,
        sessions: SessionTable,
        threads: Threads,
        metrics: Metrics,
        tracing: Tracing,
        timeout_s: float,
    ) -> None:
        self._admission = admission
        self._sessions = sessions
        self._threads = threads
        self._metrics = metrics
        self._tracing = tracing
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def run(self, work: Work, headers: Any = None) -> AsyncIterator[RunningCall]:
        """Take a place and begin; the block takes what comes. Left early, the turn is cancelled.

        Raises ApiError for 429 and 503, and what the session raises for the call itself.
        """
        call = RunningCall()
        with (
            self._admission.place(call.stop),
            self._limited(call),
            self._sessions.use(work.tenant, work.session_id) as used,
            self._tracing.span(work, used.session.id, headers) as span,
        ):
            try:
                stream = await self._threads.make(
                    lambda: work.start(used.session), lambda begun: begun.close()
                )
                call.attach(used.session, stream)
                yield call
                if call.is_finished:
                    used.note(call.turn)
                    span.note(call.turn)
                    self._metrics.note_turn(call.turn)
            finally:
                call.end()

    @contextmanager
    def _limited(self, call: RunningCall) -> Iterator[None]:
        reason = ApiError(
            504,
            f"the request took longer than {self._timeout_s:g} s, the limit of this server",
            code="timeout",
            headers={"x-should-retry": "false"},
        )
        timer = asyncio.get_running_loop().call_later(self._timeout_s, call.stop, reason)
        try:
            yield
        finally:
            timer.cancel()
