"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agentcache.engine.reply_forms.base import (
    Call,
    CallForm,
    CallSpace,
    NotACall,
    property_schemas,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.engine.reply_forms.base import Parameters
    from agentcache.engine.reply_forms.cursor import Cursor
    from agentcache.engine.reply_forms.lark import Lark

__all__ = ["QwenXml"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_CLOSE = "<function=", "</function>"
_PARAMETER, _PARAMETER_CLOSE = "<parameter=", "</parameter>"
_JSON_TYPES = frozenset({"integer", "number", "boolean", "null", "object", "array"})


class QwenXml(CallForm):
    """Values are plain text; what they mean follows from the tool's schema. Without one they are
    strings, so that the template writes them back as they were."""

    name = "qwen-xml"
    openers = (_OPEN,)

    def read(self, cursor: Cursor, parameters: Parameters) -> tuple[Call, ...]:
        cursor.space()
        cursor.literal(_FUNCTION)
        name = _tag_name(cursor)
        properties = property_schemas(parameters.get(name, {}))
        values: dict[str, Any] = {}
        while True:
            cursor.space()
            if cursor.literal(_PARAMETER, _FUNCTION_CLOSE) == _FUNCTION_CLOSE:
                break
            key = _tag_name(cursor)
            text = cursor.until(_PARAMETER_CLOSE).removeprefix("\n").removesuffix("\n")
            values[key] = _value(text, properties.get(key))
        cursor.space()
        cursor.literal(_CLOSE)
        return (Call(name, json.dumps(values, ensure_ascii=False)),)

    def frame(self, space: CallSpace) -> tuple[str, str, str]:
        return "", space.between, ""

    def write_call(self, call: Call, space: CallSpace) -> str:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"arguments": call.arguments}
        written = "".join(
            f"{_parameter_open(key)}{_text(value)}\n{_PARAMETER_CLOSE}\n"
            for key, value in arguments.items()
        )
        return f"{_begin(call.name)}{written}{_END}"

    def call_rule(self, lark: Lark, name: str, schema: Mapping[str, Any], space: CallSpace) -> str:
        required = schema.get("required", ())
        parts = [lark.text(_begin(name))]
        for key, rule in property_schemas(schema).items():
            one = lark.rule(f"{lark.text(_parameter_open(key))} {_value_rule(lark, rule)}")
            parts.append(one if key in required else f"{one}?")
        return " ".join([*parts, lark.text(_END)])


_END = f"{_FUNCTION_CLOSE}\n{_CLOSE}"


def _begin(name: str) -> str:
    return f"{_OPEN}\n{_FUNCTION}{name}>\n"


def _parameter_open(key: str) -> str:
    return f"{_PARAMETER}{key}>\n"


def _tag_name(cursor: Cursor) -> str:
    name = cursor.until(">").strip()
    if not name or "\n" in name or "<" in name:
        raise NotACall
    return name


def _types(schema: Any) -> set[str]:
    """The JSON types a schema allows, as far as it says so plainly."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type", [])
    types = {declared} if isinstance(declared, str) else set(declared)
    for choices in ("anyOf", "oneOf"):
        for choice in schema.get(choices) or ():
            types |= _types(choice)
    return types


def _value(text: str, schema: Any) -> Any:
    """What a text stands for: of the types allowed, the first it can be read as, else the text."""
    types = _types(schema)
    if not types & _JSON_TYPES:
        return text
    try:
        value = json.loads(_PYTHON_WORDS.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    return value if _type_of(value) & types else text


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Templates write these as Python does, so models do too."""


def _type_of(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    return {"object" if isinstance(value, dict) else "array" if isinstance(value, list) else ""}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _value_rule(lark: Lark, schema: Mapping[str, Any]) -> str:
    """Text of a value, and the end of its parameter. Of strings, length and choices are kept to."""
    close = lark.text(f"\n{_PARAMETER_CLOSE}\n")
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        said = lark.rule(" | ".join(lark.text(_text(value)) or '""' for value in choices))
        return f"{said} {close}"
    types = _types(schema)
    if types and types <= _JSON_TYPES:
        return f"{lark.json(schema)} {close}"
    longest = schema.get("maxLength")
    if isinstance(longest, int):
        # A text without "<" cannot hold the tag that ends it.
        return f"/[^<]{{{schema.get('minLength', 0)},{longest}}}/ {close}"
    newline = lark.text("\n")
    return f"{lark.up_to(f'{chr(10)}{_PARAMETER_CLOSE}')} {newline}"
