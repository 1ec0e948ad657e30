"""OpenHands `output.jsonl`: one run per line, as events from which prompts are put together.

The events do not show what OpenHands itself adds to a prompt (workspace context, condensation,
suffixes of command outputs), so no call is exact.
"""

from __future__ import annotations

from typing import Any

from agentcache.replay.readers._messages import read_answer, read_tools
from agentcache.replay.readers.base import (
    Call,
    Format,
    Message,
    Notes,
    Place,
    Record,
    Source,
    Trajectory,
    per_record,
)

__all__ = ["OPENHANDS_OUTPUT"]

_REBUILT = "prompts are put together from events"
_SILENT = frozenset({"agent_state_changed", "null"})
"""Observations that are no messages of their own."""


def _sniff(data: object) -> bool:
    return (
        isinstance(data, dict)
        and "history" in data
        and "instance_id" in data
        and bool({"instruction", "metadata", "test_result"} & data.keys())
    )


def _read_one(source: Source, record: Record) -> list[Trajectory]:
    notes = Notes()
    top = source.place(record, notes)
    run = top.mapping(record.data)
    place = top.key("history")
    events = place.items(run["history"]) if run["history"] is not None else []
    conversation = _Conversation(notes)
    for idx, event in enumerate(events):
        where = place.item(idx)
        conversation.take(where.mapping(event), where)
    if conversation.calls:
        notes.add(_REBUILT)
    return [
        Trajectory(
            _run_id(run["instance_id"], top.key("instance_id")),
            source.shown,
            OPENHANDS_OUTPUT.name,
            tuple(conversation.calls),
            notes=notes.texts(),
        )
    ]


def _run_id(value: object, place: Place) -> str:
    return place.text(value) if isinstance(value, str) else f"{place.number(value):g}"


class _Conversation:
    """The messages so far, and the calls made from them, event by event."""

    def __init__(self, notes: Notes) -> None:
        self.calls: list[Call] = []
        self._notes = notes
        self._messages: list[Message] = []
        self._tools: tuple[dict[str, Any], ...] | None = None
        self._seen: set[str] = set()

    def take(self, event: dict[str, Any], place: Place) -> None:
        """Go on by one event."""
        # A response stands on each action it led to and again on their observations.
        metadata = event.get("tool_call_metadata")
        if metadata is not None:
            where = place.key("tool_call_metadata")
            metadata = where.mapping(metadata)
            self._take_response(metadata.get("model_response"), where.key("model_response"))
        if event.get("observation") is not None:
            self._take_observation(event, metadata, place)
        elif metadata is None:
            self._take_action(event, place)

    def _take_response(self, value: object, place: Place) -> None:
        response = place.mapping(value)
        response_id = place.key("id").text(response.get("id"))
        if response_id in self._seen:
            return
        self._seen.add(response_id)
        created = response.get("created")
        at = None if created is None else place.key("created").number(created)
        self._answer(read_answer(response, place), at)

    def _take_observation(
        self, event: dict[str, Any], metadata: dict[str, Any] | None, place: Place
    ) -> None:
        kind = place.key("observation").text(event["observation"])
        if metadata is not None:
            where = place.key("tool_call_metadata")
            self._messages.append(
                {
                    "role": "tool",
                    "content": place.key("content").text(event.get("content")),
                    "tool_call_id": where.key("tool_call_id").text(metadata.get("tool_call_id")),
                    "name": where.key("function_name").text(metadata.get("function_name")),
                }
            )
        elif kind == "error":
            content = place.key("content").text(event.get("content"))
            self._messages.append({"role": "user", "content": content})
        elif kind == "recall":
            self._notes.add("workspace context is left out: its form in the prompt is not recorded")
        elif kind not in _SILENT:
            self._notes.add(f"observation {kind[:40]!r} of no recorded tool call is left out")

    def _take_action(self, event: dict[str, Any], place: Place) -> None:
        kind, agent = event.get("action"), event.get("source") == "agent"
        if kind == "system":
            args = place.key("args").mapping(event.get("args"))
            self._tools = read_tools(args.get("tools"), place.key("args.tools"))
            self._messages.append({"role": "system", "content": _text(event, place)})
        elif kind == "message" and agent:
            self._answer({"role": "assistant", "content": _text(event, place)}, _time(event, place))
        elif kind == "message":
            self._messages.append({"role": "user", "content": _text(event, place)})
        elif agent and kind is not None:
            shown = place.key("action").text(kind)[:40]
            self._notes.add(f"action {shown!r} without a recorded model response is left out")

    def _answer(self, answer: Message, at: float | None) -> None:
        if self._messages:
            self.calls.append(Call(tuple(self._messages), self._tools, answer, at, exact=False))
        self._messages.append(answer)


def _text(event: dict[str, Any], place: Place) -> str:
    args = place.key("args").mapping(event.get("args"))
    if args.get("image_urls"):
        raise place.key("args.image_urls").error(
            "holds images", "only text can be replayed: leave this run out"
        )
    return place.key("args.content").text(args.get("content"))


def _time(event: dict[str, Any], place: Place) -> float | None:
    stamp = event.get("timestamp")
    return None if stamp is None else place.key("timestamp").instant(stamp)


OPENHANDS_OUTPUT = Format("openhands-output", _sniff, per_record(_read_one))
