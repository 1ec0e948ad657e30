"""One module per form of trace, and the list they are found by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.replay.readers import find_format
from agentcache.simulate.readers.claude_code_kv import CLAUDE_CODE_KV
from agentcache.simulate.readers.dialogues import LMSYS, MT_BENCH_101, SHAREGPT
from agentcache.simulate.readers.marconi import MARCONI
from agentcache.simulate.readers.mooncake import MOONCAKE

if TYPE_CHECKING:
    from agentcache.simulate.readers.base import Row, TraceFormat

__all__ = ["FORMATS", "find_trace_format", "is_trajectory"]

FORMATS: tuple[TraceFormat, ...] = (
    MARCONI,
    MOONCAKE,
    CLAUDE_CODE_KV,
    SHAREGPT,
    LMSYS,
    MT_BENCH_101,
)


def find_trace_format(row: Row) -> TraceFormat | None:
    """The form of trace that a row belongs to, None if no known one."""
    return next((known for known in FORMATS if known.sniff(row.data)), None)


def is_trajectory(row: Row) -> bool:
    """Whether `agentcache replay` knows the file that this is a row of."""
    return find_format([row.data] if row.in_list else row.data) is not None
