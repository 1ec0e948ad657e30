"""Numbers as people read them, the same in the closing table and in the report."""

from __future__ import annotations

__all__ = ["bytes_text", "count_text", "flops_text", "noun_text", "percent_text", "seconds_text"]

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FLOP_UNITS = ("", "K", "M", "G", "T", "P", "E")


def count_text(count: int) -> str:
    """`1234567` as "1,234,567"."""
    return f"{count:,}"


def noun_text(count: int, one: str, many: str) -> str:
    """`1` as "1 call", `1200` as "1,200 calls"."""
    return f"{count_text(count)} {one if count == 1 else many}"


def percent_text(fraction: float) -> str:
    """`0.98765` as "98.77 %"; only exactly 1 is "100.00 %", so that a small loss stays visible."""
    percent = 100 * fraction
    if fraction < 1:
        percent = min(percent, 99.99)
    return f"{percent:.2f} %"


def bytes_text(num_bytes: int) -> str:
    """`1536` as "1.5 KiB"."""
    amount, unit = _scaled(num_bytes, 1024, _BYTE_UNITS)
    return f"{num_bytes} B" if unit == "B" else f"{amount:.1f} {unit}"


def flops_text(num_flops: int) -> str:
    """`2_500_000_000` as "2.50 GFLOP"."""
    amount, unit = _scaled(num_flops, 1000, _FLOP_UNITS)
    return f"{amount:.2f} {unit}FLOP" if unit else f"{num_flops} FLOP"


def seconds_text(seconds: float | None) -> str:
    """`0.0123` as "12.3 ms", `2.5` as "2.50 s", None as "n/a"."""
    if seconds is None:
        return "n/a"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    millis = 1000 * seconds
    return f"{millis:.0f} ms" if millis >= 100 else f"{millis:.3g} ms"


def _scaled(value: int, step: int, units: tuple[str, ...]) -> tuple[float, str]:
    """The value in the largest unit in which it is at least 1, and that unit."""
    exponent = 0
    while exponent < len(units) - 1 and value >= step ** (exponent + 1):
        exponent += 1
    return value / step**exponent, units[exponent]
