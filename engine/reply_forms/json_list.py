"""A list of `{"name": …, "arguments": {…}}` behind one tag: Granite 3, Nemotron, Jamba."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agentcache.engine.reply_forms.base import Call, CallForm, CallSpace
from agentcache.engine.reply_forms.json_calls import json_call, json_list

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.engine.reply_forms.base import Parameters
    from agentcache.engine.reply_forms.cursor import Cursor
    from agentcache.engine.reply_forms.lark import Lark

__all__ = ["JsonList"]


class JsonList(CallForm):
    """closers: by opener, what may close its block. lenient: models are known to leave it out, or
    to write a single object in place of the list."""

    def __init__(self, name: str, closers: Mapping[str, str], *, lenient: bool = False) -> None:
        self.name = name
        self.openers = tuple(closers)
        self._closers = closers
        self._lenient = lenient

    def read(self, cursor: Cursor, parameters: Parameters) -> tuple[Call, ...]:
        cursor.space()
        calls = self._read_calls(cursor)
        closers = tuple(close for close in self._closers.values() if close)
        if self._lenient:
            cursor.optional(*closers)
        else:
            cursor.space()
            cursor.literal(*closers)
        return calls

    def _read_calls(self, cursor: Cursor) -> tuple[Call, ...]:
        if self._lenient and cursor.text.startswith("{", cursor.at):
            return (json_call(cursor.brackets("{")),)
        return json_list(cursor.brackets("["))

    def frame(self, space: CallSpace) -> tuple[str, str, str]:
        opener = self.openers[0]
        close = "" if self._lenient else f"{space.before_close}{self._closers[opener]}"
        return f"{opener}{space.after_open}[", ", ", f"]{close}"

    def write_call(self, call: Call, space: CallSpace) -> str:
        return f"{_begin(call.name)}{call.arguments}}}"

    def call_rule(self, lark: Lark, name: str, schema: Mapping[str, Any], space: CallSpace) -> str:
        return f"{lark.text(_begin(name))} {lark.json(schema)} {lark.text('}')}"


def _begin(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
