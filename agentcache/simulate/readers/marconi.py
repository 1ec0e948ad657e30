"""The Marconi artifact's JSONL: tokens of prompt and answer, with keys a framework would know."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.simulate.readers.base import (
    Timeline,
    TraceFormat,
    number,
    per_row,
    place_of,
    token_ids,
    whole,
)
from agentcache.simulate.trace import SimRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.replay.readers.base import Place, Source
    from agentcache.simulate.readers.base import ReadOptions, Row
    from agentcache.types import IntArray

__all__ = ["MARCONI"]

_MAX_PRIORITY = 2**31 - 1


def _sniff(data: object) -> bool:
    return isinstance(data, dict) and {"input_tokens", "output_tokens"} <= data.keys()


def _read(source: Source, rows: Iterator[Row], options: ReadOptions) -> list[SimRequest]:
    reader = _Reader(source)
    return list(islice(per_row(source, rows, reader.request), options.limit))


class _Reader:
    """Reads rows in their order; knows the time of the last one and the sessions so far."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._timeline = Timeline()
        self._parents: dict[str, str | None] = {}

    def request(self, row: Row) -> SimRequest:
        """One row. Raises TraceFormatError."""
        top = place_of(self._source, row)
        data = top.mapping(row.data)
        session = _session(data.get("session_id"), top.key("session_id"))
        parent = _parent(data.get("parent_session"), top.key("parent_session"))
        self._check_parent(session, parent, top.key("parent_session"))
        prompt = _tokens(data, "input", top)
        if not len(prompt):
            raise top.key("input_tokens").error("is empty", "a request needs a prompt")
        answer = _tokens(data, "output", top)
        if data.get("turn_id") is not None:
            whole(data["turn_id"], top.key("turn_id"))
        ids = np.concatenate([prompt, answer])
        ids.flags.writeable = False
        return SimRequest(
            session,
            ids=ids,
            prompt_len=len(prompt),
            parent=parent,
            closes=_flag(data.get("closed"), top.key("closed")),
            marks=_marks(data.get("marks"), top.key("marks"), len(prompt)),
            expect_s=_seconds(data.get("expect"), top.key("expect")),
            priority=_priority(data.get("priority"), top.key("priority")),
            # last, because a row that is rejected shall not set the time for those after it
            at=self._timeline.at(data.get("ts"), top.key("ts")),
        )

    def _check_parent(self, session: str | None, parent: str | None, place: Place) -> None:
        known = self._parents
        if parent is not None and parent not in known:
            raise place.error(
                f"is {parent}, which has no request before",
                "it should be a session of an earlier row",
            )
        if parent is not None and (session is None or parent == session):
            raise place.error(f"is {parent}", "it should be another session than its own")
        if session is None:
            return
        before = known.setdefault(session, parent)
        if before != parent:
            raise place.error(
                f"is {_shown(parent)}, but was {_shown(before)} in an earlier row",
                "a session has one parent from its beginning",
            )


def _shown(parent: str | None) -> str:
    return "none" if parent is None else parent


def _session(value: object, place: Place) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return place.text(value)
    return str(whole(value, place, most=2**63 - 1))


def _parent(value: object, place: Place) -> str | None:
    if value is None or (value == -1 and not isinstance(value, bool)):
        return None
    return _session(value, place)


def _tokens(data: dict[str, Any], which: str, top: Place) -> IntArray:
    name, counted = f"{which}_tokens", f"num_{which}_tokens"
    ids = token_ids(data.get(name), top.key(name))
    if data.get(counted) is not None:
        count = whole(data[counted], top.key(counted))
        if count != len(ids):
            raise top.key(counted).error(f"is {count}", f"{name} has {len(ids)}")
    return ids


def _flag(value: object, place: Place) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise place.wrong_type(value, "true or false")
    return value


def _marks(value: object, place: Place, prompt_len: int) -> tuple[int, ...]:
    if value is None:
        return ()
    marks = {
        whole(mark, place.item(idx), 1, prompt_len) for idx, mark in enumerate(place.items(value))
    }
    return tuple(sorted(marks))


def _seconds(value: object, place: Place) -> float | None:
    if value is None:
        return None
    seconds = number(value, place)
    if seconds < 0:
        raise place.error(f"is {seconds}", "it should be seconds from now on, 0 at least")
    return seconds


def _priority(value: object, place: Place) -> int:
    return 0 if value is None else whole(value, place, -_MAX_PRIORITY, _MAX_PRIORITY)


MARCONI = TraceFormat("marconi", _sniff, _read)
