"""Replies kept to tool calls or a schema: grammars in the form that a model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache import InvalidRequest, UnsupportedOption

if TYPE_CHECKING:
    from agentcache import Runtime

__all__ = ["ReplyForms", "closed", "reply_grammar"]

_FORCED = ("any", "required", True)
_ARGUMENTS = re.compile(r'\{"probe_a"(:\s*)1(,\s*)"probe_b"\s*:\s*2\}')
_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "probe", "arguments": {"probe_a": 1, "probe_b": 2}},
}
_USER = {"role": "user", "content": "probe"}
_TEXT = "TEXT: /(?s:.+)/\n"


@dataclass(frozen=True, slots=True)
class ReplyForms:
    """What grammars have to know of a model, besides the form of its calls.

    control: a call begins with a control token, so that plain text cannot run into it. guidance:
    white space between the parts of a JSON text, as the template writes it. think: Lark of what
    opens and closes a block of reasoning. in_thinking: the reply header has opened it.
    """

    runtime: Runtime
    control: bool
    guidance: Mapping[str, Any]
    think: tuple[str, str] | None
    in_thinking: bool

    @classmethod
    def of(cls, runtime: Runtime) -> ReplyForms:
        """Read from the template, which writes a call for it."""
        reply = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        segments = runtime.chat_format.reply_segments([_USER], reply, None)
        found = _ARGUMENTS.search("".join(segment.text for segment in segments))
        key_separator, item_separator = found.groups() if found else (": ", ", ")
        ids = runtime.tokenizer.special_ids
        has_think = ids.keys() >= {"<think>", "</think>"}
        return cls(
            runtime=runtime,
            control=bool(segments) and segments[0].special_id is not None,
            guidance={
                "whitespace_flexible": False,
                "key_separator": key_separator,
                "item_separator": item_separator,
            },
            think=(f"<[{ids['<think>']}]>", f"<[{ids['</think>']}]>") if has_think else None,
            in_thinking=runtime.chat_format.render([_USER]).in_thinking,
        )

    def schema(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A schema of JSON as the template would write it."""
        return {**closed(schema), "x-guidance": dict(self.guidance)}

    def thought(self, is_free: bool) -> str:
        """Reasoning before a reply: where the header has begun it, or where the reply is free."""
        if self.think is None or not (is_free or self.in_thinking):
            return ""
        opening, closing = self.think
        return f"TEXT? {closing}" if self.in_thinking else f"({opening} TEXT? {closing})?"


def reply_grammar(
    forms: ReplyForms,
    tools: Sequence[Mapping[str, Any]],
    *,
    tool_choice: Any = None,
    schema: Mapping[str, Any] | None = None,
    strict: bool = False,
    parallel: bool = False,
) -> str | None:
    """The grammar of a reply in llguidance's form of Lark; None where it is free.

    tool_choice: None or "auto", "none", "any" or "required", or a tool's name. schema: what a reply
    that calls no tool has to be. strict: calls of an otherwise free reply follow their schemas.
    Raises InvalidRequest for a choice that cannot be made, UnsupportedOption for strict=True on a
    model whose calls begin as plain text.
    """
    choice, name = _choice(tools, tool_choice)
    if choice == "auto" and schema is None and not (strict and tools):
        return None
    calls = ""
    if tools and choice != "none":
        written = forms.runtime.tool_call_grammar(
            [_with_schema(tool, forms) for tool in tools], name=name, parallel=parallel
        )
        if choice == "forced":
            return written
        calls = written.replace("start:", "calls:", 1)
    if schema is not None:
        answer = f"answer: %json {json.dumps(forms.schema(schema))}"
        start = f"{forms.thought(False)} answer"
        return _lark(f"calls | {start}" if calls else start, calls, answer)
    if not calls:
        return _lark(f"{forms.thought(True)} TEXT?")
    if not forms.control:
        raise UnsupportedOption(
            "strict=True needs a model whose calls begin with a token of their own; leave it out, "
            "or force a call by tool_choice"
        )
    if forms.in_thinking:  # the grammar of calls begins with what the header began
        return _lark(f"calls | {forms.thought(True)} TEXT?", calls)
    return _lark(f"{forms.thought(True)} TEXT? calls?", calls)


def _lark(start: str, *rules: str) -> str:
    return "\n".join([f"start: {start.strip()}", *filter(None, rules), _TEXT])


def _choice(tools: Sequence[Mapping[str, Any]], tool_choice: Any) -> tuple[str, str | None]:
    """auto, none or forced, and the name of the only tool that may be called."""
    if tool_choice in (None, "auto", False):
        return "auto", None
    if tool_choice == "none":
        return "none", None
    if not tools:
        raise InvalidRequest(f"tool_choice is {tool_choice!r}, but there are no tools; bind some")
    if tool_choice in _FORCED:
        return "forced", None
    name = tool_choice
    if isinstance(tool_choice, Mapping):
        name = (tool_choice.get("function") or tool_choice).get("name")
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise InvalidRequest(f"tool_choice is {name!r}; there are auto, none, any, {known}")
    return "forced", name


def _with_schema(tool: Mapping[str, Any], forms: ReplyForms) -> dict[str, Any]:
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {**tool, "function": {**function, "parameters": forms.schema(parameters)}}


_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "default", "examples"})


def closed(schema: Any) -> Any:
    """A schema whose objects hold no more than their properties, unless it says otherwise."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            out[key] = {name: closed(inner) for name, inner in value.items()}
        else:
            out[key] = value if key in _VALUES else closed(value)
    if "properties" in out:
        out.setdefault("additionalProperties", False)
    return out
