"""Rendered chat text cut at control tokens, and the ids that belong to each piece."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.engine.append_log import AppendLog, TokenLog
from agentcache.engine.tokenizer import REPLY_MARKUP, ControlToken, Tokenizer
from agentcache.errors import InvalidRequest

if TYPE_CHECKING:
    from agentcache.types import IntArray

__all__ = [
    "Cut",
    "Cutter",
    "Encoded",
    "Encoding",
    "Segment",
    "Shield",
    "Shielding",
    "ShortTexts",
    "continues",
    "encode_after",
    "encode_segments",
    "reply_parts",
    "spliced_len",
]

_MOST_SHORT_CHARS = 16
_MOST_SHORT = 256


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered chat: one control token, or the plain text between two of them.

    `special_id` is the id of a control token, whose literal stands in `text`; None for plain text.
    """

    text: str
    special_id: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A segment with its ids, `ids` [T] int32 and read-only.

    The ids of a sampled segment may differ from what the tokenizer makes of its text.
    """

    segment: Segment
    ids: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """The ids of a list of segments.

    tokens: the ids of all segments in order.
    parts: one `Encoded` per segment that was asked for, in the same order.
    starts: the token position at which each begins, and how many tokens there are.
    reused: how many leading segments took their ids from what was known.
    encoded_chars: characters that went through the tokenizer (control tokens need none, nor do
        short texts that it has seen before).
    """

    tokens: TokenLog
    parts: AppendLog[Encoded]
    starts: TokenLog
    reused: int
    encoded_chars: int

    @property
    def ids(self) -> IntArray:
        """All ids, [N] int32, read-only."""
        return self.tokens.ids

    def offset(self, segment_idx: int) -> int:
        """Token position at which segment `segment_idx` begins; the total for `len(parts)`."""
        return int(self.starts.ids[segment_idx])

    def followed_by(self, parts: Sequence[Encoded], encoded_chars: int = 0) -> Encoding:
        """The same with more parts. Costs no more than these along one line of descent."""
        ends = [*accumulate((len(part.ids) for part in parts), initial=len(self.tokens))]
        starts = self.starts.extend(np.array(ends[1:], np.int32))
        tokens = self.tokens.extend(_joined(parts))
        return Encoding(tokens, self.parts.extend(parts), starts, len(self.parts), encoded_chars)

    def first(self, count: int) -> Encoding:
        """The first `count` parts."""
        return Encoding(
            self.tokens.first(self.offset(count)),
            self.parts.first(count),
            self.starts.first(count + 1),
            min(count, self.reused),
            0,
        )

    def segment_at(self, position: int) -> int:
        """The segment that holds a token position; `len(parts)` from the end on."""
        at = np.searchsorted(self.starts.ids, position, side="right")
        return int(at) - (position >= 0)


@dataclass(frozen=True, slots=True)
class Cut:
    """A text as segments. `stops[i]` is the offset in the text where segment i ends.

    Where the text is the tail of a longer one, `skipped` characters and `before` segments precede
    it, and places are counted in the whole.
    """

    segments: tuple[Segment, ...]
    stops: tuple[int, ...]
    skipped: int = 0
    before: int = 0

    @property
    def end(self) -> int:
        """The segment index after the last segment."""
        return self.before + len(self.segments)

    def border(self, offset: int) -> int:
        """The segment index of the last border at or before an offset in the text."""
        return self.before + bisect_right(self.stops, offset - self.skipped)


class Cutter:
    """Cuts text at control tokens, the longest first where several begin at one place."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        self._tokens = {token.text: token for token in tokens}
        self._pattern = _any_of(self._tokens)

    def find(self, text: str, start: int = 0) -> Iterator[tuple[int, int, ControlToken]]:
        """(begin, end, token) of every control token in the text from `start` on."""
        for match in self._pattern.finditer(text, start):
            yield match.start(), match.end(), self._tokens[match[0]]

    def cut(self, text: str, *, after: int | None = None) -> Cut:
        """The text as segments; `after` is the id of the control token that stands before it.

        White space that a control token swallows is in no segment.
        """
        segments: list[Segment] = []
        stops: list[int] = []
        swallow = any(t.rstrip for t in self._tokens.values() if t.token_id == after)
        left = 0
        for begin, end, token in self.find(text):
            _plain(text, left, begin, segments, stops, swallow, token.lstrip)
            segments.append(Segment(token.text, token.token_id))
            stops.append(end)
            left, swallow = end, token.rstrip
        _plain(text, left, len(text), segments, stops, swallow, False)
        return Cut(tuple(segments), tuple(stops))


