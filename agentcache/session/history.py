"""A trajectory as a session keeps it: tokens shared along its turns, messages, segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.sessions.registry import Tip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.engine.chat import Message
    from agentcache.engine.segments import Encoded, Encoding
    from agentcache.engine.template import Chat
    from agentcache.types import IntArray

__all__ = ["History", "SessionTip", "TokenLog"]


class _Buffer:
    """Tokens of one line of descent; `used` of `data` are taken."""

    __slots__ = ("data", "used")

    def __init__(self, ids: IntArray) -> None:
        self.data = np.array(ids, dtype=np.int32)
        self.used = len(ids)


class TokenLog:
    """An immutable token sequence whose extensions share its memory.

    The first extension of a log goes into the same buffer, further ones copy, so that a trajectory
    of n tokens takes O(n) memory over all its turns, and one that is never branched is never
    copied but to grow. Not thread-safe: logs are extended on the engine thread.

    >>> log = TokenLog(np.array([1, 2], np.int32))
    >>> longer = log.extend(np.array([3], np.int32))
    >>> log.ids.tolist(), longer.ids.tolist()
    ([1, 2], [1, 2, 3])
    """

    __slots__ = ("_buffer", "_len")

    def __init__(self, ids: IntArray) -> None:
        self._buffer = _Buffer(ids)
        self._len = len(ids)

    def __len__(self) -> int:
        return self._len

    @property
    def ids(self) -> IntArray:
        """The tokens, as a read-only view."""
        view = self._buffer.data[: self._len]
        view.flags.writeable = False
        return view

    def extend(self, more: IntArray) -> TokenLog:
        """The tokens followed by `more`; amortised O(len(more)) along one line of descent."""
        out = TokenLog.__new__(TokenLog)
        out._len = self._len + len(more)
        buffer = self._buffer
        if buffer.used != self._len:
            buffer = _Buffer(self.ids)
        if out._len > len(buffer.data):
            grown = np.empty(max(out._len, 2 * len(buffer.data)), dtype=np.int32)
            grown[: self._len] = buffer.data[: self._len]
            buffer.data = grown  # views of earlier logs keep the old memory only while they live
        buffer.data[self._len : out._len] = more
        buffer.used = out._len
        out._buffer = buffer
        return out


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class History:
    """A trajectory up to the end of a turn.

    tokens: all of them. frontier: how many of them the tree held when the turn ended. Where it was
    made of messages: encoding has its segments with their ids, messages the list, with the reply
    if has_reply and num_calls tool calls, ends and head_len what is known of their places, chat the
    list without the reply as it was rendered. Made of ids, encoding is None.
    """

    tokens: TokenLog
    frontier: int
    head_len: int = 0
    encoding: Encoding | None = None
    messages: tuple[Message, ...] = ()
    has_reply: bool = False
    tools: tuple[Mapping[str, Any], ...] | None = None
    ends: tuple[int, ...] | None = None
    chat: Chat | None = None
    num_calls: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def parts(self) -> tuple[Encoded, ...]:
        """Its segments with their ids; none where it was made of ids."""
        return () if self.encoding is None else self.encoding.parts

    @property
    def ids(self) -> IntArray:
        """Every token, [T] int32, read-only."""
        return self.tokens.ids


SessionTip = Tip[History]
