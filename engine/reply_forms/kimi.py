"""Kimi's sections: each call has an id that the model gives, `functions.NAME:INDEX`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from agentcache.engine.reply_forms.base import Call, CallForm, CallSpace, NotACall
from agentcache.engine.reply_forms.json_calls import arguments_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.engine.reply_forms.base import Parameters
    from agentcache.engine.reply_forms.cursor import Cursor
    from agentcache.engine.reply_forms.lark import Lark

__all__ = ["Kimi"]

_OPEN, _CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class Kimi(CallForm):
    name = "kimi"
    openers = (_OPEN,)

    def read(self, cursor: Cursor, parameters: Parameters) -> tuple[Call, ...]:
        cursor.space()
        cursor.literal(_CALL)
        calls = [_read_call(cursor)]
        while True:
            cursor.space()
            if cursor.ended and cursor.at == len(cursor.text):
                return tuple(calls)  # whole calls, in a section that was not closed
            if cursor.literal(_CALL, _CLOSE) == _CLOSE:
                return tuple(calls)
            calls.append(_read_call(cursor))

    def frame(self, space: CallSpace) -> tuple[str, str, str]:
        return f"{_OPEN}{space.after_open}", "", f"{space.before_close}{_CLOSE}"

    def write_call(self, call: Call, space: CallSpace) -> str:
        call_id = call.id or f"functions.{call.name}:0"
        return f"{_CALL}{call_id}{_ARGUMENTS}{call.arguments}{_CALL_END}"

    def call_rule(self, lark: Lark, name: str, schema: Mapping[str, Any], space: CallSpace) -> str:
        begin, arguments = lark.text(f"{_CALL}functions.{name}:"), lark.text(_ARGUMENTS)
        return f"{begin} /[0-9]{{1,3}}/ {arguments} {lark.json(schema)} {lark.text(_CALL_END)}"


def _read_call(cursor: Cursor) -> Call:
    call_id = cursor.until(_ARGUMENTS).strip()
    match = _ID.fullmatch(call_id)
    if match is None:
        raise NotACall
    cursor.space()
    arguments = arguments_text(cursor.brackets("{"))
    cursor.space()
    cursor.literal(_CALL_END)
    return Call(match[1], arguments, call_id)
