"""`[name(key="value", n=1)]` between two tags, as LFM2 writes calls."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from agentcache.engine.reply_forms.base import (
    Call,
    CallForm,
    CallSpace,
    NotACall,
    property_schemas,
)
from agentcache.engine.reply_forms.cursor import skip_space

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.engine.reply_forms.base import Parameters
    from agentcache.engine.reply_forms.cursor import Cursor
    from agentcache.engine.reply_forms.lark import Lark

__all__ = ["Pythonic"]

_OPEN, _CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'', re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_DEEPEST = 100


class Pythonic(CallForm):
    name = "lfm2"
    openers = (_OPEN,)

    def read(self, cursor: Cursor, parameters: Parameters) -> tuple[Call, ...]:
        cursor.space()
        text = cursor.brackets("[", json=False)
        cursor.space()
        cursor.literal(_CLOSE)
        return _Reader(text).calls()

    def frame(self, space: CallSpace) -> tuple[str, str, str]:
        return f"{_OPEN}{space.after_open}[", ", ", f"]{space.before_close}{_CLOSE}"

    def write_call(self, call: Call, space: CallSpace) -> str:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"arguments": call.arguments}
        said = ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
        return f"{call.name}({said})"

    def call_rule(self, lark: Lark, name: str, schema: Mapping[str, Any], space: CallSpace) -> str:
        keywords = {
            key: lark.rule(f"{lark.text(f'{key}=')} {_value_rule(lark, rule)}")
            for key, rule in property_schemas(schema).items()
        }
        comma = lark.text(", ")
        required = [keywords[key] for key in keywords if key in schema.get("required", ())]
        optional = [keywords[key] for key in keywords if key not in schema.get("required", ())]
        if required:
            # What is not required comes last, each after a comma.
            said = f" {comma} ".join(required)
            said += "".join(f" ({comma} {rule})?" for rule in optional)
        else:
            said = _chain(comma, optional)
        return f"{lark.text(f'{name}(')} {said} {lark.text(')')}"


class _Reader:
    """Reads literals of Python and JSON. Raises NotACall for anything else."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def calls(self) -> tuple[Call, ...]:
        self._expect("[")
        calls = [self._call()]
        while self._accept(","):
            calls.append(self._call())
        self._expect("]")
        return tuple(calls)

    def _call(self) -> Call:
        name = self._match(_NAME)
        self._expect("(")
        values: dict[str, Any] = {}
        while not self._accept(")"):
            key = self._match(_NAME)
            self._expect("=")
            values[key] = self._value(0)
            if not self._accept(","):
                self._expect(")")
                break
        return Call(name, json.dumps(values, ensure_ascii=False))

    def _value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise NotACall
        self._at = skip_space(self._text, self._at)
        match = _STRING.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            return _unescaped(match[1] if match[1] is not None else match[2])
        if self._accept("["):
            return self._items("]", depth)
        if self._accept("("):
            return self._items(")", depth)
        if self._accept("{"):
            return self._members(depth)
        match = _NUMBER.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            return _number(match[0])
        word = self._match(_NAME)
        if word not in _WORDS:
            raise NotACall
        return _WORDS[word]

    def _items(self, close: str, depth: int) -> list[Any]:
        items = []
        while not self._accept(close):
            items.append(self._value(depth + 1))
            if not self._accept(","):
                self._expect(close)
                break
        return items

    def _members(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        while not self._accept("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str):
                raise NotACall
            self._expect(":")
            members[key] = self._value(depth + 1)
            if not self._accept(","):
                self._expect("}")
                break
        return members

    def _accept(self, char: str) -> bool:
        self._at = skip_space(self._text, self._at)
        found = self._text.startswith(char, self._at)
        self._at += found
        return found

    def _expect(self, char: str) -> None:
        if not self._accept(char):
            raise NotACall

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._at = skip_space(self._text, self._at)
        match = pattern.match(self._text, self._at)
        if match is None:
            raise NotACall
        self._at = match.end()
        return match[0]


def _number(text: str) -> int | float:
    try:
        value = float(text) if any(char in text for char in ".eE") else int(text)
    except ValueError:
        raise NotACall from None
    if value in (float("inf"), float("-inf")):
        raise NotACall
    return value


def _unescaped(text: str) -> str:
    said = _ESCAPE.sub(_character, text)
    try:
        # Two escapes may be halves of one character.
        return said.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise NotACall from None


def _character(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code, code if code in "\"'/\\" else match[0])


def _literal(value: Any) -> str:
    """A value as Python writes it, strings in double quotes."""
    if isinstance(value, dict):
        inside = ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, bool) or value is None:
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def _chain(comma: str, rules: list[str]) -> str:
    """Any of the keywords in their order, with commas between those that are there."""
    chains = [
        " ".join([rule, *(f"({comma} {later})?" for later in rules[index + 1 :])])
        for index, rule in enumerate(rules)
    ]
    return f"({' | '.join(chains)})?" if chains else ""


def _value_rule(lark: Lark, schema: Mapping[str, Any]) -> str:
    if schema.get("type") == "boolean":
        return '("True" | "False")'
    if schema.get("type") == "null":
        return '"None"'
    return lark.json(schema or {"type": "string"})
