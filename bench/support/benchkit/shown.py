"""Numbers as the tables show them."""

from __future__ import annotations

import math

__all__ = ["count", "kib", "mib", "millis", "percent"]


def count(value: float) -> str:
    """`1234` as "1,234"."""
    return f"{value:,.0f}"


def percent(value: float) -> str:
    """`0.5` as "50.00 %"."""
    return f"{100 * value:.2f} %"


def millis(value: float) -> str:
    """Seconds `0.0123` as "12.30 ms"; NaN as "n/a"."""
    return "n/a" if math.isnan(value) else f"{1000 * value:.2f} ms"


def kib(value: float) -> str:
    """Bytes in KiB."""
    return f"{value / 2**10:,.1f} KiB"


def mib(value: float) -> str:
    """Bytes in MiB."""
    return f"{value / 2**20:,.1f} MiB"
