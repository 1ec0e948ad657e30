"""The text of a reply, read back into an OpenAI-form assistant message, whole or as it grows."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ReplyForm", "ReplyPiece", "ReplyReader", "parse_reply"]

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """The white space a template itself puts around thinking and calls; it is no part of either.

    after_open, before_close: inside the `<think>` block. after_close: between it and the content.
    before_call: between content and the first call. between_calls: between two calls.
    """

    after_open: str = ""
    before_close: str = ""
    after_close: str = ""
    before_call: str = ""
    between_calls: str = ""


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """What became certain of a reply: more content, more reasoning, whole tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


_PLAIN = ReplyForm()


def parse_reply(
    text: str, *, in_thinking: bool = False, first_call: int = 0, form: ReplyForm = _PLAIN
) -> dict[str, Any]:
    """The assistant message that a reply's text stands for: always `role` and `content` (a str).

    `reasoning_content` is present where the text begins with `<think>` (or, with `in_thinking`,
    where the reply header had already opened the block); an unclosed block takes the whole rest.
    `tool_calls` is present where blocks `<tool_call>{"name": …, "arguments": {…}}</tool_call>`
    stand in the text; `arguments` is the JSON text as the model wrote it, ids are `call00000`,
    `call00001`, … counted from `first_call` (some templates ask for nine letters and digits). A
    malformed call stays in `content` untouched. Nothing is lost but the white space of `form`.

    >>> parse_reply("<think>why</think>because")
    {'role': 'assistant', 'content': 'because', 'reasoning_content': 'why'}
    """
    reader = ReplyReader(in_thinking=in_thinking, first_call=first_call, form=form)
    reader.push(text)
    reader.finish()
    return reader.message