class Shield:
    """Hides look-alikes of control tokens in what callers wrote, and shows them again.

    The first character of a look-alike, and of an ending that could become one together with the
    text that follows, is replaced by a private-use character that occurs nowhere in the inputs: so
    texts keep their length, and every control token found in a rendering is the template's own.
    """

    def __init__(self, shielding: Shielding, inputs: Iterable[str]) -> None:
        used = set(shielding.template_private)
        for text in inputs:
            used.update(_private_chars(text))
        unused = (char for char in map(chr, range(0xE000, 0xF900)) if char not in used)
        free = list(islice(unused, len(shielding.first_chars)))
        if len(free) < len(shielding.first_chars):
            raise InvalidRequest(
                "the messages use every private-use character from U+E000 to U+F8FF, which leaves "
                "none to work with; replace some of them"
            )
        self._hidden = dict(zip(shielding.first_chars, free, strict=False))
        self._shielding = shielding
        self._shown = str.maketrans({hidden: char for char, hidden in self._hidden.items()})
        self._escapes = {f"\\u{ord(hidden):04x}": char for char, hidden in self._hidden.items()}

    def covers(self, inputs: Iterable[str]) -> bool:
        """Whether more inputs may come, since they hold no character that hides something."""
        hiding = set(self._hidden.values())
        return all(hiding.isdisjoint(_private_chars(text)) for text in inputs)

    def hide(self, value: Any, *, keep_markup: bool = False) -> Any:
        """A JSON value with every look-alike in its strings and keys hidden.

        `keep_markup` leaves `<think>` and `<tool_call>` as they are: for what a model wrote.
        """
        if isinstance(value, str):
            plain = str.__str__(value)  # an enum's value
            return self._hide_text(plain, self._shielding.lookalikes(keep_markup))
        if isinstance(value, Mapping):
            return {
                self.hide(key, keep_markup=keep_markup): self.hide(item, keep_markup=keep_markup)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.hide(item, keep_markup=keep_markup) for item in value]
        return value

    def show(self, text: str) -> str:
        """A rendered text, or a piece of it, as it would be without the shield."""
        if text.isascii() and "\\u" not in text:
            return text
        for escape, char in self._escapes.items():
            # A template that writes JSON in ASCII has escaped the private-use characters.
            text = text.replace(escape, char)
        return text.translate(self._shown)

    def _hide_text(self, text: str, lookalikes: Lookalikes) -> str:
        found = 1
        while found:  # A hidden look-alike may end in a shorter one.
            text, found = lookalikes.pattern.subn(self._hide_match, text)
        for length in range(min(lookalikes.longest_beginning, len(text)), 0, -1):
            if text[-length:] in lookalikes.beginnings:
                text = text[:-length] + self._hidden[text[-length]] + text[len(text) - length + 1 :]
        return text

    def _hide_match(self, match: re.Match[str]) -> str:
        return self._hidden[match[0][0]] + match[0][1:]


@dataclass(frozen=True, slots=True)
class Lookalikes:
    """Texts to hide: whole control tokens, and beginnings of them at the end of a text."""

    pattern: re.Pattern[str]
    beginnings: frozenset[str]
    longest_beginning: int


class Shielding:
    """What all shields of one chat format have in common."""

    def __init__(self, tokens: Sequence[ControlToken], template: str) -> None:
        texts = [token.text for token in tokens]
        self.first_chars = sorted({text[0] for text in texts})
        self.template_private = _private_chars(template)
        self._all = _lookalikes(texts)
        self._unwritten = _lookalikes([text for text in texts if text not in REPLY_MARKUP])

    def lookalikes(self, keep_markup: bool) -> Lookalikes:
        """What to hide, with or without the markup that replies are made of."""
        return self._unwritten if keep_markup else self._all


def encode_segments(
    tokenizer: Tokenizer,
    segments: Sequence[Segment],
    known: Sequence[Encoded] = (),
    *,
    at_start: bool = True,
) -> Encoding:
    """Ids of segments; the longest leading run that equals `known` keeps the known ids.

    A known text may be cut into several plain parts (a reply header and the reply) where
    `segments` has one. `at_start` says that nothing stands before the first segment.
    """
    parts, _ = _splice(segments, known)
    reused = len(parts)
    added, encoded_chars = _encoded(tokenizer, segments[reused:], at_start and reused == 0)
    parts += added
    offsets = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part.ids) for part in parts], out=offsets[1:])
    tokens = TokenLog(_joined(parts))
    return Encoding(tokens, AppendLog(parts), TokenLog(offsets), reused, encoded_chars)


