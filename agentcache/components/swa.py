"""SWA: sliding-window KV. It can be resumed where the trailing window is whole."""

from __future__ import annotations

from agentcache.components.base import WindowComponent
from agentcache.types import Kind

__all__ = ["SwaComponent"]


class SwaComponent(WindowComponent):
    """Keys and values of attention that sees the last `window` positions, its own included.

    A request resumed at `at` computes position `at` first, which sees [at + 1 - window, at].

    >>> SwaComponent(window=4, page_size=2).reach(10)
    7
    """

    def __init__(self, window: int, page_size: int, kind: str = Kind.SWA) -> None:
        super().__init__(page_size)
        assert window >= 1
        self.window = window
        self.kind = kind

    def reach(self, at: int) -> int:
        return max(0, at + 1 - self.window)
