"""Ctrl-C while a reply comes: noted at any time, and raised only where it does no harm."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from agentcache.session import Delta, TurnStream

__all__ = ["Interrupts"]


class Interrupts:
    """Takes SIGINT over while it is entered.

    A KeyboardInterrupt between a call's submission and the assignment of its stream would leave a
    call that nobody can cancel. So a signal is only noted there, and raised by `next_delta`.
    """

    def __init__(self) -> None:
        self._is_noted = False
        self._is_waiting = False
        self._before = signal.getsignal(signal.SIGINT)

    def next_delta(self, stream: TurnStream) -> Delta | None:
        """The stream's next delta, None at its end. Raises KeyboardInterrupt."""
        self._is_waiting = True
        try:
            if self._is_noted:
                raise KeyboardInterrupt
            return next(stream, None)
        finally:
            self._is_waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted = True
        if self._is_waiting:
            self._is_waiting = False  # a second signal must not disturb how the first is handled
            raise KeyboardInterrupt

    @property
    def _is_ours(self) -> bool:
        """Whether the handler can be set and set back; one that ignores the signal is kept."""
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and self._before not in (signal.SIG_IGN, None)

    def __enter__(self) -> Interrupts:
        if self._is_ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, self._before)