class ReplyReader:
    """`parse_reply` for a text that arrives in pieces, however it is cut.

    All pieces together are the message. Text that may still turn out to be markup waits.
    """

    def __init__(
        self, *, in_thinking: bool = False, first_call: int = 0, form: ReplyForm = _PLAIN
    ) -> None:
        self._form = form
        self._next_call = first_call
        self._opened_by_header = in_thinking
        self._pending = ""
        self._ended = False
        # Each step takes what it can from the pending text, and says whether to go on.
        self._step: Callable[[], bool] = self._read_start
        self._call: _CallScan | None = None
        self._content: list[str] = []
        self._reasoning: list[str] | None = None
        self._calls: list[dict[str, Any]] = []

    @property
    def message(self) -> dict[str, Any]:
        """The message as far as it is certain."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning is not None:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = list(self._calls)
        return message

    def push(self, text: str) -> ReplyPiece:
        """What became certain with more text."""
        self._pending += text
        had = len(self._content), len(self._reasoning or ()), len(self._calls)
        while self._step():
            pass
        return ReplyPiece(
            "".join(self._content[had[0] :]),
            "".join((self._reasoning or [])[had[1] :]),
            tuple(self._calls[had[2] :]),
        )

    def finish(self) -> ReplyPiece:
        """The rest, once the text is at its end."""
        self._ended = True
        return self.push("")

    def _read_start(self) -> bool:
        said = self._pending.lstrip()
        if not self._ended and said != _THINK_OPEN and _THINK_OPEN.startswith(said):
            return False
        if said.startswith(_THINK_OPEN):
            self._reasoning = []
            self._pending = said.removeprefix(_THINK_OPEN)
            return self._go(self._read_after_open)
        if self._opened_by_header:
            self._reasoning = []
            return self._go(self._read_thinking)
        return self._go(self._read_content)

    def _read_after_open(self) -> bool:
        return self._drop_space(self._form.after_open, self._read_thinking)

    def _read_thinking(self) -> bool:
        assert self._reasoning is not None
        thought, closed, rest = self._pending.partition(_THINK_CLOSE)
        if closed:
            self._reasoning.append(thought.removesuffix(self._form.before_close))
            self._pending = rest
            return self._go(self._read_after_close)
        self._reasoning.append(self._take_certain(self._form.before_close, _THINK_CLOSE))
        return False

    def _read_after_close(self) -> bool:
        return self._drop_space(self._form.after_close, self._read_content)

    def _read_content(self) -> bool:
        space = self._form.between_calls if self._calls else self._form.before_call
        at = self._pending.find(_CALL_OPEN)
        if at < 0:
            self._content.append(self._take_certain(space, _CALL_OPEN))
            return False
        if self._call is None:
            before = self._pending[:at].removesuffix(space)
            self._content.append(before)
            self._pending = self._pending[len(before) :]
            at -= len(before)
            self._call = _CallScan(at + len(_CALL_OPEN))
        found = self._call.result(self._pending)
        if found is None and not self._ended:
            return False
        self._call = None
        if found is None or isinstance(found, _Malformed):
            self._content.append(self._pending[: at + len(_CALL_OPEN)])
            self._pending = self._pending[at + len(_CALL_OPEN) :]
            return True
        self._pending = self._pending[found.end :]
        self._calls.append(
            {
                "id": f"call{self._next_call:05d}",
                "type": "function",
                "function": {"name": found.name, "arguments": found.arguments},
            }
        )
        self._next_call += 1
        return True

    def _go(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _drop_space(self, space: str, then: Callable[[], bool]) -> bool:
        """Drop white space of the template at the beginning, once it is all there."""
        if not self._ended and self._pending != space and space.startswith(self._pending):
            return False
        self._pending = self._pending.removeprefix(space)
        return self._go(then)

    def _take_certain(self, space: str, tag: str) -> str:
        """Take the pending text but for an ending that may be the beginning of a tag."""
        keep = 0 if self._ended else max(_overlap(self._pending, m) for m in (space + tag, tag))
        certain = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(certain) :]
        return certain


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: str
    end: int


class _Malformed:
    """The block is no call, whatever follows."""


class _CallScan:
    """Looks for the end of one call's JSON in a growing text; every character is read once."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self._at = begin
        self._depth = 0
        self._in_string = False
        self._end: int | None = None

    def result(self, text: str) -> _Call | _Malformed | None:
        """The call, or that it is none; None while more text is needed to tell."""
        begin = _skip_space(text, self._begin)
        if begin == len(text):
            return None
        if text[begin] != "{":
            return _Malformed()
        if self._end is None:
            self._end = self._find_end(text)
        if self._end is None:
            return None
        close = _skip_space(text, self._end)
        if text.startswith(_CALL_CLOSE, close):
            return _call_of(text[begin : self._end], close + len(_CALL_CLOSE))
        return None if _CALL_CLOSE.startswith(text[close:]) else _Malformed()

    def _find_end(self, text: str) -> int | None:
        """Where the outermost bracket is closed; None where it is not yet."""
        while True:
            match = (_STRING_END if self._in_string else _STRUCTURE).search(text, self._at)
            if match is None:
                self._at = max(self._at, len(text))
                return None
            char, self._at = match[0], match.end()
            if char == "\\":
                self._at += 1  # Whatever is escaped, even if it is still to come.
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == 0:
                    return self._at


def _call_of(text: str, end: int) -> _Call | _Malformed:
    """The call that a JSON object stands for, in a block that ends at `end`."""
    try:
        members = _members(text)
    except (ValueError, IndexError, RecursionError):
        return _Malformed()
    name, _ = members.get("name", (None, ""))
    key = "arguments" if "arguments" in members else "parameters"
    arguments = _arguments_text(*members.get(key, ({}, "{}")))
    if not isinstance(name, str) or not name or arguments is None:
        return _Malformed()
    return _Call(name, arguments, end)


def _arguments_text(value: Any, raw: str) -> str | None:
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
    json.loads(text)
    members: dict[str, tuple[Any, str]] = {}
    at = _skip_space(text, 1)
    # The object is known to be well formed, so only members and their separators can follow.
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        at = _skip_space(text, _skip_space(text, at) + 1)
        value, after = _DECODER.raw_decode(text, at)
        members[key] = (value, text[at:after])
        at = _skip_space(text, after)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
    return members


def _overlap(text: str, tag: str) -> int:
    """Length of the longest ending of a text that is a beginning of the tag, but not all of it."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
