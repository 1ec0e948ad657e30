"""What a form of tool calls has to say: how to read it, to write it, and to keep a reply to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentcache.engine.reply_forms.cursor import Cursor
    from agentcache.engine.reply_forms.lark import Lark

__all__ = [
    "Call",
    "CallForm",
    "CallSpace",
    "MoreNeeded",
    "NotACall",
    "Parameters",
    "parameters_of",
    "property_schemas",
]

Parameters = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each tool, by its name."""

_MOST_CALLS = 16
"""Calls that a grammar lets follow each other, so that no reply is nothing but calls."""


class NotACall(Exception):
    """What was begun is no tool call, whatever follows."""


class MoreNeeded(Exception):
    """The text ends before one can tell."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call: `arguments` is JSON text of an object; `id` where the model gave one."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallSpace:
    """The white space a template writes within a block, after what opens it and before what closes
    it, and between two blocks."""

    after_open: str = ""
    before_close: str = ""
    between: str = ""


class CallForm(ABC):
    """One way of writing tool calls into a reply.

    name: what `tool_form=` calls it. openers: texts of which each begins a block of calls.
    """

    name: str
    openers: tuple[str, ...]

    @abstractmethod
    def read(self, cursor: Cursor, parameters: Parameters) -> tuple[Call, ...]:
        """The calls of a block whose opener lies before the cursor, which ends after the block.

        What it makes of a text must not change when text is added to it. Raises NotACall,
        MoreNeeded.
        """

    @abstractmethod
    def frame(self, space: CallSpace) -> tuple[str, str, str]:
        """What stands before the first call, between two calls, and after the last one."""

    @abstractmethod
    def write_call(self, call: Call, space: CallSpace) -> str:
        """One call as a model of this form writes it."""

    @abstractmethod
    def call_rule(self, lark: Lark, name: str, schema: Mapping[str, Any], space: CallSpace) -> str:
        """An expression for calls of one tool, with arguments that its schema allows."""

    def write(self, calls: Sequence[Call], space: CallSpace) -> str:
        """All calls of a reply."""
        before, between, after = self.frame(space)
        return before + between.join(self.write_call(call, space) for call in calls) + after

    def grammar(
        self, lark: Lark, parameters: Parameters, space: CallSpace, *, parallel: bool
    ) -> str:
        """An expression for a call of one of the tools, or with `parallel` of several calls."""
        before, between, after = map(lark.text, self.frame(space))
        calls = [self.call_rule(lark, *tool, space) for tool in parameters.items()]
        call = lark.rule(" | ".join(calls))
        more = lark.rule(f"{between} {call}") if parallel else ""
        repeated = f"{more}{{0,{_MOST_CALLS - 1}}}" if more else ""
        return " ".join(part for part in (before, call, repeated, after) if part)


def property_schemas(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Schemas of an object's properties, references to its own definitions followed."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {str(key): _resolved(rule, schema) for key, rule in properties.items()}


def _resolved(rule: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    """A schema as a dict that can stand alone."""
    known = dict(rule) if isinstance(rule, dict) else {}
    definitions = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    path = str(known.get("$ref", "")).removeprefix("#/").split("/")
    if len(path) == 2:
        target = definitions.get(path[0], {}).get(path[1], {})
        known = {**target, **{key: value for key, value in known.items() if key != "$ref"}}
    return {**definitions, **known}


def parameters_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Parameters of the tools by name; tools without a name are none of them."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            found[function["name"]] = schema if isinstance(schema, dict) else {}
    return found
