"""From what a caller gives to a prompt in ids, as close to a tip's history as it can be."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.engine.append_log import AppendLog, TokenLog
from agentcache.engine.tokenizer import Detokenizer, Tokenizer
from agentcache.errors import HistoryMismatch, InvalidRequest
from agentcache.session.history import NO_MESSAGES, History
from agentcache.session.pinning import pinned_tools, same_tools
from agentcache.tree.key import common_prefix_len

if TYPE_CHECKING:
    from agentcache.engine.chat import ChatFormat, Message, Rendered, Tools
    from agentcache.engine.reply_parser import ReplyReader
    from agentcache.engine.response_template import ResponseTemplateReader
    from agentcache.engine.segments import Encoded, Encoding
    from agentcache.session.history import SessionTip
    from agentcache.session.pinning import Volatile
    from agentcache.types import IntArray

__all__ = ["Prompt", "PromptBuilder"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt and how it relates to the tip it goes on from.

    shared_len: tokens it has in common with the tip's history. structural: lengths worth a
    checkpoint that others may share. passing: the same for this trajectory alone. spelled: the
    messages in the caller's own spelling. num_calls: tool calls in its messages.
    """

    ids: IntArray
    tip: SessionTip | None
    shared_len: int
    structural: tuple[int, ...]
    passing: tuple[int, ...]
    head_len: int = 0
    encoding: Encoding | None = None
    rendered: Rendered | None = None
    messages: AppendLog[Message] = NO_MESSAGES
    spelled: AppendLog[Message] = NO_MESSAGES
    tools: tuple[Mapping[str, Any], ...] | None = None
    num_calls: int = 0

    @property
    def in_thinking(self) -> bool:
        """Whether the reply header has opened a block of reasoning."""
        return self.rendered is not None and self.rendered.in_thinking

    @property
    def reply_header(self) -> str | None:
        """The text that asks for the reply; None where the prompt was given in ids."""
        return None if self.rendered is None else self.rendered.reply_header

    @property
    def known_len(self) -> int:
        """How many tokens are known to lie on the tip's path: a head that ends elsewhere is told
        apart from there on."""
        if self.tip is None or self.tip.history.head_len == self.head_len:
            return self.shared_len
        return min(self.shared_len, self.head_len, self.tip.history.head_len)

    @property
    def leaves_tip(self) -> bool:
        """Whether the history goes on differently than the prompt."""
        return self.tip is not None and self.shared_len < len(self.tip.history.ids)


