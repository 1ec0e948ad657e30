"""tau-bench results: a list of conversations, one per task and trial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentcache.errors import TraceError
from agentcache.replay.readers._messages import chat_calls, read_messages
from agentcache.replay.readers.base import Format, Notes, Place, Record, Source, Trajectory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TAU_BENCH"]


def _sniff(data: object) -> bool:
    first = data[0] if isinstance(data, list) and data else data
    return isinstance(first, dict) and {"task_id", "traj"} <= first.keys()


def _read(source: Source, records: Iterator[Record]) -> list[Trajectory]:
    trajectories = []
    for record in records:
        results = record.data if isinstance(record.data, list) else [record.data]
        for idx, result in enumerate(results):
            place = source.place(record, Notes())
            try:
                trajectories.append(_conversation(source, result, place.item(idx)))
            except TraceError as error:
                source.reject(error)
    return trajectories


def _conversation(source: Source, value: object, place: Place) -> Trajectory:
    result = place.mapping(value)
    place.notes.add("tool schemas are not recorded")
    where = place.key("traj")
    rows = read_messages(result.get("traj"), where)
    return Trajectory(
        f"{source.stem}/{_name(result, place)}",
        source.shown,
        TAU_BENCH.name,
        chat_calls(rows, where),
        notes=place.notes.texts(),
    )


def _name(result: dict[str, Any], place: Place) -> str:
    parts = []
    for name, key in (("task", "task_id"), ("trial", "trial")):
        value = result.get(key)
        if value is not None:
            where = place.key(key)
            shown = where.text(value) if isinstance(value, str) else f"{where.number(value):g}"
            parts.append(name + shown)
    return "-".join(parts)


TAU_BENCH = Format("tau-bench", _sniff, _read)
