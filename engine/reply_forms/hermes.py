"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one block a call."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agentcache.engine.reply_forms.base import Call, CallForm, CallSpace
from agentcache.engine.reply_forms.json_calls import json_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.engine.reply_forms.base import Parameters
    from agentcache.engine.reply_forms.cursor import Cursor
    from agentcache.engine.reply_forms.lark import Lark

__all__ = ["Hermes"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Hermes(CallForm):
    name = "hermes"
    openers = (_OPEN,)

    def read(self, cursor: Cursor, parameters: Parameters) -> tuple[Call, ...]:
        cursor.space()
        text = cursor.brackets("{")
        cursor.space()
        cursor.literal(_CLOSE)
        return (json_call(text),)

    def frame(self, space: CallSpace) -> tuple[str, str, str]:
        return "", space.between, ""

    def write_call(self, call: Call, space: CallSpace) -> str:
        return f"{_begin(call.name, space)}{call.arguments}{_end(space)}"

    def call_rule(self, lark: Lark, name: str, schema: Mapping[str, Any], space: CallSpace) -> str:
        return f"{lark.text(_begin(name, space))} {lark.json(schema)} {lark.text(_end(space))}"


def _begin(name: str, space: CallSpace) -> str:
    said = json.dumps(name, ensure_ascii=False)
    return f'{_OPEN}{space.after_open}{{"name": {said}, "arguments": '


def _end(space: CallSpace) -> str:
    return f"}}{space.before_close}{_CLOSE}"