class ShortTexts:
    """Ids of short plain texts that follow others, such as the roles in a template's headers, which
    come again in every prompt: encoded once. Any number of threads may use it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, IntArray] = {}

    def ids(self, text: str) -> IntArray:
        """The ids, read-only."""
        known = self._known.get(text)
        if known is None:
            if len(self._known) >= _MOST_SHORT:
                self._known.clear()
            known = _frozen(self._tokenizer.encode_plain(text, at_start=False))
            self._known[text] = known
        return known


def encode_after(
    tokenizer: Tokenizer, known: Encoding, segments: Sequence[Segment], short: ShortTexts
) -> Encoding:
    """All that is known and the ids of what follows it, which is all that it costs."""
    return known.followed_by(*_encoded(tokenizer, segments, not known.parts, short))


def _encoded(
    tokenizer: Tokenizer,
    segments: Sequence[Segment],
    at_start: bool,
    short: ShortTexts | None = None,
) -> tuple[list[Encoded], int]:
    """Segments with their ids, and how many characters went through the tokenizer."""
    parts: list[Encoded] = []
    encoded_chars = 0
    for index, segment in enumerate(segments):
        begins = at_start and index == 0
        if segment.special_id is not None:
            ids = tokenizer.alone(segment.special_id)
        elif short is not None and not begins and len(segment.text) <= _MOST_SHORT_CHARS:
            ids = short.ids(segment.text)
        else:
            ids = _frozen(tokenizer.encode_plain(segment.text, at_start=begins))
            encoded_chars += len(segment.text)
        parts.append(Encoded(segment, ids))
    return parts, encoded_chars


def reply_parts(tokenizer: Tokenizer, ids: Sequence[int] | IntArray) -> tuple[Encoded, ...]:
    """Ids of a reply as segments: each control token one, each run between them one."""
    control = {token.token_id: token.text for token in tokenizer.control_tokens}
    parts: list[Encoded] = []
    run: list[int] = []

    def end_run() -> None:
        if run:
            parts.append(Encoded(Segment(tokenizer.decode_after(run)), _frozen(run)))
            run.clear()

    for token_id in map(int, ids):
        if token_id in control:
            end_run()
            segment = Segment(control[token_id], token_id)
            parts.append(Encoded(segment, tokenizer.alone(token_id)))
        else:
            run.append(token_id)
    end_run()
    return tuple(parts)


def continues(segments: Sequence[Segment], known: Sequence[Encoded]) -> bool:
    """Whether `segments` begins with all that is known."""
    return _splice(segments, known)[1] == len(known)


def spliced_len(segments: Sequence[Segment], known: Sequence[Encoded]) -> int:
    """Tokens that `encode_segments` would take over from `known`."""
    return sum(len(part.ids) for part in _splice(segments, known)[0])


def _splice(segments: Sequence[Segment], known: Sequence[Encoded]) -> tuple[list[Encoded], int]:
    """Leading segments with the ids of known parts that say the same, and how many those are."""
    parts: list[Encoded] = []
    known, used = list(known), 0
    for segment in segments:
        count = _matching(segment, known, used)
        if count == 0:
            break
        if count == 1:
            parts.append(known[used])
        else:
            parts.append(Encoded(segment, _joined(known[used : used + count])))
        used += count
    return parts, used


def _matching(segment: Segment, known: Sequence[Encoded], start: int) -> int:
    """How many known parts from `start` on make up exactly this segment; 0 if none do."""
    if segment.special_id is not None:
        same = start < len(known) and known[start].segment.special_id == segment.special_id
        return int(same)
    matched_len = 0
    for index in range(start, len(known)):
        part = known[index].segment
        if part.special_id is not None or not segment.text.startswith(part.text, matched_len):
            return 0
        matched_len += len(part.text)
        if matched_len == len(segment.text):
            return index + 1 - start
    return 0


def _plain(
    text: str,
    left: int,
    right: int,
    segments: list[Segment],
    stops: list[int],
    swallow_left: bool,
    swallow_right: bool,
) -> None:
    """Append the plain text from `left` to `right`, less what control tokens swallow."""
    if swallow_left:
        left = right - len(text[left:right].lstrip())
    if swallow_right:
        right = left + len(text[left:right].rstrip())
    if right > left:
        segments.append(Segment(text[left:right]))
        stops.append(right)


def _joined(parts: Sequence[Encoded]) -> IntArray:
    ids = np.concatenate([part.ids for part in parts]) if parts else np.empty(0, np.int32)
    ids.flags.writeable = False
    return ids


def _frozen(ids: Sequence[int]) -> IntArray:
    array = np.array(ids, np.int32)
    array.flags.writeable = False
    return array


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the texts, longest first; it matches nothing where there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _lookalikes(texts: Sequence[str]) -> Lookalikes:
    beginnings = frozenset(text[:end] for text in texts for end in range(1, len(text)))
    return Lookalikes(_any_of(texts), beginnings, max(map(len, beginnings), default=0))


_PRIVATE = re.compile(r"[\ue000-\uf8ff]")
_PRIVATE_ESCAPE = re.compile(r"\\u([eE][0-9a-fA-F]{3}|[fF][0-8][0-9a-fA-F]{2})")


def _private_chars(text: str) -> set[str]:
    """Private-use characters in a text, written out or as a JSON escape."""
    found = set() if text.isascii() else set(_PRIVATE.findall(text))
    if "\\u" in text:
        found.update(chr(int(digits, 16)) for digits in _PRIVATE_ESCAPE.findall(text))
    return found