class PromptBuilder:
    """Makes prompts. Stateless but for the format; used on callers' threads.

    volatile: what lines of a system prompt match whose text may change from call to call.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        tokenizer: Tokenizer,
        vocab_size: int,
        volatile: Volatile | None = None,
    ) -> None:
        self._format = chat_format
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._volatile = volatile

    def from_ids(self, ids: Sequence[int] | IntArray, tips: Iterable[SessionTip]) -> Prompt:
        """A whole prompt in ids. Raises InvalidRequest for none, or ids outside the vocabulary."""
        array = check_ids(ids, self._vocab_size)
        if not len(array):
            raise InvalidRequest("the prompt is empty; give at least one token")
        tip, shared = _closest(array, tips)
        head = tip.history.head_len if tip is not None else 0
        head = head if head <= shared else 0
        return Prompt(array, tip, shared, (), passing=(len(array) - 1,), head_len=head)

    def from_messages(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        tips: Sequence[SessionTip],
        *,
        known: Sequence[Encoded] = (),
    ) -> Prompt:
        """A whole list: ids of what is equal to a tip's history, or `known`, are those it has."""
        messages = listed(messages)
        tools = pinned_tools(tools, [tip.history.tools for tip in tips])
        if self._volatile is not None:
            messages = self._volatile.pinned(messages, [tip.history.messages for tip in tips])
        extended = self._extended(messages, tools, tips)
        if extended is not None:
            count = len(extended.history.messages)
            return self._going_on(messages[count:], tools, extended, messages[:count])
        return self._whole(copy.deepcopy(messages), tools, tips, known)

    def _whole(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        tips: Sequence[SessionTip],
        known: Sequence[Encoded] = (),
    ) -> Prompt:
        """The list rendered as a whole, with the ids of what shares most of it."""
        rendered = self._format.render(messages, tools)
        closest = max(
            (known, *(tip.history.parts for tip in tips)),
            key=lambda parts: self._format.shared_len(rendered.segments, parts),
        )
        encoding = self._format.encode(rendered.segments, closest)
        tip, shared = _closest(encoding.ids, tips)
        return self._prompt(rendered, encoding, tip, shared, messages, tools)

    @staticmethod
    def _extended(
        messages: Sequence[Message], tools: Tools | None, tips: Sequence[SessionTip]
    ) -> SessionTip | None:
        """The tip with the longest history that the list says again, spelled its way, and goes on
        from: arguments may come back respelled, reasoning left out, tool results reordered."""
        fit = [
            tip
            for tip in tips
            if tip.history.has_reply
            and 0 < len(tip.history.messages) < len(messages)
            and same_tools(tools, tip.history.tools)
            and tip.history.is_said_by(messages)
        ]
        return max(fit, key=lambda tip: len(tip.history.messages), default=None)

    def from_new(
        self,
        new: Sequence[Message],
        tools: Tools | None,
        tip: SessionTip | None,
    ) -> Prompt:
        """Messages to append to a tip's. Raises HistoryMismatch where the tip was made of ids."""
        if tip is None:
            return self.from_messages(new, tools, ())
        return self._going_on(listed(new), tools, tip, tip.history.messages)

    def _going_on(
        self,
        new: Sequence[Message],
        tools: Tools | None,
        tip: SessionTip,
        said: Sequence[Message],
    ) -> Prompt:
        """`from_new`; said: the tip's messages in the caller's spelling."""
        new = copy.deepcopy(new)
        history = tip.history
        if history.encoding is None:
            raise HistoryMismatch(
                "this history was made by generate() and has no messages; go on with generate(), "
                "or give the whole list to complete()"
            )
        tools = history.tools if tools is None else pinned_tools(tools, [history.tools])
        if not history.has_reply or not same_tools(tools, history.tools):
            return self._whole([*history.messages, *new], tools, (tip,))
        before, reply = history.messages.first(len(history.messages) - 1), history.messages[-1]
        rendered = self._format.continue_history(
            history.parts,
            before,
            reply,
            new,
            tools,
            ends=history.ends,
            known=history.chat,
            reply_start=history.encoding.reused,
        )
        encoding = self._format.encode_on(rendered, history.encoding)
        goes_on = rendered.goes_on
        shared = len(history) if goes_on else common_prefix_len(encoding.ids, history.ids)
        messages = history.messages.extend(new)
        spelled = history.spelled_as(said).extend(new)
        return self._prompt(rendered, encoding, tip, shared, messages, tools, spelled)

    def _prompt(
        self,
        rendered: Rendered,
        encoding: Encoding,
        tip: SessionTip | None,
        shared: int,
        messages: Sequence[Message],
        tools: Tools | None,
        spelled: AppendLog[Message] | None = None,
    ) -> Prompt:
        own = messages if isinstance(messages, AppendLog) else AppendLog(messages)
        if rendered.goes_on and tip is not None:
            num_calls = tip.history.num_calls + _num_calls(messages[len(tip.history.messages) :])
        else:
            num_calls = _num_calls(messages)
        head = self._head_len(rendered, encoding, tip, shared, messages, tools)
        reply_start = encoding.offset(rendered.reply_start)
        end = min(reply_start, len(encoding.ids) - 1)
        marks = [encoding.offset(mark) for mark in rendered.marks]
        return Prompt(
            ids=encoding.ids,
            tip=tip,
            shared_len=shared,
            structural=tuple(sorted({at for at in (head, *marks) if at > 0})),
            passing=(end,),
            head_len=head,
            encoding=encoding,
            rendered=rendered,
            messages=own,
            spelled=own if spelled is None else spelled,
            tools=_own_tools(tools, tip),
            num_calls=num_calls,
        )

    def _head_len(
        self,
        rendered: Rendered,
        encoding: Encoding,
        tip: SessionTip | None,
        shared: int,
        messages: Sequence[Message],
        tools: Tools | None,
    ) -> int:
        """Where system and tools end; the tip knows, unless the prompt leaves it before."""
        if tip is not None and 0 < tip.history.head_len <= shared:
            return tip.history.head_len
        return encoding.offset(self._format.head_end(rendered, messages, tools))

    def replay_ids(
        self,
        replay: str | Mapping[str, Any] | Sequence[int] | IntArray,
        prompt: Prompt,
        end_id: int | None,
    ) -> IntArray:
        """Ids of a recorded answer: as given, or of its text or message with the end added."""
        if isinstance(replay, str):
            ids = self._format.encode_reply(replay)
        elif isinstance(replay, Mapping):
            segments = self._format.reply_segments(prompt.messages, replay, prompt.tools)
            ids = self._format.encode(segments, at_start=False).ids
        else:
            return check_ids(replay, self._vocab_size)
        end = [] if end_id is None else [end_id]
        return np.concatenate([ids, np.array(end, dtype=np.int32)])

    def reply_reader(self, prompt: Prompt) -> ReplyReader | ResponseTemplateReader:
        """Reads the message out of the reply's text as it grows."""
        return self._format.reply_reader(
            in_thinking=prompt.in_thinking,
            first_call=prompt.num_calls,
            tools=prompt.tools,
            header=prompt.reply_header,
        )

    def read_reply(self, prompt: Prompt, text: str) -> ReplyReader | ResponseTemplateReader:
        """The message that the whole reply's text stands for, read to its end."""
        reader = self.reply_reader(prompt)
        reader.push(text)
        reader.finish()
        return reader

    def cut_ids(self, ids: IntArray, text: str) -> IntArray:
        """Ids of a reply that a stop string cut down to `text`.

        The sampled ones as far as their text lies before the cut, then what is left encoded.
        """
        num_ids, num_chars = _said_within(self._tokenizer, ids, text)
        return np.concatenate([ids[:num_ids], self._format.encode_reply(text[num_chars:])])

    def extend(
        self, prompt: Prompt, reply: IntArray, frontier: int, message: Message | None
    ) -> History:
        """The history that a prompt and its reply make; without a message, the prompt alone.

        frontier: tokens up to which the tree holds it.
        """
        if prompt.encoding is None or prompt.rendered is None:
            tokens = _log(prompt, reply)
            return History(tokens, frontier, head_len=prompt.head_len)
        if message is None:
            # Without a reply, its header is no part of the conversation.
            stop = prompt.rendered.reply_start
            encoding = prompt.encoding.first(stop)
            tokens = encoding.tokens.extend(reply)
        else:
            encoding = prompt.encoding.followed_by(self._format.reply_parts(reply))
            tokens = encoding.tokens
        if not prompt.rendered.goes_on:
            _share(tokens, prompt)
        return History(
            tokens=tokens,
            frontier=min(frontier, len(tokens)),
            head_len=prompt.head_len,
            encoding=encoding,
            messages=prompt.messages if message is None else prompt.messages.extend([message]),
            spelled=prompt.spelled,
            has_reply=message is not None,
            tools=prompt.tools,
            ends=prompt.rendered.ends,
            chat=None if message is None else prompt.rendered.chat,
            num_calls=prompt.num_calls + (0 if message is None else _num_calls([message])),
        )

    def message_at(self, prompt: Prompt, token: int) -> tuple[int, str] | None:
        """(index, role) of the message that holds a token of the prompt."""
        if prompt.encoding is None or prompt.rendered is None:
            return None
        tip = prompt.tip
        if tip is not None and token == len(tip.history.ids) and tip.history.messages:
            first_new = len(tip.history.messages)
            if first_new < len(prompt.messages):
                return first_new, str(prompt.messages[first_new].get("role"))
        segment = prompt.encoding.segment_at(min(token, len(prompt.ids) - 1))
        return self._format.message_at(prompt.rendered, prompt.messages, prompt.tools, segment)


