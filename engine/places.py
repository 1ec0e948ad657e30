"""Where messages end in a rendering, told by rendering the list again with something changed."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from agentcache.engine.template import common_len
from agentcache.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.engine.segments import Cut
    from agentcache.engine.template import Chat

__all__ = ["Places"]


class Places:
    """Segment indices in one rendering of a chat, or in the tail of it that `cut` holds."""

    def __init__(
        self, chat: Chat, cut: Cut, end_ids: frozenset[int], *, reply_prompt: bool = True
    ) -> None:
        self._chat = chat
        self._cut = cut
        self._end_ids = end_ids
        self._reply_prompt = reply_prompt
        self._text = chat.text(reply_prompt=reply_prompt)

    def reply_start(self) -> int:
        """Before the reply header; the end where there is none."""
        bare = self._chat.text()
        if self._text == bare:
            return self._cut.end
        return self._cut.border(common_len(self._text, bare))

    def end(self, count: int) -> int | None:
        """At the end of the first `count` messages; None where that cannot be told."""
        if count == len(self._chat.messages):
            return self.reply_start()
        try:
            prefix = self._chat.text(count)
        except InvalidRequest:
            prefix = None
        if prefix is not None and self._text.startswith(prefix):
            return self._cut.border(len(prefix))
        return self._start(count)

    def ends(self, counts: Sequence[int]) -> list[int | None]:
        """`end` of each."""
        return [self.end(count) for count in counts]

    def message_at(self, segment_idx: int) -> int:
        """The place of the message that holds a segment; the number of messages past the last.

        Takes a few renderings, in the logarithm of the number of messages.
        """

        def reaches(count: int) -> bool:
            end = self.end(count)
            return end is not None and end > segment_idx

        counts = range(1, len(self._chat.messages) + 1)
        return bisect_left(counts, True, key=reaches)

    def _start(self, place: int) -> int | None:
        """Where the message at `place` begins: after what closes the one before its content.

        For templates that render a list otherwise once more follows.
        """
        try:
            altered = self._chat.altered_text(place, reply_prompt=self._reply_prompt)
        except InvalidRequest:
            return None
        segments, before = self._cut.segments, self._cut.before
        content = self._cut.border(common_len(self._text, altered)) - before
        start = content
        while start > 0 and segments[start - 1].special_id not in self._end_ids:
            start -= 1
        if start == 0:
            return before + content
        blank = start < content and not segments[start].text.strip()
        return before + start + blank
