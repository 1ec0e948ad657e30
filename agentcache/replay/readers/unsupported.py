"""Recordings that are known but hold no model calls: refused with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.replay.readers.base import Format, Notes, Record, Source, Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CONDENSER_LOG", "EVENT_LIST", "INTERCODE"]


def _is_intercode(data: object) -> bool:
    if not isinstance(data, dict) or not data:
        return False
    if {"meta", "logs"} <= data.keys():
        return True
    first = next(iter(data.values()))
    return isinstance(first, dict) and {"query", "dataset"} <= first.keys()


def _is_event_list(data: object) -> bool:
    first = data[0] if isinstance(data, list) and data else None
    return (
        isinstance(first, dict)
        and "role" not in first
        and "source" in first
        and bool({"action", "observation"} & first.keys())
    )


def _is_condenser_log(data: object) -> bool:
    return isinstance(data, dict) and {"message_count", "input", "output"} <= data.keys()


def _refuse(what: str, remedy: str) -> Callable[[Source, Iterator[Record]], list[Trajectory]]:
    def read(source: Source, records: Iterator[Record]) -> list[Trajectory]:
        first = next(records)
        raise source.place(first, Notes()).error(what, remedy)

    return read


INTERCODE = Format(
    "intercode",
    _is_intercode,
    _refuse(
        "is an InterCode result: actions and observations without roles or prompts",
        "its model calls cannot be told; record the prompts as calls JSONL",
    ),
)
EVENT_LIST = Format(
    "openhands-events",
    _is_event_list,
    _refuse(
        "is a bare OpenHands event list: system prompt and tools are missing",
        "give the run's output.jsonl or its llm-completions folder",
    ),
)
CONDENSER_LOG = Format(
    "condenser-log",
    _is_condenser_log,
    _refuse(
        "is a condenser log: summaries of a run, without the agent's own calls",
        "give the run's .traj.json",
    ),
)
