"""Recorded model calls to token ids, as a session encodes them; the tokenizer is handed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from agentcache.replay.trace import Call
    from agentcache.types import IntArray

__all__ = ["ChatEncoder", "ChatLike", "EncodedCall", "RunEncoder"]

_Messages = Sequence[Mapping[str, Any]]


class ChatLike(Protocol):
    """What is needed of a model's chat format; `agentcache.engine.chat.ChatFormat` is one.

    Its methods raise AgentCacheError for messages that the template refuses.
    """

    def render(self, messages: _Messages, tools: _Messages | None = None) -> Any:
        """The prompt, with its `segments`, and at which of them the `reply_start` is."""
        ...

    def encode(self, segments: Any, known: Any = (), *, at_start: bool = True) -> Any:
        """The `ids` of segments, their `parts`, and the `offset` at which each begins.

        The longest leading run that equals `known` keeps the known ids.
        """
        ...

    def reply_segments(
        self, messages: _Messages, reply_message: Mapping[str, Any], tools: _Messages | None = None
    ) -> Any:
        """What the model would have written for a recorded reply, without the end of message."""
        ...

    def reply_parts(self, ids: Any) -> Any:
        """The ids of a reply as parts, to know them by in the prompts that follow."""
        ...

    def head_end(self, rendered: Any, messages: _Messages, tools: _Messages | None = None) -> int:
        """The segment at which what other chats share ends: system and tools. 0 for nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ChatEncoder:
    """A chat format, and how recorded answers become ids.

    answer: the ids of a call's answer, its end included, given the rendered prompt; None for the
    answer's text with `end_id` after it, if there is one.
    """

    chat: ChatLike
    end_id: int | None = None
    answer: Callable[[Call, Any], IntArray] | None = None

    def answer_ids(self, call: Call, rendered: Any) -> IntArray:
        """The ids of a call's answer. Raises AgentCacheError."""
        if self.answer is not None:
            return self.answer(call, rendered)
        segments = self.chat.reply_segments(call.messages, call.answer, call.tools)
        ids: IntArray = self.chat.encode(segments, at_start=False).ids
        end = [] if self.end_id is None else [self.end_id]
        return np.concatenate([ids, np.array(end, np.int32)])


@dataclass(frozen=True, slots=True, eq=False)
class EncodedCall:
    """One call: `ids` [T] int32, of which `prompt_len` are the prompt; `marks` and `passing` as in
    SimRequest."""

    ids: IntArray
    prompt_len: int
    marks: tuple[int, ...]
    passing: tuple[int, ...]


class RunEncoder:
    """Encodes the calls of one run in their order.

    What a prompt shares with the call before keeps that call's ids, its answer's included, as it
    does in a session.
    """

    def __init__(self, encoder: ChatEncoder) -> None:
        self._encoder = encoder
        self._chat = encoder.chat
        self._known: tuple[Any, ...] = ()
        self._head: tuple[object, object] | None = None
        self._head_segments = 0

    def encode(self, call: Call) -> EncodedCall:
        """The next call. Raises AgentCacheError for messages that the template refuses."""
        chat = self._chat
        rendered = chat.render(call.messages, call.tools)
        prompt = chat.encode(rendered.segments, self._known)
        reply = self._encoder.answer_ids(call, rendered)
        self._known = (*prompt.parts, *chat.reply_parts(reply))
        head_end = prompt.offset(self._head_end(call, rendered))
        ids = np.concatenate([prompt.ids, reply])
        ids.flags.writeable = False
        prompt_len = len(prompt.ids)
        before_reply = min(prompt.offset(rendered.reply_start), prompt_len - 1)
        return EncodedCall(ids, prompt_len, (head_end,) if head_end else (), (before_reply,))

    def _head_end(self, call: Call, rendered: Any) -> int:
        """The head's segments, looked for where system messages or tools are others than before."""
        lead = list(takewhile(lambda message: message.get("role") == "system", call.messages))
        if self._head != (lead, call.tools):
            self._head = (lead, call.tools)
            self._head_segments = self._chat.head_end(rendered, call.messages, call.tools)
        return self._head_segments
