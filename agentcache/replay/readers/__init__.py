"""One module per format of recorded runs, and the list they are found by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.replay.readers.calls_jsonl import CALLS_JSONL
from agentcache.replay.readers.claude_code import CLAUDE_CODE
from agentcache.replay.readers.mini_swe_agent import MINI_SWE_AGENT
from agentcache.replay.readers.openhands_completions import OPENHANDS_COMPLETIONS
from agentcache.replay.readers.openhands_output import OPENHANDS_OUTPUT
from agentcache.replay.readers.swe_agent import SWE_AGENT
from agentcache.replay.readers.tau_bench import TAU_BENCH
from agentcache.replay.readers.unsupported import CONDENSER_LOG, EVENT_LIST, INTERCODE

if TYPE_CHECKING:
    from agentcache.replay.readers.base import Format

__all__ = ["FORMATS", "find_format"]

# The first match wins: a raw completion is also an answer, a run with events also has a history.
FORMATS: tuple[Format, ...] = (
    OPENHANDS_COMPLETIONS,
    CALLS_JSONL,
    OPENHANDS_OUTPUT,
    SWE_AGENT,
    TAU_BENCH,
    MINI_SWE_AGENT,
    CLAUDE_CODE,
    CONDENSER_LOG,
    EVENT_LIST,
    INTERCODE,
)


def find_format(data: object) -> Format | None:
    """The format that a record looks like, None if no known one."""
    return next((known for known in FORMATS if known.sniff(data)), None)
