"""Messages and tools to prompt segments and back, through a model's own chat template."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from agentcache.engine.append_log import AppendLog
from agentcache.engine.messages import checked_tools
from agentcache.engine.places import Places
from agentcache.engine.reply_forms import Call, form_named, parameters_of
from agentcache.engine.reply_forms.lark import Lark
from agentcache.engine.reply_parser import ReplyForm, ReplyReader
from agentcache.engine.response_template import ResponseTemplateReader
from agentcache.engine.segments import (
    Cutter,
    Encoded,
    Encoding,
    Segment,
    ShortTexts,
    continues,
    encode_after,
    encode_segments,
    reply_parts,
    spliced_len,
)
from agentcache.engine.template import Chat, ChatTemplate, NotShared
from agentcache.engine.tokenizer import REPLY_MARKUP, Tokenizer
from agentcache.errors import InvalidRequest

if TYPE_CHECKING:
    from agentcache.types import IntArray

__all__ = ["ChatFormat", "Message", "Rendered", "Tools"]

Message = Mapping[str, Any]
"""An OpenAI-form message; `mark=True` asks for a checkpoint at its end."""

Tools = Sequence[Mapping[str, Any]]
"""Tool schemas in OpenAI form."""

_CHEAP_ENDS = 4
"""Up to so many messages, a rendering per message to find their ends costs next to nothing."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as segments, with the places in it that are worth a checkpoint.

    added: the segments of the prompt, or where a history was continued, those that follow it.
    reply_start: segment index before the reply header; `len(segments)` where there is no header.
    marks: segment indices at the end of the messages with `mark=True`.
    ends: segment index at the end of each message, in the order they were rendered; None where
        finding them would cost a rendering per message.
    in_thinking: the reply header has opened a `<think>` block; hand it to `parse_reply`.
    fallback: why a continued history had to be rendered anew as a whole; None where it was kept.
    chat: the messages as they were rendered, which a longer list can go on from.
    history: parts of the history that was continued; the segments begin with it.
    goes_on: whether one was.
    """

    added: tuple[Segment, ...]
    reply_start: int
    marks: tuple[int, ...] = ()
    ends: Sequence[int] | None = None
    in_thinking: bool = False
    fallback: str | None = None
    chat: Chat | None = None
    history: Sequence[Encoded] = ()
    goes_on: bool = False

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The whole prompt; put together anew each time."""
        return (*map(attrgetter("segment"), self.history), *self.added)

    @property
    def reply_header(self) -> str:
        """The text that asks for the reply."""
        start = self.reply_start - len(self.history)
        return "".join(segment.text for segment in self.added[start:])


