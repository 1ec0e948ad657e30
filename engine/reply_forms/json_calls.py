"""Calls written as JSON objects with a name and arguments, kept as the model wrote them."""

from __future__ import annotations

import json
from typing import Any

from agentcache.engine.reply_forms.base import Call, NotACall
from agentcache.engine.reply_forms.cursor import skip_space

__all__ = ["arguments_text", "json_call", "json_list"]

_DECODER = json.JSONDecoder()
_FAULTS = (ValueError, IndexError, RecursionError)


def json_call(text: str) -> Call:
    """The call that a JSON object stands for. Raises NotACall."""
    try:
        members = _members(text)
    except _FAULTS:
        raise NotACall from None
    name, _ = members.get("name", (None, ""))
    key = "arguments" if "arguments" in members else "parameters"
    arguments = _object_text(*members.get(key, ({}, "{}")))
    if not isinstance(name, str) or not name or arguments is None:
        raise NotACall
    return Call(name, arguments)


def json_list(text: str) -> tuple[Call, ...]:
    """The calls of a JSON list of such objects, at least one. Raises NotACall."""
    try:
        json.loads(text)
        objects = _elements(text)
    except _FAULTS:
        raise NotACall from None
    if not objects:
        raise NotACall
    return tuple(map(json_call, objects))


def arguments_text(text: str) -> str:
    """JSON text of an object, as it is. Raises NotACall where it is none."""
    try:
        found = _object_text(json.loads(text), text)
    except _FAULTS:
        raise NotACall from None
    if found is None:
        raise NotACall
    return found


def _object_text(value: Any, raw: str) -> str | None:
    """The arguments as JSON text: the object as written, or the text that a string holds."""
    if isinstance(value, dict):
        return raw
    if isinstance(value, str):
        try:
            return value if isinstance(json.loads(value), dict) else None
        except (ValueError, RecursionError):
            return None
    return None


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """Members of a JSON object as (value, text as written). Raises ValueError where it is none."""
    if not isinstance(json.loads(text), dict):
        raise ValueError(text)
    members: dict[str, tuple[Any, str]] = {}
    at = skip_space(text, 1)
    # The object is known to be well formed, so only members and their separators can follow.
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = skip_space(text, skip_space(text, at) + 1)
        value, after = _DECODER.raw_decode(text, at)
        members[key] = (value, text[at:after])
        at = skip_space(text, after)
        if text[at] == ",":
            at = skip_space(text, at + 1)
    return members


def _elements(text: str) -> list[str]:
    """Elements of a well-formed JSON list, as written."""
    elements = []
    at = skip_space(text, 1)
    while text[at] != "]":
        _, after = _DECODER.raw_decode(text, at)
        elements.append(text[at:after])
        at = skip_space(text, after)
        if text[at] == ",":
            at = skip_space(text, at + 1)
    return elements
