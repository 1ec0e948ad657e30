"""A model's chat template, fed with callers' messages so that only it can write control tokens."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import jinja2

from agentcache.engine.append_log import AppendLog
from agentcache.engine.messages import (
    REASONING_NAMES,
    STANDARD_ROLES,
    call_order,
    checked_messages,
    checked_tools,
    strings,
)
from agentcache.engine.reply_forms import HERMES, BlockScan, CallForm, NotACall, form_for
from agentcache.engine.reply_parser import ReplyForm
from agentcache.engine.segments import Cut, Cutter, Segment, Shield, Shielding
from agentcache.engine.stepwise_template import StepwiseRenderer
from agentcache.errors import InvalidRequest, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentcache.engine.stepwise_template import Passed, Rendering, Run
    from agentcache.engine.tokenizer import Tokenizer

__all__ = ["Chat", "ChatTemplate", "NotShared"]

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

    def __init__(
        self, tokenizer: Tokenizer, kwargs: Mapping[str, Any], calls: CallForm | None = None
    ) -> None:
        source = tokenizer.template_source
        self._calls = calls or form_for(source or "", tokenizer.special_ids)
        self.cutter = Cutter(tokenizer.control_tokens)
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._exists = source is not None
        self._roles = STANDARD_ROLES.union(re.findall(r"""['"]([a-z_]+)['"]""", source or ""))
        self._shielding = Shielding(tokenizer.control_tokens, source or "")
        self._stepwise = StepwiseRenderer(tokenizer.source, self._kwargs, self._render_whole)

    def chat(self, messages: Any, tools: Any) -> Chat:
        """A checked list of messages, ready to be rendered.

        Raises InvalidRequest for malformed messages, UnsupportedOption without a template.
        """
        if not self._exists:
            raise UnsupportedOption(
                "the tokenizer has no chat template; pass token ids to generate(), or set "
                "tokenizer.chat_template to a Jinja template before loading"
            )
        checked, order, marks = self._in_order(messages, 0)
        schemas = checked_tools(tools)
        shield = Shield(self._shielding, strings([checked, schemas or []]))
        shielded = [self._shielded(message, shield) for message in checked]
        tools = shield.hide(schemas)
        return Chat(self, AppendLog(shielded), tools, shield, AppendLog(order), marks)

    def extended(self, chat: Chat, messages: Any) -> Chat | None:
        """The chat with more messages, of which the first is a reply; keeps what is rendered of it.

        None where a character that the messages hold stands for another one in the chat: then the
        whole list has to be made a chat. Raises InvalidRequest for malformed messages.
        """
        checked, order, marks = self._in_order(messages, len(chat.messages))
        if not chat.shield.covers(strings(checked)):
            return None
        return chat.longer([self._shielded(m, chat.shield) for m in checked], order, marks)

    def _in_order(
        self, messages: Any, first: int
    ) -> tuple[list[dict[str, Any]], tuple[int, ...], tuple[int, ...]]:
        """Checked messages in the order they are rendered, their indices, places with a mark."""
        checked = checked_messages(messages, self._roles, first)
        order = call_order(checked)
        places = enumerate(order, first)
        marks = tuple(place for place, i in places if checked[i].pop("mark", False))
        return [checked[i] for i in order], tuple(first + i for i in order), marks

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, reply_prompt: bool
    ) -> str:
        """The text the template makes of messages; raises whatever the template raises."""
        return self._render_whole(messages, tools, reply_prompt=reply_prompt)

    def passed(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        runs: list[Run],
        *,
        reply_prompt: bool,
    ) -> Passed | None:
        """The template run up to the end of its loop; None where it has to be run whole.

        runs: what is known of renderings of these very messages, used and added to. Raises whatever
        the template raises.
        """
        return self._stepwise.passed(messages, tools, runs, reply_prompt=reply_prompt)

    def _render_whole(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, *, reply_prompt: bool
    ) -> str:
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
        """The model's form of calls, and the white space this template puts around them and around
        thinking."""
        thinking = self._probe_reply({"content": "said", "reasoning_content": "thought"})
        block = re.search(r"<think>(\s*)thought(\s*)</think>(\s*)said", thinking or "")
        after_open, before_close, after_close = block.groups() if block else ("", "", "")
        call = _probe_call("{}" if self.takes_json_text else {})
        calling = self._probe_reply({"content": "said", "tool_calls": [call, call]})
        before, between, within = _around_calls(self._calls, calling or "")
        return ReplyForm(
            after_open, before_close, after_close, before, between, within, self._calls
        )

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
        reasoning = next((shielded[name] for name in REASONING_NAMES if name in shielded), None)
        if reasoning is None:
            return shielded
        return {"thinking": reasoning, **shielded, "reasoning_content": reasoning}

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


class NotShared(Exception):
    """A rendering that may not begin as another one does."""


