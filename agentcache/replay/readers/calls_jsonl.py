"""The canonical form: one line per model call, with its exact prompt and its answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentcache.errors import TraceError
from agentcache.replay.readers._messages import read_answer, read_messages, read_tools, share
from agentcache.replay.readers.base import (
    Call,
    Format,
    Notes,
    Place,
    Record,
    Source,
    Trajectory,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CALLS_JSONL"]


def _sniff(data: object) -> bool:
    return (
        isinstance(data, dict) and "messages" in data and bool({"response", "answer"} & data.keys())
    )


@dataclass(slots=True)
class _Run:
    """One trajectory while its rows are read."""

    calls: list[Call] = field(default_factory=list)
    parent: str | None = None
    notes: Notes = field(default_factory=Notes)


def _read(source: Source, records: Iterator[Record]) -> list[Trajectory]:
    runs: dict[str, _Run] = {}
    for record in records:
        try:
            top = source.place(record, Notes())
            row = top.mapping(record.data)
            name = row.get("trajectory")
            run_id = source.stem if name is None else top.key("trajectory").text(name)
            run = runs.get(run_id, _Run())
            _take(run, row, source.place(record, run.notes))
            runs[run_id] = run
        except TraceError as error:
            source.reject(error)
    return [
        Trajectory(
            run_id,
            source.shown,
            CALLS_JSONL.name,
            tuple(run.calls),
            run.parent,
            run.notes.texts(),
        )
        for run_id, run in runs.items()
    ]


def _take(run: _Run, row: dict[str, Any], place: Place) -> None:
    """Add the call of one row to its trajectory."""
    name = "answer" if "answer" in row else "response"
    last = run.calls[-1] if run.calls else None
    messages = read_messages(row.get("messages"), place.key("messages"))
    if not messages:
        raise place.key("messages").error("is empty", "a call needs a prompt")
    exact = row.get("exact", True)
    if not isinstance(exact, bool):
        raise place.key("exact").wrong_type(exact, "true or false")
    tools = read_tools(row.get("tools"), place.key("tools"))
    at, ids, fingerprint = row.get("at"), row.get("answer_ids"), row.get("fingerprint")
    call = Call(
        share(messages, last.messages if last else ()),
        last.tools if last and last.tools == tools else tools,
        read_answer(row.get(name), place.key(name)),
        None if at is None else place.key("at").number(at),
        exact,
        None if ids is None else place.key("answer_ids").token_ids(ids),
        None if fingerprint is None else place.key("fingerprint").text(fingerprint),
    )
    if row.get("parent") is not None:
        run.parent = place.key("parent").text(row["parent"])
    for idx, note in enumerate(place.key("notes").items(row.get("notes", []))):
        run.notes.add(place.key("notes").item(idx).text(note))
    run.calls.append(call)


CALLS_JSONL = Format("calls-jsonl", _sniff, _read)