def _said_within(tokenizer: Tokenizer, ids: IntArray, text: str) -> tuple[int, int]:
    """How many ids say no more than a beginning of `text`, and how many characters they say.

    An unfinished character is not said yet: they end where the text is whole.
    """
    reader, said_len = Detokenizer(tokenizer), 0
    num_ids, num_chars = 0, 0
    begun = False
    held: list[int] = []  # with a text, since the text was whole
    for count, token in enumerate(ids.tolist(), start=1):
        piece = reader.push(token)
        if not text.startswith(piece, said_len):
            break
        said_len += len(piece)
        if tokenizer.has_text(token, skip_special=True):
            held.append(token)
            if not piece and tokenizer.is_byte_token(token):
                continue  # what follows decides on the whole run of bytes
        decoded = tokenizer.decode_after(held) if begun else tokenizer.decode(held)
        if text[num_chars:said_len] == decoded:
            num_ids, num_chars = count, said_len
            begun = begun or bool(held)
            held.clear()
    return num_ids, num_chars


def check_ids(ids: Sequence[int] | IntArray, vocab_size: int) -> IntArray:
    """Token ids as one int32 array. Raises InvalidRequest, naming the first bad one."""
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"token ids have to be one list of integers: {error}") from error
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(
            f"token ids have to be one list of integers, not {array.dtype} of shape {array.shape}"
        )
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise InvalidRequest(
            f"token {at} is {array[at]}, outside the vocabulary of {vocab_size} ids"
        )
    return array.astype(np.int32)


