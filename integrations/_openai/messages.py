"""Messages and tools of a request, checked and reduced to what templates know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentcache.integrations._openai.fields import InvalidField, check_value

__all__ = ["read_messages", "read_tools"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEPT = ("name", "reasoning_content", "tool_call_id")
_REFUSED = ("audio", "function_call", "images")
_MAX_TOOLS = 1024


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Messages for `Session.complete`: role, content, calls, reasoning, and nothing else.

    "developer" is read as "system". A message with `cache_control`, its own or of one of its parts,
    gets `mark=True`: a checkpoint at its end. Parts of content stay as they are, less
    `cache_control`. Raises InvalidField, naming the path: for another role, images and other parts
    that are no text, results of calls that nobody made, malformed calls, lone surrogates.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidField("messages", f"is of type {type(value).__name__}; give a list")
    if not value:
        raise InvalidField("messages", "is empty; give at least one message")
    made_calls: set[str] = set()
    return [_message(item, f"messages[{at}]", made_calls) for at, item in enumerate(value)]


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool schemas for `Session.complete`; None where there are none. Raises InvalidField."""
    if value is None:
        return None
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidField("tools", f"is of type {type(value).__name__}; give a list")
    if len(value) > _MAX_TOOLS:
        raise InvalidField("tools", f"holds {len(value)} tools, the limit is {_MAX_TOOLS}")
    tools = [_tool(item, f"tools[{at}]") for at, item in enumerate(value)]
    names: set[str] = set()
    for at, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in names:
            raise InvalidField(f"tools[{at}].function.name", f"is {name!r} a second time")
        names.add(name)
    return tools or None


def _tool(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidField(param, f"is of type {type(value).__name__}; give an object")
    check_value(value, param)
    if value.get("type", "function") != "function":
        raise InvalidField(f"{param}.type", f"is {value['type']!r}; only functions can be called")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise InvalidField(f"{param}.function", "is missing; give its name and parameters")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidField(f"{param}.function.name", "is missing; give a text")
    if not isinstance(function.get("parameters", {}), (Mapping, type(None))):
        raise InvalidField(f"{param}.function.parameters", "is no JSON schema; give an object")
    return {"type": "function", "function": dict(function)}


def _message(value: Any, param: str, made_calls: set[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidField(param, f"is of type {type(value).__name__}; give an object")
    role = value.get("role")
    if role not in _ROLES:
        raise InvalidField(f"{param}.role", f"is {role!r}; known are {', '.join(_ROLES)}")
    check_value(value, param)
    for key in _REFUSED:
        if value.get(key):
            raise InvalidField(f"{param}.{key}", "cannot be read; give text and tool_calls only")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = _content(value, role, param)
    for key in _KEPT:
        text = value.get(key)
        if text is not None:
            if not isinstance(text, str):
                raise InvalidField(f"{param}.{key}", f"is of type {type(text).__name__}")
            message[key] = text
    if role == "assistant" and value.get("tool_calls"):
        message["tool_calls"] = _calls(value["tool_calls"], f"{param}.tool_calls", made_calls)
    elif role == "tool":
        _check_answers(message, param, made_calls)
    if _is_marked(value):
        message["mark"] = True
    return message


def _content(message: Mapping[str, Any], role: str, param: str) -> Any:
    content = message.get("content")
    if content is None and role == "assistant":
        return None if message.get("tool_calls") else ""
    if content is None:
        raise InvalidField(f"{param}.content", "is missing; give a text")
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidField(
            f"{param}.content",
            f"is of type {type(content).__name__}; give a text or a list of parts",
        )
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidField(
                f"{param}.content[{at}]", f"is a part of type {kind!r}; only texts can be read"
            )
    return [{"type": "text", "text": part["text"]} for part in content]


def _calls(value: Any, param: str, made_calls: set[str]) -> list[dict[str, Any]]:
    if not isinstance(value, (list, tuple)):
        raise InvalidField(param, f"is of type {type(value).__name__}; give a list")
    calls = []
    for at, call in enumerate(value):
        where = f"{param}[{at}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidField(f"{where}.function.name", "is missing; give the function's name")
        if not isinstance(call.get("id"), str) or not call["id"]:
            raise InvalidField(f"{where}.id", "is missing; give the text that results name")
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, (str, Mapping)):
            kind = type(arguments).__name__
            raise InvalidField(f"{where}.function.arguments", f"is of type {kind}; give JSON text")
        made_calls.add(call["id"])
        said = {"name": function["name"], "arguments": arguments}
        calls.append({"id": call["id"], "type": "function", "function": said})
    return calls


def _check_answers(message: Mapping[str, Any], param: str, made_calls: set[str]) -> None:
    answered = message.get("tool_call_id")
    if answered is None:
        raise InvalidField(f"{param}.tool_call_id", "is missing; name the call that is answered")
    if answered not in made_calls:
        raise InvalidField(
            f"{param}.tool_call_id",
            f"is {answered!r}, but no earlier message made that call; keep the assistant's message "
            "with its tool_calls in the list",
        )


def _is_marked(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else ()
    return bool(message.get("cache_control")) or any(part.get("cache_control") for part in parts)
