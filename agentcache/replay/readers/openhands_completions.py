"""OpenHands `llm-completions/*.json`: one file per model call, with the raw completion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.errors import TraceError
from agentcache.replay.readers._messages import read_answer, read_messages, read_tools, share
from agentcache.replay.readers.base import (
    Call,
    Format,
    Message,
    Notes,
    Place,
    Record,
    Source,
    Trajectory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OPENHANDS_COMPLETIONS"]


def _sniff(data: object) -> bool:
    if not isinstance(data, dict) or "messages" not in data:
        return False
    response = data.get("response")
    return isinstance(response, dict) and "choices" in response


def _read(source: Source, records: Iterator[Record]) -> list[Trajectory]:
    notes = Notes()
    calls: list[Call] = []
    earlier: tuple[Message, ...] = ()
    for record in records:
        try:
            call = _call(record, source.place(record, notes), earlier)
        except TraceError as error:
            source.reject(error)
            continue
        calls.append(call)
        earlier = call.messages
    if not calls:
        return []
    calls.sort(key=lambda call: call.at or 0.0)
    return [
        Trajectory(
            source.stem,
            source.shown,
            OPENHANDS_COMPLETIONS.name,
            tuple(calls),
            notes=notes.texts(),
        )
    ]


def _call(record: Record, place: Place, earlier: tuple[Message, ...]) -> Call:
    row = place.mapping(record.data)
    stamp = row.get("timestamp")
    messages = read_messages(row["messages"], place.key("messages"))
    if not messages:
        raise place.key("messages").error("is empty", "a call needs a prompt")
    return Call(
        share(messages, earlier),
        read_tools(row.get("tools"), place.key("tools")),
        read_answer(row["response"], place.key("response")),
        None if stamp is None else place.key("timestamp").number(stamp),
    )


OPENHANDS_COMPLETIONS = Format("openhands-completions", _sniff, _read, one_call_per_file=True)
