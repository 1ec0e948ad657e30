"""The text of a reply, read back into an OpenAI-form assistant message, whole or as it grows."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from agentcache.engine.reply_forms import HERMES, BlockScan, CallForm, CallSpace, NotACall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentcache.engine.reply_forms import Call
    from agentcache.engine.reply_forms.base import Parameters

__all__ = ["ReplyForm", "ReplyPiece", "ReplyReader", "called", "parse_reply"]

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How a model calls tools, and the white space its template puts around thinking and calls,
    which is no part of either.

    after_open, before_close: inside the `<think>` block. after_close: between it and the content.
    before_call: between content and the first call. between_calls: between two blocks of calls.
    in_call: what stands within a block, after what opens it and before what closes it.
    """

    after_open: str = ""
    before_close: str = ""
    after_close: str = ""
    before_call: str = ""
    between_calls: str = ""
    in_call: tuple[str, str] = ("\n", "\n")
    calls: CallForm = HERMES

    @property
    def call_space(self) -> CallSpace:
        """The white space that blocks of calls are written with."""
        return CallSpace(*self.in_call, self.between_calls)


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """What became certain of a reply: more content, more reasoning, whole tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


_PLAIN = ReplyForm()
_NO_TOOLS: Parameters = MappingProxyType({})


def parse_reply(
    text: str,
    *,
    in_thinking: bool = False,
    first_call: int = 0,
    form: ReplyForm = _PLAIN,
    parameters: Parameters = _NO_TOOLS,
) -> dict[str, Any]:
    """The assistant message that a reply's text stands for: always `role` and `content` (a str).

    `reasoning_content` is present where the text begins with `<think>` (or, with `in_thinking`,
    where the reply header had already opened the block); an unclosed block takes the whole rest.
    `tool_calls` is present where calls stand in the text in the model's form; `arguments` is JSON
    text, as the model wrote it where it wrote JSON. Ids are the model's own, else `call00000`,
    `call00001`, … counted from `first_call` (some templates ask for nine letters and digits). A
    malformed call stays in `content` untouched. Nothing is lost but the white space of `form`.
    `parameters`: schemas of the tools, for forms that write values as plain text.

    >>> parse_reply("<think>why</think>because")
    {'role': 'assistant', 'content': 'because', 'reasoning_content': 'why'}
    """
    reader = ReplyReader(
        in_thinking=in_thinking, first_call=first_call, form=form, parameters=parameters
    )
    reader.push(text)
    reader.finish()
    return reader.message


class ReplyReader:
    """`parse_reply` for a text that arrives in pieces, however it is cut.

    All pieces together are the message. Text that may still turn out to be markup waits.
    """

    def __init__(
        self,
        *,
        in_thinking: bool = False,
        first_call: int = 0,
        form: ReplyForm = _PLAIN,
        parameters: Parameters = _NO_TOOLS,
    ) -> None:
        self._form = form
        self._parameters = parameters
        self._next_call = first_call
        self._opened_by_header = in_thinking
        self._pending = ""
        self._ended = False
        # Each step takes what it can from the pending text, and says whether to go on.
        self._step: Callable[[], bool] = self._read_start
        self._block: _Block | None = None
        self._content: list[str] = []
        self._content_len = 0
        self._malformed: list[int] = []
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

    @property
    def malformed(self) -> tuple[str, ...]:
        """Texts within the content that begin as calls and are none, each up to where the next one
        begins, or the content ends."""
        content = "".join(self._content)
        ends = [*self._malformed[1:], len(content)]
        return tuple(content[a:b] for a, b in zip(self._malformed, ends, strict=False))

    def push(self, text: str) -> ReplyPiece:
        """What became certain with more text."""
        # Nothing else holds the pending text meanwhile, so that a long call grows in place.
        pending, self._pending = self._pending, ""
        pending += text
        self._pending = pending
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
        block = self._block
        if block is None:
            block = self._block = self._next_block()
            if block is None:
                return False
        try:
            found = block.scan.result(self._pending, ended=self._ended)
        except NotACall:
            self._block = None
            self._malformed.append(self._content_len + block.begin)
            self._say(self._pending[: block.body])
            self._pending = self._pending[block.body :]
            return True
        if found is None:
            return False
        self._block = None
        calls, end = found
        self._pending = self._pending[end:]
        self._take_calls(calls)
        return True

    def _next_block(self) -> _Block | None:
        """The next block of calls that is begun; what stands before it becomes content."""
        space = self._form.between_calls if self._calls else self._form.before_call
        openers = self._form.calls.openers
        places = [(self._pending.find(opener), opener) for opener in openers]
        begun = [place for place in places if place[0] >= 0]
        if not begun:
            self._say(self._take_certain(space, *openers))
            return None
        at, opener = min(begun)
        before = self._pending[:at].removesuffix(space)
        self._say(before)
        self._pending = self._pending[len(before) :]
        begin = at - len(before)
        body = begin + len(opener)
        return _Block(begin, body, BlockScan(self._form.calls, body, self._parameters))

    def _say(self, text: str) -> None:
        self._content.append(text)
        self._content_len += len(text)

    def _take_calls(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._calls.append(called(call, self._next_call))
            self._next_call += 1

    def _go(self, step: Callable[[], bool]) -> bool:
        self._step = step
        return True

    def _drop_space(self, space: str, then: Callable[[], bool]) -> bool:
        """Drop white space of the template at the beginning, once it is all there."""
        if not self._ended and self._pending != space and space.startswith(self._pending):
            return False
        self._pending = self._pending.removeprefix(space)
        return self._go(then)

    def _take_certain(self, space: str, *tags: str) -> str:
        """Take the pending text but for an ending that may be the beginning of a tag."""
        awaited = [text for tag in tags for text in (space + tag, tag)]
        keep = 0 if self._ended else max(_overlap(self._pending, text) for text in awaited)
        certain = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(certain) :]
        return certain


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of calls in the pending text: where it begins, with white space of the template
    behind that, where its opener ends, and how it is read."""

    begin: int
    body: int
    scan: BlockScan


def called(call: Call, number: int) -> dict[str, Any]:
    """A call in OpenAI form; `number` makes its id where the model gave none."""
    return {
        "id": call.id or f"call{number:05d}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _overlap(text: str, tag: str) -> int:
    """Length of the longest ending of a text that is a beginning of the tag, but not all of it."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
