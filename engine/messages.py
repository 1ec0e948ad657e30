"""Message lists checked, ordered and compared before a template sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import eq
from typing import Any, TypeVar

from agentcache.engine.tokenizer import check_encodable
from agentcache.errors import InvalidRequest

__all__ = [
    "REASONING_NAMES",
    "STANDARD_ROLES",
    "call_order",
    "checked_messages",
    "checked_tools",
    "copied",
    "same_message",
    "same_prefix",
    "strings",
]

T = TypeVar("T")

STANDARD_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names that templates and callers know reasoning by; the first is the standard one."""

_MARKS = ("mark", "cache_control")
"""Keys that ask for a checkpoint; no template writes them."""

_COMPARED_APART = frozenset({"content", "tool_calls", *REASONING_NAMES, *_MARKS})


def checked_messages(messages: Any, roles: frozenset[str], first: int = 0) -> list[dict[str, Any]]:
    """Copies of the messages fit for a template: content is a text, keys without value are gone.

    `mark` is still there. `first` is the index that errors give the first of them.

    Raises InvalidRequest, naming the index, for anything a template would stumble over or drop: no
    list, no message, an unknown role, missing or wrong content, images, malformed tool calls,
    values that are not JSON, text that cannot be encoded.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"messages is a {type(messages).__name__}; give a list of dicts with role and content"
        )
    if not messages:
        raise InvalidRequest("the list of messages is empty; give at least one message")
    return [_checked(message, index, roles) for index, message in enumerate(messages, first)]


def checked_tools(tools: Any) -> list[Mapping[str, Any]] | None:
    """The tool schemas, None where there are none. Raises InvalidRequest for anything but dicts."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequest(f"tools is a {type(tools).__name__}; give a list of JSON schemas")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequest(
                f"tool {index} is a {type(tool).__name__}; give its JSON schema as a dict"
            )
        _check_values(tool, f"tool {index}")
    return list(tools) or None


def call_order(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the messages with the results of parallel tool calls in the order of the calls.

    Results come back in order of completion, and in another order after a reload; in the order of
    the calls the prompt stays the same. Results that name no call of theirs stay where they are.
    """
    order = list(range(len(messages)))
    for index, message in enumerate(messages):
        if not message.get("tool_calls"):
            continue
        call_ids = [call.get("id") for call in _calls(message)]
        end = index + 1
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        if end < index + 3:
            continue
        answered = [messages[i].get("tool_call_id") for i in range(index + 1, end)]
        if all(i is not None and i in call_ids for i in answered):
            order[index + 1 : end] = sorted(
                range(index + 1, end),
                key=lambda i: call_ids.index(messages[i]["tool_call_id"]),
            )
    return order


def same_message(known: Mapping[str, Any], given: Any) -> bool:
    """Whether a message that came back from the caller, checked or not, is the one that is known.

    Not compared: marks, ids of tool calls, the spelling of JSON arguments, and reasoning that the
    caller left out. Content None equals "", and any other key without value a missing one; a
    template may write every key that has one.
    """
    if known == given:
        return True
    if not isinstance(given, Mapping):
        return False
    if _plain_content(known.get("content")) != _plain_content(given.get("content")):
        return False
    if not _same_reasoning(known, given):
        return False
    if any(known.get(key) != given.get(key) for key in {*known, *given} - _COMPARED_APART):
        return False
    return _called(known) == _called(given)


def same_prefix(known: Sequence[Mapping[str, Any]], given: Sequence[Any]) -> bool:
    """Whether `given` begins with all of `known`, results of parallel tool calls in any order."""
    if len(given) < len(known):
        return False
    head = given[: len(known)]
    if all(map(eq, known, head)):
        return True
    return all(isinstance(message, Mapping) for message in head) and all(
        same_message(known[i], head[j])
        for i, j in zip(call_order(known), call_order(head), strict=True)
    )


def copied(value: T) -> T:
    """A JSON value in a copy that changes of the first one do not reach; anything else, and what is
    nested too deep for a message, as it is."""
    try:
        copy: T = _copied(value)
    except RecursionError:
        return value
    return copy


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


def _checked(message: Any, index: int, roles: frozenset[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"message {index} is a {type(message).__name__}; give a dict with role and content"
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        raise InvalidRequest(
            f"message {index} has the role {role!r}; known roles: {', '.join(sorted(roles))}"
        )
    where = f"message {index} ({role})"
    _check_values(message, where)
    checked = {key: value for key, value in message.items() if value is not None}
    checked["content"] = _content(message, where)
    if "tool_calls" in checked:
        _check_calls(checked["tool_calls"], where)
    return checked


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if content is None:
        says_something = message.keys() & {"content", "tool_calls", "reasoning_content"}
        if message["role"] == "assistant" and says_something:
            return ""
        raise InvalidRequest(f"{where} has no content; give a text")
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(
            f"{where} has content of type {type(content).__name__}; give a text or a list of parts"
        )
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(
                f"{where} holds a part of type {kind!r}; this model reads text parts only"
            )
    return str(_plain_content(content))


def _plain_content(content: Any) -> Any:
    """Content as one text: parts are set on lines of their own, nothing is the empty text."""
    if content is None:
        return ""
    if isinstance(content, (list, tuple)) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    return content


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(f"{where} has tool_calls of type {type(calls).__name__}; give a list")
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}: tool call {number} names no function; give its name")
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, (str, Mapping)):
            raise InvalidRequest(
                f"{where}: tool call {number} has arguments of type {type(arguments).__name__}; "
                "give a JSON text or a dict"
            )


def _check_values(value: Any, where: str) -> None:
    """Raise InvalidRequest for what is not JSON, is nested too deep, or cannot be encoded."""
    try:
        _check_json(value, where)
    except RecursionError as error:
        raise InvalidRequest(f"{where} is nested too deep; flatten it") from error


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, str):
        check_encodable(value, where)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidRequest(f"{where} has the key {key!r}; keys are texts")
            check_encodable(key, where)
            _check_json(item, where)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_json(item, where)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise InvalidRequest(f"{where} holds a {type(value).__name__}; give JSON values only")


def _same_reasoning(known: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether reasoning under each name it was given is what is known, under whatever name."""
    first = next((known[name] for name in REASONING_NAMES if known.get(name) is not None), None)
    return all(
        given[name] == (first if known.get(name) is None else known[name])
        for name in REASONING_NAMES
        if given.get(name)
    )


def _calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tool calls of a message, those aside that are none."""
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return []
    return [call for call in calls if isinstance(call, Mapping)]


def _called(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(name, arguments) of the calls."""
    functions = [call.get("function", call) for call in _calls(message)]
    return [
        (function.get("name"), _arguments(function.get("arguments")))
        for function in functions
        if isinstance(function, Mapping)
    ]


def _arguments(arguments: Any) -> Any:
    """Arguments as a value, so that their spelling does not matter."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