class ChatFormat:
    """One model's chat template over its tokenizer. Any number of threads may use it.

    `end_ids` are the ids that end a reply (default: the tokenizer's own);
    `template_kwargs` are handed to the template in every rendering (`enable_thinking=False`).
    `tool_form` names how the model writes tool calls; by default the tokenizer's response template
    tells, or else the chat template.

    Every method that takes messages raises InvalidRequest for messages that are malformed or that
    the template refuses, and UnsupportedOption where the tokenizer has no template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_ids: frozenset[int] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_form: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = tokenizer.end_ids() if end_ids is None else end_ids
        calls = None if tool_form is None else form_named(tool_form)
        self._template = ChatTemplate(tokenizer, template_kwargs or {}, calls)
        own = getattr(tokenizer.source, "response_template", None)
        self._has_response_template = own is not None and calls is None
        self._short = ShortTexts(tokenizer)
        self._markup_cutter = Cutter(t for t in tokenizer.control_tokens if t.text in REPLY_MARKUP)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """The whole list as segments. Results of parallel tool calls are put in call order."""
        chat = self._template.chat(messages, tools)
        return self._render(chat, reply_prompt=add_generation_prompt)

    def head_end(
        self, rendered: Rendered, messages: Sequence[Message], tools: Tools | None = None
    ) -> int:
        """Segment index in `rendered` where what other chats share ends: system and tools.

        0 where no more than a message header is shared, or where the shared part does not end at
        a control token. `messages` may be just the leading ones, up to the first that is not a
        system message; costs two renderings of those.
        """
        lead = list(takewhile(lambda m: m.get("role") in ("system", "developer"), messages))
        shared = rendered.segments
        try:
            for content in ("0", "1"):
                probe = self._template.chat([*lead, {"role": "user", "content": content}], tools)
                shared = _common_segments(shared, probe.cut(probe.text()).segments)
        except InvalidRequest:
            return 0
        words = " ".join(s.text for s in shared if s.special_id is None).split()
        return len(shared) if len(words) > 1 else 0

    def encode(
        self,
        segments: Sequence[Segment],
        known: Sequence[Encoded] = (),
        *,
        at_start: bool = True,
    ) -> Encoding:
        """The ids of `segments`; the longest leading run that equals `known` keeps the known ids.

        So a reply keeps the ids that were sampled, whatever the tokenizer would make of its text.
        `at_start=False` is for segments that follow others, such as a reply's.
        """
        return encode_segments(self._tokenizer, segments, known, at_start=at_start)

    def shared_len(self, segments: Sequence[Segment], known: Sequence[Encoded]) -> int:
        """How many ids of `known` an encoding of `segments` would keep; encodes nothing."""
        return spliced_len(segments, known)

    def encode_on(self, rendered: Rendered, known: Encoding) -> Encoding:
        """The ids of a history that was continued, `known` being those of what it goes on from."""
        if not rendered.goes_on:
            return self.encode(rendered.segments, known.parts)
        return encode_after(self._tokenizer, known, rendered.added, self._short)

    def reply_parts(self, ids: Sequence[int] | IntArray) -> tuple[Encoded, ...]:
        """Sampled or absorbed reply ids as segments, to append to the prompt's `parts`."""
        return reply_parts(self._tokenizer, ids)

    def continue_history(
        self,
        history: Sequence[Encoded],
        messages: Sequence[Message],
        reply_message: Message,
        new_messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        ends: Sequence[int] | None = None,
        known: Chat | None = None,
        reply_start: int | None = None,
    ) -> Rendered:
        """The next prompt after a reply: `history` verbatim, the close of the message, what is new.

        history: the last prompt's `parts` followed by `reply_parts` of what was absorbed after it.
        messages, reply_message, new_messages: the last prompt's list, its reply, what to append.
        ends: `Rendered.ends` of the last prompt, to keep message ends known.
        known: `Rendered.chat` of the last prompt, if it stands for `messages` and the same tools:
        then, with most templates, only what follows it is rendered.
        reply_start: where in `history` the reply begins; then a reply that the template writes just
        as it stands there needs no rendering of its own.

        A reply that was cut off is closed as the template closes it. Only marks of new messages and
        of those with known ends are given.

        Where the template changes earlier text (it drops thinking, or the reply header it gave is
        not the one it writes in history), the whole list is rendered and `fallback` says why.
        Encode with `encode(result.segments, known=history)` in both cases.
        """
        added = [reply_message, *new_messages]
        chat = None if known is None else self._template.extended(known, added)
        if chat is None:
            chat = self._template.chat([*messages, *added], tools)
        place = len(messages)
        tail = chat.tail(place)
        if tail is not None:
            with suppress(NotShared):
                return self._continued(history, tail, place, ends, reply_start)
        return self._continued(history, chat, place, ends, reply_start)

    def _continued(
        self,
        history: Sequence[Encoded],
        chat: Chat,
        place: int,
        ends: Sequence[int] | None,
        reply_start: int | None,
    ) -> Rendered:
        """The history and what follows it in a chat that has the reply at `place`."""
        last_id = history[-1].segment.special_id if history else None
        start = None if reply_start is None else _said_end(chat, place, history[reply_start:])
        if start is None:
            drift = _drift(chat, place)
            if drift is not None:
                whole = self._render(chat.kept())
                # The text may have come out the same all the same.
                same = continues(whole.segments, history)
                return whole if same else replace(whole, fallback=drift)
            close, closed = self._close(chat, place)
            start = closed if last_id in self._end_ids else close
        rest = chat.cut(chat.text(reply_prompt=True)[start:], after=last_id)
        rest = replace(rest, skipped=start, before=len(history))
        places = Places(chat, rest, self._end_ids)
        told = chat.ends(place)
        if told is None:
            new_ends = places.ends(range(place + 1, len(chat.messages) + 1))
        else:
            new_ends = [*map(rest.border, told), places.reply_start()]
        return Rendered(
            added=rest.segments,
            reply_start=places.reply_start(),
            marks=_marks(chat, new_ends, place, ends),
            ends=_longer_ends(ends, new_ends),
            in_thinking=chat.opens_thinking,
            chat=chat.kept(),
            history=history,
            goes_on=True,
        )

    def reply_segments(
        self, messages: Sequence[Message], reply_message: Message, tools: Tools | None = None
    ) -> tuple[Segment, ...]:
        """What the model would have written for a recorded reply, without the end of message.

        Where the template does not write the reply after its own reply header: the content, and
        tool calls in the model's form.
        """
        chat = self._template.chat([*messages, reply_message], tools)
        place = len(messages)
        header_end = len(chat.text(place, reply_prompt=True))
        if _keeps_header(chat, place):
            body = chat.text()[header_end : self._close(chat, place)[0]]
        else:
            body = _plain_reply(chat.messages[place], self._template.reply_form)
        return chat.cut(body).segments

    def reply_text(
        self, messages: Sequence[Message], reply_message: Message, tools: Tools | None = None
    ) -> str:
        """`reply_segments` as text."""
        return "".join(s.text for s in self.reply_segments(messages, reply_message, tools))

    def encode_reply(self, text: str) -> IntArray:
        """Ids of a reply given as text, without an end id.

        The markup of thinking and of calls is read as the model's own control tokens where it has
        them; every other look-alike of a control token is plain text.
        """
        return self.encode(self._markup_cutter.cut(text).segments, at_start=False).ids

    def parse_reply(
        self,
        text: str,
        *,
        in_thinking: bool = False,
        first_call: int = 0,
        tools: Tools | None = None,
    ) -> dict[str, Any]:
        """The message that a reply's text stands for, read by `reply_reader`."""
        reader = self.reply_reader(in_thinking=in_thinking, first_call=first_call, tools=tools)
        reader.push(text)
        reader.finish()
        return reader.message

    def reply_reader(
        self,
        *,
        in_thinking: bool = False,
        first_call: int = 0,
        tools: Tools | None = None,
        header: str | None = None,
    ) -> ReplyReader | ResponseTemplateReader:
        """Makes a message of a growing text, less the white space that the template puts in itself.

        So the template writes the message back as the model wrote it, if it wrote by the template.
        A tokenizer's own response template is followed where it has one, and no `tool_form` was
        asked for; `header` is the text of the reply header, as far as it is known.
        """
        if self._has_response_template:
            opened = "<think>" if in_thinking else ""
            return ResponseTemplateReader(
                self._tokenizer.source,
                header=opened if header is None else header,
                first_call=first_call,
                tools=None if tools is None else list(tools),
            )
        return ReplyReader(
            in_thinking=in_thinking,
            first_call=first_call,
            form=self._template.reply_form,
            parameters=parameters_of(tools),
        )

    @property
    def tool_form(self) -> str:
        """The name of the form in which the model writes tool calls."""
        return self._template.reply_form.calls.name

    def tool_call_grammar(
        self, tools: Tools, *, name: str | None = None, parallel: bool = False
    ) -> str:
        """A grammar of replies that call one of the tools, or the one named, and say nothing else.

        A block of thinking that the reply header opens may be filled first. With `parallel` several
        calls may follow each other. For the `lark` option of calls. Raises InvalidRequest for no
        tools, or none of that name.
        """
        parameters = parameters_of(checked_tools(tools))
        if not parameters:
            raise InvalidRequest("there are no tools to call; give at least one with a name")
        if name is not None:
            if name not in parameters:
                known = ", ".join(sorted(parameters))
                raise InvalidRequest(f"there is no tool {name!r} to call; there are {known}")
            parameters = {name: parameters[name]}
        form, lark = self._template.reply_form, Lark(self._markup_cutter)
        calls = form.calls.grammar(lark, parameters, form.call_space, parallel=parallel)
        if self._opens_thinking():
            calls = f"{lark.up_to('</think>')} {lark.text(form.after_close)} {calls}"
        return lark.source(calls)

    def _opens_thinking(self) -> bool:
        """Whether the reply header to a plain question opens a block of thinking."""
        try:
            return self._template.chat([{"role": "user", "content": "0"}], None).opens_thinking
        except InvalidRequest:
            return False

    def message_at(
        self,
        rendered: Rendered,
        messages: Sequence[Message],
        tools: Tools | None,
        segment_idx: int,
    ) -> tuple[int, str]:
        """(index, role) of the message that holds a segment of `rendered`.

        `messages` is the whole list that `rendered` stands for. The reply header, and what follows,
        belongs to `(len(messages), "assistant")`. Takes O(log n) renderings where `rendered.ends`
        is None.
        """
        chat = rendered.chat.kept() if rendered.chat else self._template.chat(messages, tools)
        if segment_idx >= rendered.reply_start:
            return len(chat.messages), "assistant"
        if rendered.ends is not None:
            place = bisect_right(rendered.ends, segment_idx)
        else:
            place = self._place_at(chat, segment_idx)
        if place >= len(chat.messages):
            return len(chat.messages), "assistant"
        return chat.order[place], chat.messages[place]["role"]

    def _place_at(self, chat: Chat, segment_idx: int) -> int:
        """The place of the message that holds a segment of the whole rendering."""
        cut = chat.cut(chat.text(reply_prompt=True))
        return Places(chat, cut, self._end_ids).message_at(segment_idx)

    def _render(self, chat: Chat, *, reply_prompt: bool = True) -> Rendered:
        cut = chat.cut(chat.text(reply_prompt=reply_prompt))
        places = Places(chat, cut, self._end_ids, reply_prompt=reply_prompt)
        num_messages = len(chat.messages)
        wanted = range(num_messages) if num_messages <= _CHEAP_ENDS else chat.marks
        ends: list[int | None] = [None] * num_messages
        for place in wanted:
            ends[place] = places.end(place + 1)
        return Rendered(
            added=cut.segments,
            reply_start=places.reply_start(),
            marks=_marks(chat, ends),
            ends=_longer_ends(AppendLog(), ends),
            in_thinking=reply_prompt and chat.opens_thinking,
            chat=chat.kept(),
        )

    def _close(self, chat: Chat, place: int) -> tuple[int, int]:
        """Where the token that closes the reply at `place` begins and ends in the rendering.

        Both are the end of what the reply says where no token closes it.
        """
        header_end = len(chat.text(place, reply_prompt=True))
        text = chat.closed_text(place + 1)
        written = list(self._template.cutter.find(text, header_end))
        tokens = [found for found in written if found[2].text not in REPLY_MARKUP]
        for begin, end, token in reversed(tokens):
            if token.token_id in self._end_ids:
                return begin, end
        if tokens:
            return tokens[-1][:2]
        content = chat.messages[place]["content"].strip()
        content_end = text.rfind(content, header_end) + len(content) if content else header_end
        said_end = max([content_end, *(end for _, end, _ in written)])
        # Some templates close a message only when the next one follows.
        whole = chat.text(reply_prompt=place + 1 < len(chat.messages))
        for begin, end, token in self._template.cutter.find(whole, said_end):
            if token.token_id in self._end_ids and not whole[said_end:begin].strip():
                return begin, end
            break
        return said_end, said_end


