"""mini-swe-agent `.traj.json`: one message list, with metadata around it or bare."""

from __future__ import annotations

from agentcache.replay.readers._messages import chat_calls, read_message
from agentcache.replay.readers.base import (
    Format,
    Message,
    Notes,
    Place,
    Record,
    Source,
    Trajectory,
    per_record,
)

__all__ = ["MINI_SWE_AGENT"]


def _sniff(data: object) -> bool:
    if isinstance(data, list):
        return not data or (isinstance(data[0], dict) and "role" in data[0])
    return (
        isinstance(data, dict)
        and ("messages" in data or "trajectory_format" in data)
        and not {"response", "answer"} & data.keys()
    )


def _read_one(source: Source, record: Record) -> list[Trajectory]:
    notes = Notes()
    top = source.place(record, notes)
    run_id = source.stem if record.line is None else f"{source.stem}/line{record.line}"
    if isinstance(record.data, list):
        place, recorded = top.key("messages"), record.data
    else:
        run = top.mapping(record.data)
        place = top.key("messages")
        recorded = place.items(run.get("messages"))
        if run.get("instance_id") is not None:
            run_id = top.key("instance_id").text(run["instance_id"])
    rows, at = _rows(recorded, place)
    calls = chat_calls(rows, place, at=at)
    return [Trajectory(run_id, source.shown, MINI_SWE_AGENT.name, calls, notes=notes.texts())]


def _rows(recorded: list[object], place: Place) -> tuple[list[Message], dict[int, float]]:
    rows: list[Message] = []
    at: dict[int, float] = {}
    for idx, value in enumerate(recorded):
        where = place.item(idx)
        row = where.mapping(value)
        # Newer versions close a run with a row that holds its result and that no model saw.
        if row.get("role") == "exit":
            continue
        moment = _created(row, where)
        if moment is not None:
            at[len(rows)] = moment
        rows.append(read_message(row, where))
    return rows, at


def _created(row: dict[str, object], place: Place) -> float | None:
    """The time of the call in the raw completion beside an answer, if it was kept."""
    extra = row.get("extra")
    response = extra.get("response") if isinstance(extra, dict) else None
    created = response.get("created") if isinstance(response, dict) else None
    return None if created is None else place.key("extra.response.created").number(created)


MINI_SWE_AGENT = Format("mini-swe-agent", _sniff, per_record(_read_one))
