"""Conversations of callers who name no session, remembered for the ids of their texts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from agentcache.session.prompts import listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.engine.chat import Message, Tools
    from agentcache.engine.segments import Encoded
    from agentcache.session.history import History
    from agentcache.session.prompts import Prompt, PromptBuilder

__all__ = ["RecentConversations"]


@dataclass(frozen=True, slots=True, eq=False)
class _Conversation:
    """A call that ended: its prompt, and its messages and their parts, the reply included."""

    prompt: Prompt
    messages: Sequence[Message]
    parts: Sequence[Encoded]
    num_tokens: int

    def shares(self, messages: Sequence[Any], place: int) -> bool:
        """Whether a list has the same message in a place."""
        known = self.messages
        return place < min(len(known), len(messages)) and _same(known[place], messages[place])

    def shared(self, messages: Sequence[Any]) -> int:
        """How many leading messages a list has in common."""
        return sum(1 for _ in takewhile(lambda at: self.shares(messages, at), range(len(messages))))

    def is_asked_by(self, messages: Sequence[Any], tools: Tools | None) -> bool:
        """Whether a list and its tools are exactly those of the prompt."""
        asked = self.prompt
        return _same([*asked.messages], [*messages]) and _same(
            [*(asked.tools or ())], [*tools] if isinstance(tools, (list, tuple)) else tools or []
        )


class RecentConversations:
    """The last conversations of each tenant whose calls named no session. For any thread.

    They hold nothing in the cache and change no text. A list that begins as one of them did has the
    ids that its equal beginning had, replies as they were sampled included, and is encoded from
    there on only. At most `per_tenant` are kept of one tenant, and `in_all` with `max_tokens` of
    all together; those that were used longest ago are forgotten.
    """

    def __init__(self, per_tenant: int = 32, in_all: int = 512, max_tokens: int = 2**20) -> None:
        self._per_tenant = per_tenant
        self._in_all = in_all
        self._max_tokens = max_tokens
        self._kept: OrderedDict[_Conversation, str | None] = OrderedDict()  # last used at the end
        self._num_tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_tokens(self) -> int:
        """Tokens of all that is remembered."""
        return self._num_tokens

    def prompt(
        self,
        builder: PromptBuilder,
        tenant: str | None,
        messages: Sequence[Message],
        tools: Tools | None,
    ) -> Prompt:
        """The prompt of a whole list. Raises what `PromptBuilder.from_messages` raises."""
        messages = listed(messages)
        known = self._closest(tenant, messages)
        if known is None:
            return builder.from_messages(messages, tools, ())
        if known.is_asked_by(messages, tools):
            return known.prompt
        return builder.from_messages(messages, tools, (), known=known.parts)

    def add(self, tenant: str | None, prompt: Prompt, history: History) -> None:
        """Remember a call that ended, in place of those that it repeats or goes on from."""
        if prompt.rendered is None or prompt.tip is not None or len(history) > self._max_tokens:
            return
        # what was rendered is not for several calls to work on at once
        own = replace(prompt, rendered=replace(prompt.rendered, chat=None))
        new = _Conversation(own, history.messages, history.parts, len(history))
        with self._lock:
            for other in self._of(tenant):
                last = len(other.messages) - 1
                if new.shares(other.messages, last) and new.shared(other.messages) > last:
                    self._forget(other)
            self._kept[new] = tenant
            self._num_tokens += new.num_tokens
            for other in self._of(tenant)[: -self._per_tenant]:
                self._forget(other)
            while len(self._kept) > self._in_all or self._num_tokens > self._max_tokens:
                self._forget(next(iter(self._kept)))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._num_tokens = 0

    def _closest(self, tenant: str | None, messages: Sequence[Any]) -> _Conversation | None:
        """The conversation that shares most messages, the latest of equals; None if all differ."""
        with self._lock:
            candidates = self._of(tenant)
        best, longest = None, 0
        for each in reversed(candidates):
            if each.shares(messages, longest) and (shared := each.shared(messages)) > longest:
                best, longest = each, shared
        if best is not None:
            with self._lock:
                if best in self._kept:
                    self._kept.move_to_end(best)
        return best

    def _of(self, tenant: str | None) -> list[_Conversation]:
        return [each for each, owner in self._kept.items() if owner == tenant]

    def _forget(self, conversation: _Conversation) -> None:
        del self._kept[conversation]
        self._num_tokens -= conversation.num_tokens


def _same(a: Any, b: Any) -> bool:
    """Whether two JSON values are written alike: True is not 1, and the order of keys counts."""
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is dict:
        return len(a) == len(b) and all(
            _same(k, other) and _same(v, b[other])
            for (k, v), other in zip(a.items(), b, strict=True)
        )
    if kind in (list, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if kind is float:
        return repr(a) == repr(b)
    return kind in (str, int, bool, type(None)) and a == b
