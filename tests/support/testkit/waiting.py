"""Waiting for what another thread does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it comes true in that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.005)
    return condition()