class Chat:
    """One list of messages in the order it is rendered, with what was rendered of it so far.

    messages: shielded, results of parallel calls in call order.
    order: for each place in `messages`, the index in the caller's list.
    marks: places of the messages with `mark=True`.
    runs: of the template's loop. begun: how many messages a prompt had, and its rendering. base: a
    beginning that is left out of all texts; then these raise NotShared where it may be another.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: AppendLog[dict[str, Any]],
        tools: Any,
        shield: Shield,
        order: AppendLog[int],
        marks: tuple[int, ...],
        runs: list[Run] | None = None,
        begun: tuple[int, Rendering] | None = None,
        base: Rendering | None = None,
    ) -> None:
        self.messages = messages
        self.order = order
        self.marks = marks
        self.shield = shield
        self._template = template
        self._tools = tools
        self._runs = runs if runs is not None else []
        self._begun = begun
        self._base = base
        self._prompt: tuple[int, Rendering] | None = None
        self._passed: dict[tuple[int, bool], Passed | None] = {}
        self._texts: dict[tuple[int, bool], str] = {}

    def longer(
        self, messages: list[dict[str, Any]], order: tuple[int, ...], marks: tuple[int, ...]
    ) -> Chat:
        """The chat followed by messages in their order; what is rendered of it is known there."""
        return Chat(
            self._template,
            self.messages.extend(messages),
            self._tools,
            self.shield,
            self.order.extend(order),
            (*self.marks, *marks),
            [replace(run) for run in self._runs],
            self._begun,
        )

    def tail(self, count: int) -> Chat | None:
        """The same chat, whose texts leave out what the prompt of `count` messages is known to have
        in common with longer ones. None where that is nothing."""
        if self._begun is None or self._begun[0] != count:
            return None
        chat = Chat(
            self._template,
            self.messages,
            self._tools,
            self.shield,
            self.order,
            self.marks,
            self._runs,
            base=self._begun[1],
        )
        chat._texts[count, True] = self._begun[1].tail
        return chat

    def kept(self) -> Chat:
        """The chat with what a longer one can use of its renderings, but without their texts."""
        return Chat(
            self._template,
            self.messages,
            self._tools,
            self.shield,
            self.order,
            self.marks,
            self._runs,
            self._prompt,
        )

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

    def ends(self, first: int) -> list[int] | None:
        """Where in the text of the prompt each message from `first` on ends, the last one aside.

        Told by the template's loop; None where it does not tell, or the text begins earlier.
        """
        if self._base is None or self._prompt is None or self._prompt[0] != len(self.messages):
            return None
        skipped, steps = self._prompt[1].skipped, self._prompt[1].steps
        before = len(self._base.steps)
        if skipped is None or not before <= first - skipped <= len(self.messages) - 1 - skipped:
            return None
        lens = [len(step.text) for step in steps[before : len(self.messages) - 1 - skipped]]
        return [*accumulate(lens)][first - skipped - before :]

    def cut(self, text: str, *, after: int | None = None) -> Cut:
        """A rendering, or a piece of one, as segments whose texts are free of the shield."""
        cut = self._template.cutter.cut(text, after=after)
        shown = (
            s if s.special_id is not None else Segment(self.shield.show(s.text))
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
            text = self._template.render(messages, self._tools, reply_prompt=reply_prompt)
        except _FAULTS as error:
            raise InvalidRequest(f"the chat template refuses message {place}: {error}") from error
        if self._base is None:
            return text
        base = replace(self._base, tail="").text
        if not text.startswith(base):
            raise NotShared
        return text[len(base) :]

    @property
    def opens_thinking(self) -> bool:
        """Whether the reply header leaves a `<think>` block open."""
        prompt, bare = self.text(reply_prompt=True), self.text()
        header = prompt[common_len(prompt, bare) :]
        return header.rfind("<think>") > header.rfind("</think>")

    def _render(self, count: int, reply_prompt: bool) -> str:
        passed = self._pass(count, reply_prompt)
        if passed is not None:
            rendering = passed.rendering(reply_prompt)
            if reply_prompt and count == len(self.messages):
                self._prompt = count, rendering
            text = rendering.text if self._base is None else rendering.after(self._base)
        elif self._base is None:
            messages = self.messages[:count]
            text = self._template.render(messages, self._tools, reply_prompt=reply_prompt)
        else:
            text = None
        if text is None:
            raise NotShared
        return text

    def _pass(self, count: int, reply_prompt: bool) -> Passed | None:
        """The template run over the first messages; once for both texts where that is one."""
        for asked in (True, False):
            if (count, asked) in self._passed:
                known = self._passed[count, asked]
                if known is None or known.fits(reply_prompt):
                    return known
        passed = self._template.passed(
            self.messages[:count], self._tools, self._runs, reply_prompt=reply_prompt
        )
        self._passed[count, reply_prompt] = passed
        return passed

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


def _around_calls(calls: CallForm, text: str) -> tuple[str, str, tuple[str, str]]:
    """White space before the first block of calls, between two, and within one."""
    unknown = "", "", ("\n", "\n") if calls is HERMES else ("", "")
    openers = "|".join(map(re.escape, calls.openers))
    opened = re.search(rf"said(\s*)({openers})(\s*)", text)
    if opened is None:
        return unknown
    try:
        found = BlockScan(calls, opened.end(2), {}).result(text, ended=True)
    except NotACall:
        return unknown
    assert found is not None
    end = found[1]
    closing = re.search(r"(\s*)<[^<>]*>$", text[opened.end(3) : end])
    again = re.compile(rf"(\s*)(?:{openers})").match(text, end)
    within = (opened[3], closing[1] if closing else "")
    return opened[1], again[1] if again else "", within


def common_len(a: str, b: str) -> int:
    """Length of the longest common beginning of two texts."""
    longest = min(len(a), len(b))
    if a.startswith(b) or b.startswith(a):  # without a copy of either
        return longest
    return bisect_left(range(1, longest), True, key=lambda n: a[:n] != b[:n])
