"""A model's chat template, fed with callers' messages so that only it can write control tokens."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2

from agentcache.engine.messages import (
    STANDARD_ROLES,
    call_order,
    checked_messages,
    checked_tools,
    strings,
)
from agentcache.engine.reply_parser import ReplyForm
from agentcache.engine.segments import Cut, Cutter, Segment, Shield, Shielding
from agentcache.errors import InvalidRequest, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentcache.engine.tokenizer import Tokenizer

__all__ = ["Chat", "ChatTemplate"]

_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template, which is foreign code, raises for messages it was not written for."""

_ODD_CHAR = "\ufdd0"
"""A character that stands for nothing, so that no text begins with it."""

_SPACED_JSON = '{"probe":  0}'


class ChatTemplate:
    """The template of one tokenizer, with the arguments that every rendering gets."""

    def __init__(self, tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> None:
        source = tokenizer.template_source
        self.cutter = Cutter(tokenizer.control_tokens)
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._exists = source is not None
        self._roles = STANDARD_ROLES.union(re.findall(r"""['"]([a-z_]+)['"]""", source or ""))
        self._shielding = Shielding(tokenizer.control_tokens, source or "")

    def chat(self, messages: Any, tools: Any) -> Chat:
        """A checked list of messages, ready to be rendered.

        Raises InvalidRequest for malformed messages, UnsupportedOption without a template.
        """
        if not self._exists:
            raise UnsupportedOption(
                "the tokenizer has no chat template; pass token ids to generate(), or set "
                "tokenizer.chat_template to a Jinja template before loading"
            )
        checked = checked_messages(messages, self._roles)
        order = call_order(checked)
        marks = tuple(place for place, i in enumerate(order) if checked[i].pop("mark", False))
        schemas = checked_tools(tools)
        shield = Shield(self._shielding, strings([checked, schemas or []]))
        shielded = [self._shielded(checked[i], shield) for i in order]
        return Chat(self, shielded, shield.hide(schemas), shield, tuple(order), marks)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, reply_prompt: bool
    ) -> str:
        """The text the template makes of messages; raises whatever the template raises."""
        return str(
            self._tokenizer.source.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=reply_prompt,
                **self._kwargs,
            )
        )

    @cached_property
    def takes_json_text(self) -> bool:
        """Whether the template writes tool arguments given as JSON text as they are.

        Others want a dict: they would put the text in quotes, or fail.
        """
        text = self._probe_reply({"content": "", "tool_calls": [_probe_call(_SPACED_JSON)]})
        return text is not None and _SPACED_JSON in text

    @cached_property
    def reply_form(self) -> ReplyForm:
        """The white space this template puts around thinking and `<tool_call>` blocks."""
        thinking = self._probe_reply({"content": "said", "reasoning_content": "thought"})
        block = re.search(r"<think>(\s*)thought(\s*)</think>(\s*)said", thinking or "")
        call = _probe_call("{}" if self.takes_json_text else {})
        calling = self._probe_reply({"content": "said", "tool_calls": [call, call]})
        blocks = re.search(
            r"said(\s*)<tool_call>.*?</tool_call>(\s*)<tool_call>", calling or "", re.DOTALL
        )
        around_thinking = block.groups() if block else ("", "", "")
        around_calls = blocks.groups() if blocks else ("", "")
        return ReplyForm(*around_thinking, *around_calls)

    def _probe_reply(self, reply: Mapping[str, Any]) -> str | None:
        """What the template makes of a reply; None where it refuses it."""
        messages = [{"role": "user", "content": "0"}, {"role": "assistant", **reply}]
        try:
            return self.render(messages, None, reply_prompt=False)
        except _FAULTS:
            return None

    def _shielded(self, message: Mapping[str, Any], shield: Shield) -> dict[str, Any]:
        """The message with look-alikes hidden; a reply keeps the markup that models write."""
        written = message["role"] == "assistant"
        shielded = {
            key: shield.hide(value, keep_markup=written and key != "tool_calls")
            for key, value in message.items()
            if key not in ("role", "tool_calls")
        }
        shielded["role"] = message["role"]
        if "tool_calls" in message:
            calls = [self._fitting_call(call) for call in message["tool_calls"]]
            shielded["tool_calls"] = shield.hide(calls)
        return shielded

    def _fitting_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The call with its arguments in the form the template takes."""
        if "function" in call:
            return {**call, "function": self._fitting_call(call["function"])}
        arguments = call.get("arguments")
        if not isinstance(arguments, str) or self.takes_json_text:
            return dict(call)
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return dict(call)
        return {**call, "arguments": value if isinstance(value, dict) else arguments}


class Chat:
    """One list of messages in the order it is rendered, with what was rendered of it so far.

    messages: shielded, results of parallel calls in call order.
    order: for each place in `messages`, the index in the caller's list.
    marks: places of the messages with `mark=True`.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        tools: Any,
        shield: Shield,
        order: tuple[int, ...],
        marks: tuple[int, ...],
    ) -> None:
        self.messages = messages
        self.order = order
        self.marks = marks
        self._template = template
        self._tools = tools
        self._shield = shield
        self._texts: dict[tuple[int, bool], str] = {}

    def text(self, count: int | None = None, *, reply_prompt: bool = False) -> str:
        """The (shielded) rendering of the first `count` messages, all by default.

        Raises InvalidRequest where the template refuses them.
        """
        count = len(self.messages) if count is None else count
        known = self._texts.get((count, reply_prompt))
        if known is None:
            try:
                known = self._render(count, reply_prompt)
            except _FAULTS as error:
                place = self._blame(count, reply_prompt, error)
                raise InvalidRequest(
                    f"the chat template refuses message {self.order[place]} "
                    f"({self.messages[place]['role']}): {error}; "
                    "bring the messages into the form this model's template expects"
                ) from error
            self._texts[count, reply_prompt] = known
        return known

    def cut(self, text: str, *, after: int | None = None) -> Cut:
        """A rendering, or a piece of one, as segments whose texts are free of the shield."""
        cut = self._template.cutter.cut(text, after=after)
        shown = (
            s if s.special_id is not None else Segment(self._shield.show(s.text))
            for s in cut.segments
        )
        return Cut(tuple(shown), cut.stops)

    def closed_text(self, count: int) -> str:
        """The rendering of the first `count` messages as it stands before further ones.

        Some templates end a list that asks for no reply with an end of text.
        """
        text, bare = self.text(count), self.text()
        try:
            ending = bare[common_len(bare, self.text(reply_prompt=True)) :]
        except InvalidRequest:
            return text
        return text.removesuffix(ending)

    def altered_text(self, place: int, *, reply_prompt: bool) -> str:
        """The rendering of all messages with the beginning of one content changed.

        Raises InvalidRequest where the template refuses that.
        """
        message = self.messages[place]
        altered = {**message, "content": _ODD_CHAR + message["content"]}
        messages = [*self.messages[:place], altered, *self.messages[place + 1 :]]
        try:
            return self._template.render(messages, self._tools, reply_prompt=reply_prompt)
        except _FAULTS as error:
            raise InvalidRequest(f"the chat template refuses message {place}: {error}") from error

    @property
    def opens_thinking(self) -> bool:
        """Whether the reply header leaves a `<think>` block open."""
        prompt, bare = self.text(reply_prompt=True), self.text()
        header = prompt[common_len(prompt, bare) :]
        return header.rfind("<think>") > header.rfind("</think>")

    def _render(self, count: int, reply_prompt: bool) -> str:
        return self._template.render(self.messages[:count], self._tools, reply_prompt=reply_prompt)

    def _blame(self, count: int, reply_prompt: bool, error: Exception) -> int:
        """The place of the first message with which the template raises this very error."""

        def raises(prefix_len: int) -> bool:
            try:
                self._render(prefix_len, reply_prompt)
            except _FAULTS as other:
                return str(other) == str(error)
            return False

        return bisect_left(range(1, count), True, key=raises)


def _probe_call(arguments: Any) -> dict[str, Any]:
    function = {"name": "probe", "arguments": arguments}
    return {"id": "call00000", "type": "function", "function": function}


def common_len(a: str, b: str) -> int:
    """Length of the longest common beginning of two texts."""
    longest = min(len(a), len(b))
    if a[:longest] == b[:longest]:
        return longest
    return bisect_left(range(1, longest), True, key=lambda n: a[:n] != b[:n])
