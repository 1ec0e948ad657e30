"""Replies read by the response template that a tokenizer brings, in place of a form of our own."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from agentcache.engine.messages import REASONING_NAMES
from agentcache.engine.reply_forms import Call, NotACall
from agentcache.engine.reply_forms.json_calls import json_call
from agentcache.engine.reply_parser import ReplyPiece, called
from agentcache.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ResponseTemplateReader"]

_PIECES = re.compile(r"\w+|\s+|[^\w\s]")
_FAULTS = (AttributeError, LookupError, RecursionError, TypeError, ValueError, re.error)
"""What the parser, which is foreign code, raises for texts and templates it was not made for."""

_GOES_ON = frozenset({("region_open", "region_chunk"), ("region_close", "region_open")})
"""Pairs of events of which the first says nothing about a tag: text outside of all tags opens a
region with its first character, and the tag that closes it belongs to the next one."""


class ResponseTemplateReader:
    """Makes of a growing text what transformers' parser makes of it, and loses nothing.

    `header` is the text of the reply header, which may have begun the reply. What the parser fails
    at, or gives no name and arguments of, stays in the content and is `malformed`.
    Raises UnsupportedModel for a response template that is none.
    """

    def __init__(
        self,
        source: Any,
        *,
        header: str = "",
        first_call: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        try:
            self._parser: Any = source.get_response_parser(prefix=header, tools=tools)
        except _FAULTS as error:
            raise UnsupportedModel(
                f"the tokenizer's response template cannot be used: {error}; give tool_form"
            ) from error
        self._next_call = first_call
        self._raw: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] | None = None
        self._calls: list[dict[str, Any]] = []
        self._malformed: list[str] = []
        self._failed = False
        self._take(self._parser.initial_events)
        self._raw.clear()

    @property
    def message(self) -> dict[str, Any]:
        """The message as far as it is certain."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning is not None:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = list(self._calls)
        return message

    @property
    def malformed(self) -> tuple[str, ...]:
        """Texts within the content that the parser took for calls and that are none."""
        return tuple(self._malformed)

    def push(self, text: str) -> ReplyPiece:
        """What became certain with more text."""
        had = len(self._content), len(self._reasoning or ()), len(self._calls)
        for piece in _PIECES.findall(text):
            self._raw.append(piece)
            if self._failed:
                self._say(self._take_raw())
                continue
            try:
                self._take(self._parser.feed(piece))
            except _FAULTS:
                self._give_up()
        return self._since(*had)

    def finish(self) -> ReplyPiece:
        """The rest, once the text is at its end."""
        had = len(self._content), len(self._reasoning or ()), len(self._calls)
        if not self._failed:
            try:
                self._take(self._parser.finalize()[1])
            except _FAULTS:
                self._give_up()
        return self._since(*had)

    def _since(self, content: int, reasoning: int, calls: int) -> ReplyPiece:
        return ReplyPiece(
            "".join(self._content[content:]),
            "".join((self._reasoning or [])[reasoning:]),
            tuple(self._calls[calls:]),
        )

    def _take(self, events: Sequence[Mapping[str, Any]]) -> None:
        """`_raw` is left with what no event has told of: a tag that is begun, or a call so far."""
        for index, event in enumerate(events):
            field, kind = event["field"], event["type"]
            following = events[index + 1]["type"] if index + 1 < len(events) else None
            if field == "tool_calls":
                if kind == "region_close":
                    self._close_calls(event["value"])
            elif kind == "region_chunk":
                _, _, after = self._take_raw().partition(event["text"])
                self._raw.append(after)
                self._add(field, event["text"])
            elif (kind, following) not in _GOES_ON:
                self._raw.clear()  # a tag of its own opened or closed the region

    def _add(self, field: str, text: str) -> None:
        if field in REASONING_NAMES:
            if self._reasoning is None:
                self._reasoning = []
            self._reasoning.append(text)
        else:
            self._say(text)

    def _close_calls(self, value: Any) -> None:
        raw = self._take_raw()
        try:
            calls = [_call(one, raw) for one in (value if isinstance(value, list) else [value])]
        except NotACall:
            self._flag(raw)
            return
        for call in calls:
            self._calls.append(called(call, self._next_call))
            self._next_call += 1

    def _give_up(self) -> None:
        """The parser cannot go on: what it did not tell yet is text, and so is what follows."""
        self._failed = True
        self._flag(self._take_raw())

    def _flag(self, raw: str) -> None:
        self._say(raw)
        if raw:
            self._malformed.append(raw)

    def _say(self, text: str) -> None:
        self._content.append(text)

    def _take_raw(self) -> str:
        raw = "".join(self._raw)
        self._raw.clear()
        return raw


def _call(value: Any, raw: str) -> Call:
    """The call of a parsed value, with its arguments as they are written where that can be told."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotACall
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise NotACall from None
    if not isinstance(arguments, dict):
        raise NotACall
    for written in _written(raw):
        if written.name == function["name"] and json.loads(written.arguments) == arguments:
            return written
    return Call(function["name"], json.dumps(arguments, ensure_ascii=False))


def _written(raw: str) -> Iterator[Call]:
    """The call that stands in a text as one JSON object, if one does."""
    begin, end = raw.find("{"), raw.rfind("}")
    if 0 <= begin < end:
        try:
            yield json_call(raw[begin : end + 1])
        except NotACall:
            return
