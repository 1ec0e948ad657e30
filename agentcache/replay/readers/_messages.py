"""Recorded chat messages, answers and tools in one form, so that equal prompts compare equal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agentcache.replay.readers.base import Call, Message, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "chat_calls",
    "read_answer",
    "read_message",
    "read_messages",
    "read_tools",
    "share",
    "tool_call",
]

_ROLES = ("system", "user", "assistant", "tool")
_NOTHING_BEFORE = "an assistant message with nothing before it is no model call"


def read_messages(value: object, place: Place) -> list[Message]:
    """A list of messages in OpenAI form."""
    rows = place.items(value)
    return [read_message(row, place.item(idx)) for idx, row in enumerate(rows)]


def read_message(value: object, place: Place) -> Message:
    """One message in OpenAI form, with only what a prompt is made of.

    Text parts are joined. A null content of an assistant is the empty text. `cache_control` marks
    and everything the model never sees are left out.
    """
    row = place.mapping(value)
    role = place.key("role").text(row.get("role"))
    if role == "developer":
        role = "system"
    if role not in _ROLES:
        raise place.key("role").error(
            f"is {role[:40]!r}", f"it should be one of {', '.join(_ROLES)}"
        )
    message: Message = {"role": role, "content": _content(row, role, place)}
    if role == "assistant":
        _read_assistant_fields(row, message, place)
    for name in ("tool_call_id", "name"):
        if row.get(name) is not None:
            message[name] = place.key(name).text(row[name])
    return message


def read_answer(value: object, place: Place) -> Message:
    """A recorded answer: an assistant message, or the raw completion that holds one."""
    row = place.mapping(value)
    if "choices" in row:
        choices = place.key("choices").items(row["choices"])
        if not choices:
            raise place.key("choices").error("is empty", "a completion needs one choice")
        place = place.key("choices").item(0)
        row = place.mapping(choices[0])
        place = place.key("message")
        row = place.mapping(row.get("message"))
    answer = read_message(row, place)
    if answer["role"] != "assistant":
        raise place.key("role").error(
            f"is {answer['role']!r}", "the answer of a call is an assistant message"
        )
    return answer


def read_tools(value: object, place: Place) -> tuple[dict[str, Any], ...] | None:
    """Tool schemas in OpenAI form without `cache_control` marks; None where there are none."""
    if value is None or value == []:
        return None
    tools = []
    for idx, entry in enumerate(place.items(value)):
        where = place.item(idx)
        tool = where.mapping(entry)
        function = where.key("function").mapping(tool.get("function"))
        where.key("function.name").text(function.get("name"))
        unmarked = {**tool, "function": _without_mark(function)}
        tools.append(_encodable(_without_mark(unmarked), where))
    return tuple(tools)


def tool_call(name: str, arguments: str, call_id: str | None) -> dict[str, Any]:
    """One tool call in OpenAI form; `arguments` is JSON text as the model wrote it."""
    made: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return made if call_id is None else {"id": call_id, **made}


def chat_calls(
    rows: Sequence[Message],
    place: Place,
    *,
    at: Mapping[int, float] | None = None,
    is_call: Callable[[int], bool] = lambda idx: True,
    exact: bool = True,
) -> tuple[Call, ...]:
    """The calls of a chat that only grew: each assistant row answers all the rows before it.

    `at` gives times by row index. Rows for which `is_call` is False are prompt only.
    """
    calls = []
    for idx, row in enumerate(rows):
        if row["role"] != "assistant" or not is_call(idx):
            continue
        if idx == 0:
            place.notes.add(_NOTHING_BEFORE)
            continue
        moment = at.get(idx) if at else None
        calls.append(Call(tuple(rows[:idx]), None, row, moment, exact))
    return tuple(calls)


def share(messages: Sequence[Message], earlier: Sequence[Message]) -> tuple[Message, ...]:
    """The same messages, made of the objects of `earlier` where equal: prompts mostly repeat."""
    shared = [old if new == old else new for new, old in zip(messages, earlier, strict=False)]
    return (*shared, *messages[len(shared) :])


def _content(row: Mapping[str, Any], role: str, place: Place) -> str:
    content, where = row.get("content"), place.key("content")
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list):
        return "".join(_part_text(part, where.item(idx)) for idx, part in enumerate(content))
    if not isinstance(content, str):
        raise where.wrong_type(content, "a string or a list of text parts")
    return where.text(content)


def _part_text(value: object, place: Place) -> str:
    part = place.mapping(value)
    kind = place.key("type").text(part.get("type"))
    if kind != "text":
        raise place.key("type").error(
            f"is {kind[:40]!r}", "only text can be replayed: leave this run out"
        )
    return place.key("text").text(part.get("text"))


def _read_assistant_fields(row: Mapping[str, Any], message: Message, place: Place) -> None:
    if row.get("reasoning_content"):
        where = place.key("reasoning_content")
        message["reasoning_content"] = where.text(row["reasoning_content"])
    if row.get("tool_calls"):
        where = place.key("tool_calls")
        calls = where.items(row["tool_calls"])
        message["tool_calls"] = [
            _read_tool_call(call, where.item(idx)) for idx, call in enumerate(calls)
        ]
    if row.get("function_call"):
        raise place.key("function_call").error(
            "is the form that came before tool calls", "record it as an entry of tool_calls"
        )


def _read_tool_call(value: object, place: Place) -> dict[str, Any]:
    call = place.mapping(value)
    inner = place.key("function")
    function = inner.mapping(call.get("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        text = json.dumps(_encodable(arguments, inner), ensure_ascii=False)
    else:
        text = inner.key("arguments").text(arguments)
    call_id = call.get("id")
    return tool_call(
        inner.key("name").text(function.get("name")),
        text,
        None if call_id is None else place.key("id").text(call_id),
    )


def _without_mark(value: dict[str, Any]) -> dict[str, Any]:
    return {key: inner for key, inner in value.items() if key != "cache_control"}


def _encodable(value: Any, place: Place) -> Any:
    """A copy of a JSON value whose every string can be encoded."""
    if isinstance(value, str):
        return place.text(value)
    if isinstance(value, list):
        return [_encodable(inner, place) for inner in value]
    if isinstance(value, dict):
        return {place.text(key): _encodable(inner, place) for key, inner in value.items()}
    return value
