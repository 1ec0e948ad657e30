"""A place in a growing text, moved on by what a form expects there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from agentcache.engine.reply_forms.base import MoreNeeded, NotACall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.engine.reply_forms.base import Call, CallForm, Parameters

__all__ = ["BlockScan", "Cursor", "skip_space"]

_SPACE = re.compile(r"\s*")
_STRUCTURE = re.compile(r"[\"'(){}\[\]]")
_JSON_STRUCTURE = re.compile(r'["{}\[\]]')
_STRING_END = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


class Cursor:
    """Where a form reads. Every method raises MoreNeeded where the text ends too early to tell.

    at: the offset. ended: nothing will be added to the text. memo: what was found out about the
    text so far, so that no character of a long argument is looked at twice.
    """

    def __init__(self, text: str, at: int, *, ended: bool, memo: _Memo) -> None:
        self.text = text
        self.at = at
        self.ended = ended
        self._memo = memo

    def space(self) -> None:
        """Past white space, if there is any."""
        self.at = skip_space(self.text, self.at)

    def literal(self, *choices: str) -> str:
        """Past one of the texts, of which none begins another. Raises NotACall for another one."""
        for choice in choices:
            if self.text.startswith(choice, self.at):
                self.at += len(choice)
                return choice
        if any(self._may_become(choice) for choice in choices):
            raise MoreNeeded
        raise NotACall

    def optional(self, *choices: str) -> str | None:
        """Past white space and one of the texts where they are; else nowhere."""
        begin = self.at
        self.space()
        try:
            return self.literal(*choices)
        except NotACall:
            self.at = begin
        except MoreNeeded:
            if not self.ended:
                raise
            self.at = begin
        return None

    def until(self, close: str) -> str:
        """The text before `close`, and past that."""
        searched = self._memo.searched.get((self.at, close), self.at)
        found = self.text.find(close, searched)
        if found < 0:
            nearest = max(self.at, len(self.text) - len(close) + 1)
            self._memo.searched[self.at, close] = nearest
            raise MoreNeeded
        said, self.at = self.text[self.at : found], found + len(close)
        return said

    def brackets(self, opening: str, *, json: bool = True) -> str:
        """Past a text in brackets, such as a JSON object, and the text of it.

        `opening` is its first character; brackets in strings do not count, and without `json` a
        string may stand in single quotes too. Raises NotACall where another character comes.
        """
        if self.at >= len(self.text):
            raise MoreNeeded
        if self.text[self.at] != opening:
            raise NotACall
        scan = self._memo.brackets.setdefault(self.at, _Brackets(self.at, json))
        end = scan.end(self.text)
        if end is None:
            raise MoreNeeded
        said, self.at = self.text[self.at : end], end
        return said

    def _may_become(self, literal: str) -> bool:
        rest = len(self.text) - self.at
        return rest < len(literal) and literal.startswith(self.text[self.at :])


class _Memo:
    """What is known of one block, by the offset it begins at."""

    def __init__(self) -> None:
        self.brackets: dict[int, _Brackets] = {}
        self.searched: dict[tuple[int, str], int] = {}


class _Brackets:
    """Looks for the end of a text in brackets; every character is read once."""

    def __init__(self, begin: int, json: bool) -> None:
        self._at = begin
        self._depth = 0
        self._quote: str | None = None
        self._end: int | None = None
        self._structure = _JSON_STRUCTURE if json else _STRUCTURE

    def end(self, text: str) -> int | None:
        """Where the outermost bracket is closed; None where it is not yet."""
        if self._end is None:
            self._end = self._find(text)
        return self._end

    def _find(self, text: str) -> int | None:
        while True:
            pattern = self._structure if self._quote is None else _STRING_END[self._quote]
            match = pattern.search(text, self._at)
            if match is None:
                self._at = max(self._at, len(text))
                return None
            char, self._at = match[0], match.end()
            if char == "\\":
                self._at += 1  # Whatever is escaped, even if it is still to come.
            elif char in _STRING_END:
                self._quote = char if self._quote is None else None
            else:
                self._depth += 1 if char in "({[" else -1
                if self._depth == 0:
                    return self._at


class BlockScan:
    """Reads one block of calls out of a growing text."""

    def __init__(self, form: CallForm, begin: int, parameters: Parameters) -> None:
        self._form = form
        self._begin = begin
        self._parameters = parameters
        self._memo = _Memo()

    def result(self, text: str, *, ended: bool) -> tuple[Sequence[Call], int] | None:
        """The calls and where their block ends; None while more text is needed to tell.

        Raises NotACall.
        """
        cursor = Cursor(text, self._begin, ended=ended, memo=self._memo)
        try:
            return self._form.read(cursor, self._parameters), cursor.at
        except MoreNeeded:
            if ended:
                raise NotACall from None
            return None


def skip_space(text: str, at: int) -> int:
    """The offset of the first character from `at` on that is no white space."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