def _marks(
    chat: Chat,
    ends: Sequence[int | None],
    first: int = 0,
    before: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Ends of the marked messages, as far as they are known: of those from `first` on, and of those
    before."""
    known = (
        ends[mark - first] if mark >= first else before[mark] if before is not None else None
        for mark in chat.marks
    )
    return tuple(end for end in known if end is not None)


def _longer_ends(ends: Sequence[int] | None, more: Sequence[int | None]) -> AppendLog[int] | None:
    """All ends, None where one is not known."""
    known = [end for end in more if end is not None]
    if ends is None or len(known) < len(more):
        return None
    return (ends if isinstance(ends, AppendLog) else AppendLog(ends)).extend(known)


def _said_end(chat: Chat, place: int, said: Sequence[Encoded]) -> int | None:
    """Where what was said ends in the rendering of the whole list, if the template writes it there,
    after the header that asked for it, to the letter.

    Then the template has changed nothing before, and what follows it there is what is to follow it.
    """
    text, header = chat.text(reply_prompt=True), chat.text(place, reply_prompt=True)
    written = header + "".join(part.segment.text for part in said)
    return len(written) if text.startswith(written) else None


def _keeps_header(chat: Chat, place: int) -> bool:
    """Whether the reply stands in history after the very header that asked for it."""
    return chat.text(place + 1).startswith(chat.text(place, reply_prompt=True))


def _drift(chat: Chat, place: int) -> str | None:
    """Why the template does not just append to the reply at `place`; None where it does.

    Raises InvalidRequest where it refuses the whole list.
    """
    prompt = chat.text(reply_prompt=True)
    try:
        closed = chat.closed_text(place + 1)
    except InvalidRequest:
        return "the template does not render a list that ends with the reply"
    if not _keeps_header(chat, place):
        return "the template writes another reply header in history than it gave for the reply"
    if not prompt.startswith(closed):
        return "the template changes earlier messages when new ones follow"
    reasoning = chat.messages[place].get("reasoning_content", "")
    if reasoning.strip() not in closed[len(chat.text(place, reply_prompt=True)) :]:
        return "the template leaves out the thinking of the reply"
    return None


def _plain_reply(message: Mapping[str, Any], form: ReplyForm) -> str:
    """Content and tool calls in the form of the model."""
    said = str(message["content"])
    calls = []
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(Call(function["name"], arguments, call.get("id")))
    if not calls:
        return said
    space = form.before_call or "\n" if said else ""
    return f"{said}{space}{form.calls.write(calls, form.call_space)}"


def _common_segments(a: Sequence[Segment], b: Sequence[Segment]) -> tuple[Segment, ...]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return tuple(pair[0] for pair in pairs)
