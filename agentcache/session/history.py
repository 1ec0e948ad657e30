"""A trajectory as a session keeps it: tokens shared along its turns, messages, segments."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache.engine.append_log import AppendLog
from agentcache.engine.messages import same_message, same_prefix
from agentcache.sessions.registry import Tip

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentcache.engine.append_log import TokenLog
    from agentcache.engine.chat import Message
    from agentcache.engine.segments import Encoded, Encoding
    from agentcache.engine.template import Chat
    from agentcache.types import IntArray

__all__ = ["NO_MESSAGES", "History", "SessionTip"]

NO_MESSAGES: AppendLog[Message] = AppendLog()
_NO_PARTS: AppendLog[Encoded] = AppendLog()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class History:
    """A trajectory up to the end of a turn.

    tokens: all of them. frontier: how many of them the tree held when the turn ended. Where it was
    made of messages: encoding has its segments with their ids, messages the list, with the reply
    if has_reply and num_calls tool calls, spelled the list without the reply as the caller last
    spelled it, ends and head_len what is known of their places, chat the list without the reply as
    it was rendered. Made of ids, encoding is None.
    """

    tokens: TokenLog
    frontier: int
    head_len: int = 0
    encoding: Encoding | None = None
    messages: AppendLog[Message] = NO_MESSAGES
    spelled: AppendLog[Message] = NO_MESSAGES
    has_reply: bool = False
    tools: tuple[Mapping[str, Any], ...] | None = None
    ends: Sequence[int] | None = None
    chat: Chat | None = None
    num_calls: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def parts(self) -> AppendLog[Encoded]:
        """Its segments with their ids; none where it was made of ids."""
        return _NO_PARTS if self.encoding is None else self.encoding.parts

    def is_said_by(self, messages: Sequence[Any]) -> bool:
        """Whether a list begins with all messages, spelled its way."""
        spelled = len(self.spelled)
        # Lists are compared by what is the same object first.
        if len(messages) >= len(self.messages) and [*self.spelled] == [*messages[:spelled]]:
            rest = self.messages[spelled:]
            if all(map(same_message, rest, messages[spelled : len(self.messages)])):
                return True
        return same_prefix(self.messages, messages)

    def spelled_as(self, messages: Sequence[Message]) -> AppendLog[Message]:
        """All messages, the reply as the caller spells it, in a copy that it cannot change."""
        first = len(self.spelled)
        pairs = zip(self.messages[first:], messages[first:], strict=True)
        return self.spelled.extend(
            known if known == said else copy.deepcopy(said) for known, said in pairs
        )

    @property
    def ids(self) -> IntArray:
        """Every token, [T] int32, read-only."""
        return self.tokens.ids


SessionTip = Tip[History]