def listed(messages: Sequence[Message]) -> list[Message]:
    """The messages as a list. Raises InvalidRequest for no list, or none in it."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise InvalidRequest(
            f"messages is a {type(messages).__name__}; give a list of dicts with role and content"
        )
    own = list(messages)
    if not own:
        raise InvalidRequest("the list of messages is empty; give at least one message")
    return own


def _own_tools(tools: Tools | None, tip: SessionTip | None) -> tuple[Mapping[str, Any], ...] | None:
    """Tools that stay as they are, whatever the caller does to its own afterwards."""
    if tools is None:
        return None
    if tip is not None and tools is tip.history.tools:
        return tip.history.tools
    return tuple(copy.deepcopy(list(tools)))


def _log(prompt: Prompt, reply: IntArray) -> TokenLog:
    """Tokens of the prompt and the reply, in the tip's memory where it goes on."""
    if prompt.tip is not None and not prompt.leaves_tip:
        new = np.concatenate([prompt.ids[prompt.shared_len :], reply])
        return prompt.tip.history.tokens.extend(new)
    return TokenLog(np.concatenate([prompt.ids, reply]))


def _share(tokens: TokenLog, prompt: Prompt) -> None:
    """Let the turns that a new token history goes on from live in its memory, so that a session
    whose texts are edited again and again does not keep a copy for each time."""
    tip = prompt.tip
    while tip is not None:
        if len(tip.history) <= prompt.shared_len:
            tip.history.tokens.move_to(tokens)
        tip = tip.parent


def _num_calls(messages: Sequence[Message]) -> int:
    """Tool calls so far, so that ids of further ones stay unique in the conversation."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def _closest(ids: IntArray, tips: Iterable[SessionTip]) -> tuple[SessionTip | None, int]:
    """The tip whose history shares the longest prefix, the latest of equals."""
    best: SessionTip | None = None
    longest = 0
    for tip in tips:
        shared = common_prefix_len(ids, tip.history.ids)
        if best is None or shared >= longest:
            best, longest = tip, shared
    return best, longest
