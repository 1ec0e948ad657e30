"""The engine kept busy, to see who waits for it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.runtime import Runtime

__all__ = ["Held", "engine_held"]

_LIMIT_S = 20
"""So that a test fails where it would hang."""


class Held:
    """The engine thread, kept from doing anything until `release`.

    in_time: whether that came before the limit; None as long as neither did.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()
        self.in_time: bool | None = None
        runtime.on_engine_later(self._hold)
        assert self._reached.wait(_LIMIT_S)

    def _hold(self) -> None:
        self._reached.set()
        self.in_time = self._go_on.wait(_LIMIT_S)

    def release(self) -> None:
        self._go_on.set()


@contextmanager
def engine_held(runtime: Runtime) -> Iterator[None]:
    """What is done inside fails the test where it waits for the engine."""
    held = Held(runtime)
    try:
        yield
    finally:
        held.release()
    runtime.on_engine(lambda: None)
    assert held.in_time, "something waited for the engine"
