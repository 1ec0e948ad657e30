"""What form a reply has: text and calls as the model writes them, or JSON that may be a call.

A grammar covers a whole reply. Where that may be JSON of a schema or a call, the call is sampled as
JSON too, `{"name": ..., "arguments": {...}}`, and read as a call here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from agentcache.integrations._openai.fields import UnsupportedField

if TYPE_CHECKING:
    from agentcache import Turn

__all__ = ["Delta", "FormReader", "Piece", "ReplyForm", "call_schema"]


class Delta(Protocol):
    """What a `TurnStream` gives."""

    @property
    def text(self) -> str: ...
    @property
    def reasoning(self) -> str: ...
    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What a caller gets to see next: texts to append, and whole tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How a reply is to be read.

    json_calls: functions that a reply in JSON may call; none where replies are not JSON of calls.
    may_call: whether calls are calls; they are text where the request forbids them. first_call:
    number of the first call made of JSON, so that ids stay unique in a conversation.
    """

    json_calls: frozenset[str] = frozenset()
    may_call: bool = True
    first_call: int = 0

    def reader(self) -> FormReader:
        """A reader for one streamed reply."""
        return FormReader(self)

    def message(self, turn: Turn) -> dict[str, Any]:
        """The assistant's message of a finished turn; what a reader's pieces add up to."""
        said = turn.message
        reader = self.reader()
        first = reader.read(said["content"], "", tuple(said.get("tool_calls", ())))
        last = reader.finish()
        message: dict[str, Any] = {"role": "assistant", "content": first.content + last.content}
        if "reasoning_content" in said:
            message["reasoning_content"] = said["reasoning_content"]
        calls = [*first.tool_calls, *last.tool_calls]
        if calls:
            message["tool_calls"] = calls
        return message


class FormReader:
    """Makes what the caller sees out of a stream's deltas."""

    def __init__(self, form: ReplyForm) -> None:
        self._form = form
        self._held: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def push(self, delta: Delta) -> Piece:
        """What a delta adds; JSON that may turn out to be a call waits for the end."""
        return self.read(delta.text, delta.reasoning, delta.tool_calls)

    def read(self, text: str, reasoning: str, calls: Sequence[dict[str, Any]]) -> Piece:
        """`push` for a delta in pieces."""
        form = self._form
        if form.json_calls:
            self._held.append(text)
            text = ""
        if not form.may_call:
            self._held.extend(_call_text(call) for call in calls)
            calls = ()
        return Piece(text, reasoning, tuple(calls))

    def finish(self) -> Piece:
        """What was held back, once the reply is over."""
        held = "".join(self._held)
        call = _called(held, self._form) if self._form.json_calls else None
        return Piece(held) if call is None else Piece(tool_calls=(call,))


def call_schema(
    tools: Sequence[Mapping[str, Any]], beside: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """JSON schema of a call of one of the tools, or of what `beside` allows.

    Raises UnsupportedField for schemas that refer to more than their own definitions.
    """
    schemas: list[Mapping[str, Any]] = []
    definitions: dict[str, Any] = {}
    for at, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {"type": "object"}
        param = f"tools[{at}].function.parameters"
        schemas.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    "arguments": _moved(schema, f"tool{at}_", definitions, param),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    if beside is not None:
        schemas.append(_moved(beside, "reply_", definitions, "response_format"))
    whole = dict(schemas[0]) if len(schemas) == 1 else {"anyOf": schemas}
    return {**whole, "$defs": definitions} if definitions else whole


def _moved(
    schema: Mapping[str, Any], prefix: str, definitions: dict[str, Any], param: str
) -> dict[str, Any]:
    """A schema to stand inside another one: its definitions go to those of the whole."""

    def walk(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [walk(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        out = {key: walk(item) for key, item in value.items()}
        target = out.get("$ref")
        if isinstance(target, str):
            name = target.removeprefix("#/$defs/").removeprefix("#/definitions/")
            if "/" in name or "#" in name:
                raise UnsupportedField(
                    param, f"refers to {target!r}; references go to #/$defs/ only"
                )
            out["$ref"] = f"#/$defs/{prefix}{name}"
        return out

    own = dict(schema)
    for key in ("$defs", "definitions"):
        for name, inner in (own.pop(key, None) or {}).items():
            definitions[prefix + name] = walk(inner)
    moved: dict[str, Any] = walk(own)
    return moved


def _called(text: str, form: ReplyForm) -> dict[str, Any] | None:
    """The call that a reply in JSON is; None where it is another text, or was cut."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.keys() != {"name", "arguments"}:
        return None
    if said["name"] not in form.json_calls:
        return None
    arguments = json.dumps(said["arguments"], ensure_ascii=False)
    return {
        "id": f"call{form.first_call:05d}",
        "type": "function",
        "function": {"name": said["name"], "arguments": arguments},
    }


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>{{"name": {name}, "arguments": {function["arguments"]}}}</tool_call>'
