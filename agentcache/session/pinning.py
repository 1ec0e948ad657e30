"""What stays as a session first had it: the order of tools, volatile lines of a system prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from agentcache.errors import InvalidRequest

if TYPE_CHECKING:
    from agentcache.engine.chat import Message, Tools

__all__ = ["Volatile", "pinned_tools", "same_tools"]

_LEADING = ("system", "developer")


class Volatile:
    """Lines of a system prompt whose text may change from call to call without meaning anything.

    A line is volatile if one of the patterns is found in it. Raises InvalidRequest for a pattern
    that is none.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        if isinstance(patterns, (str, bytes)):
            raise InvalidRequest(f"volatile is the text {patterns!r}; give a list of patterns")
        self._patterns = [_compiled(pattern) for pattern in patterns]

    def pinned(self, messages: list[Message], known: Sequence[Sequence[Message]]) -> list[Message]:
        """The messages, each leading system message as a known list has it in its place if it
        differs from that in volatile lines only; the latest such list counts."""
        pinned = list(messages)
        for index, message in enumerate(takewhile(_leads, messages)):
            candidates = [list_[index] for list_ in known if index < len(list_)]
            for candidate in reversed(candidates):
                if self._same_but_volatile(candidate, message):
                    pinned[index] = {**message, "content": candidate["content"]}
                    break
        return pinned

    def _same_but_volatile(self, a: Message, b: Message) -> bool:
        if a.get("role") != b.get("role"):
            return False
        texts = a.get("content"), b.get("content")
        if not isinstance(texts[0], str) or not isinstance(texts[1], str):
            return False
        return texts[0] == texts[1] or self._steady(texts[0]) == self._steady(texts[1])

    def _steady(self, text: str) -> list[str | None]:
        """The lines, volatile ones without their text."""
        return [None if self._is_volatile(line) else line for line in text.split("\n")]

    def _is_volatile(self, line: str) -> bool:
        return any(pattern.search(line) for pattern in self._patterns)


def same_tools(a: Tools | None, b: Tools | None) -> bool:
    """Whether two lists of tools are rendered alike; none and an empty list are."""
    return a is b or list(a or ()) == list(b or ())


def pinned_tools(tools: Tools | None, known: Sequence[Tools | None]) -> Tools | None:
    """The latest of the known lists that holds the same tools, in whatever order; else `tools`."""
    if isinstance(tools, (list, tuple)) and tools:
        for pinned in reversed(known):
            if pinned is not None and (
                same_tools(tools, pinned) or _same_in_any_order(tools, pinned)
            ):
                return pinned
    return tools


def _same_in_any_order(a: Sequence[Any], b: Sequence[Any]) -> bool:
    left = list(b)
    if len(a) != len(left):
        return False
    for tool in a:
        if tool not in left:
            return False
        left.remove(tool)
    return True


def _leads(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in _LEADING


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InvalidRequest(
            f"the volatile pattern {pattern!r} is no regular expression: {error}"
        ) from error
