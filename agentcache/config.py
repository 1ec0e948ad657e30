"""Frozen configuration that checks itself."""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentcache.errors import ConfigError

__all__ = ["ADMISSIONS", "CHECKPOINT_FORMATS", "CacheConfig", "parse_bytes", "split_admission"]

ADMISSIONS = ("structural", "marconi", "every-block")
"""Names of admission policies; the last may have the tokens of a block behind a colon."""

CHECKPOINT_FORMATS = ("unchanged", "float16", "int8")

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or a text such as "512MiB", "1.5 GB", "4096".

    >>> parse_bytes("512MiB")
    536870912

    Raises ConfigError for a negative number or an unknown unit.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f'{value!r} is no size in bytes; write it as "512MiB", "2GB" or 4096')
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{value} is no size in bytes; give a number of at least 0")
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f'{value!r} is no size in bytes; write it as "512MiB", "2GB" or 4096')
    return int(float(match[1]) * _UNITS[match[2].lower()])


def split_admission(name: str) -> tuple[str, int]:
    """An admission policy's name and the tokens of a block, 0 where none are given.

    >>> split_admission("every-block:16")
    ('every-block', 16)

    Raises ConfigError for what is no such name.
    """
    kind, _, number = str(name).partition(":")
    block_len = int(number) if re.fullmatch(r"[0-9]{1,9}", number) else 0
    numbered = kind == "every-block" and block_len > 0
    if kind not in ADMISSIONS or (kind != name and not numbered):
        known = ", ".join((*ADMISSIONS, "every-block:N with N tokens a block"))
        raise ConfigError(f"unknown admission {name!r}; known: {known}")
    return kind, block_len


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Settings of one cache.

    budget: bytes for KV pages, checkpoints, running states and scratch together, as a number or a
        text such as "512MiB"; None takes half of what is left beside the weights.
    policy: which entries leave first: "lru", "lfu", "slru", "gdsf", "priority", "session-lru",
        "marconi", or "auto", which takes the best policy this version has.
    admission: which checkpoints are kept: "structural" (the last decoded token, branch points, end
        of system + tools, end of the prompt before the reply header, marks), "marconi" (the last
        decoded token and branch points), "every-block" (each 16 tokens, or with "every-block:32"
        each 32, and nothing else).
    page_size: token positions per KV page; 1 is allowed.
    prefill_chunk: most tokens of one prompt that a step computes, so that replies in progress wait
        for one chunk at most.
    max_running: most requests that hold a running state at the same time; small budgets get fewer.
    checkpoint_format: how recurrent states are kept while they are parked: "unchanged", or rounded
        to "float16" or "int8" so that more of them fit; a call that goes on from a rounded one
        answers nearly, not exactly, as without a cache. Running states are never rounded.

    Raises ConfigError for a value that cannot work.
    """

    budget: int | str | None = "512MiB"
    policy: str = "auto"
    admission: str = "structural"
    page_size: int = 16
    prefill_chunk: int = 512
    max_running: int = 8
    checkpoint_format: str = "unchanged"

    def __post_init__(self) -> None:
        if self.budget is not None and parse_bytes(self.budget) == 0:
            raise ConfigError(
                "budget is 0 bytes; give a positive size, or None for half of what is left"
            )
        for name in ("page_size", "prefill_chunk", "max_running"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; give a whole number of at least 1")
        split_admission(self.admission)
        if self.checkpoint_format not in CHECKPOINT_FORMATS:
            raise ConfigError(
                f"unknown checkpoint_format {self.checkpoint_format!r}; "
                f"known: {', '.join(CHECKPOINT_FORMATS)}"
            )

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None where no limit was given."""
        return None if self.budget is None else parse_bytes(self.budget)
