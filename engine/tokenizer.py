"""A tokenizer that never takes text for control tokens, and incremental decoding."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from agentcache.errors import InvalidRequest, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from agentcache.types import IntArray

__all__ = ["REPLY_MARKUP", "ControlToken", "Detokenizer", "Tokenizer"]

REPLY_MARKUP = frozenset(
    {
        *("<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<|tool_call|>", "<|/tool_call|>", "<TOOLCALL>", "</TOOLCALL>"),
        *("<tool_calls>", "</tool_calls>", "<|tool_call_start|>", "<|tool_call_end|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    }
)
"""Control tokens that are part of what a reply says; decoding never skips them."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_MAX_UNSETTLED = 16


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that only the template (or the model) may write.

    `lstrip` and `rstrip` say that it swallows white space before and after it.
    """

    text: str
    token_id: int
    special: bool
    lstrip: bool
    rstrip: bool


class Tokenizer:
    """A transformers fast tokenizer with exact encoding and decoding, free of side effects.

    Works on a private copy of the tokenizer's backend, so any number of threads may use it.
    Raises UnsupportedModel for a tokenizer without that backend.
    """

    def __init__(self, source: Any) -> None:
        backend = getattr(source, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise UnsupportedModel(
                f"{type(source).__name__} has no fast backend; use a model whose tokenizer comes "
                "with a tokenizer.json"
            )
        self.source = source
        """The transformers tokenizer, which renders the chat template; never changed."""
        definition = json.loads(backend.to_str())
        # Padding and truncation are settings of calls, not part of what the tokenizer is.
        definition["padding"] = definition["truncation"] = None
        templates = _templates(source)
        self._fingerprint = _digest([json.dumps(definition, sort_keys=True), *templates])
        template = "\0".join(templates)
        self._template_source = template if templates else None
        self._control = tuple(_control_tokens(definition["added_tokens"], template))
        self._special_ids = MappingProxyType({t.text: t.token_id for t in self._control})
        self._control_ids = frozenset(self._special_ids.values())
        self._skipped_ids = frozenset(
            t.token_id for t in self._control if t.special and t.text not in REPLY_MARKUP
        )
        self._backend, self._start_backend = _plain_backends(definition, self._special_ids)
        self._vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self._byte_level = _is_byte_level(definition["decoder"])
        self._bytes: dict[int, bytes] = {}
        self._alone: dict[int, IntArray] = {}
        self._anchor_ids = self._backend.encode("a", add_special_tokens=False).ids
        self._anchor_text = self._decode_backend(self._anchor_ids)

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Control tokens by their text: the added special tokens, and added tokens that the chat
        template writes itself, such as `<tool_call>`."""
        return self._special_ids

    @property
    def control_tokens(self) -> tuple[ControlToken, ...]:
        """The tokens of `special_ids` with their properties."""
        return self._control

    @property
    def template_source(self) -> str | None:
        """The text of the chat template, of all where several have names; None without one."""
        return self._template_source

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token."""
        return self._vocab_size

    @property
    def fingerprint(self) -> str:
        """Hex sha256 over the tokenizer's definition and its chat templates."""
        return self._fingerprint

    def alone(self, token_id: int) -> IntArray:
        """One id as an array [1] int32, read-only and the same each time."""
        known = self._alone.get(token_id)
        if known is None:
            known = np.array([token_id], np.int32)
            known.flags.writeable = False
            self._alone[token_id] = known
        return known

    def encode_plain(self, text: str, *, at_start: bool = True) -> tuple[int, ...]:
        """Ids of ordinary text: nothing is added, look-alikes of control tokens stay text.

        `at_start=False` is for text that follows other tokens; it makes a difference only to
        tokenizers that put a space before the first word of a text.

        Raises InvalidRequest for lone surrogates, which have no encoding.
        """
        check_encodable(text, "the text")
        ids = self._encode_letters(text, at_start=at_start)
        if self._control_ids.isdisjoint(ids):
            return tuple(ids)
        # A vocabulary may hold a control token as an ordinary word. Its letters are not one.
        pieces = [piece for piece in self._split_lookalikes(text) if piece]
        return tuple(
            token_id
            for index, piece in enumerate(pieces)
            for token_id in self._encode_letters(piece, at_start=at_start and index == 0)
        )

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Exact text of ids, without any clean-up of spaces; ids without a token give nothing.

        `skip_special` leaves out special tokens, but for the markup a reply is made of
        (`<think>`, `<tool_call>` and their closings).
        """
        known = [i for i in ids if self.has_text(i, skip_special=skip_special)]
        if self._byte_level:
            return b"".join(map(self.token_bytes, known)).decode("utf-8", "replace")
        return self._decode_backend(known)

    def decode_after(self, ids: Iterable[int]) -> str:
        """Text of ids that follow other text: a first space is not taken away."""
        if self._byte_level:
            return self.decode(ids)
        known = [i for i in ids if self.has_text(i, skip_special=False)]
        return self._decode_backend([*self._anchor_ids, *known])[len(self._anchor_text) :]

    def has_text(self, token_id: int, *, skip_special: bool) -> bool:
        """Whether an id contributes to decoded text."""
        if skip_special and token_id in self._skipped_ids:
            return False
        return 0 <= token_id < self._vocab_size and self._backend.id_to_token(token_id) is not None

    @property
    def is_byte_level(self) -> bool:
        """Whether every token stands for a fixed run of bytes; then `token_bytes` gives it."""
        return self._byte_level

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, in a byte-level tokenizer."""
        known = self._bytes.get(token_id)
        if known is None:
            known = _token_bytes(self._backend.id_to_token(token_id) or "")
            self._bytes[token_id] = known
        return known

    def is_byte_token(self, token_id: int) -> bool:
        """Whether an id is a single byte of a tokenizer that spells unknown characters in bytes."""
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def end_ids(self, generation_config: Any = None) -> frozenset[int]:
        """Ids that end a reply: from the generation config, else the tokenizer's end of text."""
        for owner in (generation_config, self.source):
            ids = getattr(owner, "eos_token_id", None)
            if isinstance(ids, int):
                return frozenset({ids})
            if ids:
                return frozenset(int(i) for i in ids)
        return frozenset()

    def _decode_backend(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def _encode_letters(self, text: str, *, at_start: bool) -> list[int]:
        backend = self._start_backend if at_start else self._backend
        return list(backend.encode(text, add_special_tokens=False).ids)

    def _split_lookalikes(self, text: str) -> list[str]:
        pattern = "|".join(re.escape(t.text) for t in self._control if len(t.text) > 1)
        cuts = [match.start() + 1 for match in re.finditer(pattern, text)] if pattern else []
        borders = [0, *cuts, len(text)]
        return [text[a:b] for a, b in pairwise(borders)]


class Detokenizer:
    """Text of a growing list of ids, special tokens skipped.

    The outputs of all `push` calls and the final `flush` concatenate to
    `tokenizer.decode(ids, skip_special=True)`. O(1) amortised per id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream: _ByteStream | _PieceStream = (
            _ByteStream(tokenizer) if tokenizer.is_byte_level else _PieceStream(tokenizer)
        )
        self._tokenizer = tokenizer

    def push(self, token_id: int) -> str:
        """The text that became certain with this id; bytes of an unfinished character wait."""
        if not self._tokenizer.has_text(token_id, skip_special=True):
            return ""
        return self._stream.push(token_id)

    def flush(self) -> str:
        """What is left at the end: an unfinished character comes out as U+FFFD."""
        return self._stream.flush()


class _ByteStream:
    """Tokens that are runs of bytes: one incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest


class _PieceStream:
    """Tokens that are pieces of text: decoded once no later token can change them.

    A run of byte tokens is settled only by what follows it, since an invalid byte spoils the whole
    run. The first piece is decoded as the beginning of a text, every later one as what follows.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []
        self._at_start = True

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        if self._tokenizer.is_byte_token(token_id):
            return ""
        if len(self._held) <= _MAX_UNSETTLED and self._text().endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self.flush()

    def flush(self) -> str:
        text = self._text()
        self._at_start = self._at_start and not self._held
        self._held.clear()
        return text

    def _text(self) -> str:
        if self._at_start:
            return self._tokenizer.decode(self._held)
        return self._tokenizer.decode_after(self._held)


def check_encodable(text: str, what: str) -> None:
    """Raise InvalidRequest, naming `what`, for a text with lone surrogates."""
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{what} holds a lone surrogate {text[error.start]!r} at character {error.start}, "
            "which is no text; replace it, for example by U+FFFD"
        ) from error


def _templates(source: Any) -> list[str]:
    """The chat templates, each with its name before it; nothing where there is none."""
    template = getattr(source, "chat_template", None)
    if template is None:
        return []
    named = template if isinstance(template, dict) else {"": template}
    return [part for name in sorted(named) for part in (name, named[name])]


def _digest(parts: list[str]) -> str:
    """Sha256 of the parts, each after its length, so that no two lists run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


def _control_tokens(added: list[dict[str, Any]], template: str) -> Iterator[ControlToken]:
    for token in added:
        text = token["content"]
        markup = text[:1] in ("<", "[") and not any(map(str.isspace, text)) and text in template
        if text and (token["special"] or markup or text in REPLY_MARKUP):
            yield ControlToken(
                text, token["id"], token["special"], token["lstrip"], token["rstrip"]
            )


def _plain_backends(
    definition: dict[str, Any], control: Mapping[str, int]
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """Backends blind to control tokens: for text that follows other text, and for a beginning."""
    added = [
        {**token, "special": token["content"] in control} for token in definition["added_tokens"]
    ]
    start = _load({**definition, "added_tokens": added, "post_processor": None})
    pre_tokenizer = _without_first_space(definition["pre_tokenizer"])
    if pre_tokenizer == definition["pre_tokenizer"]:
        return start, start
    inner = {**definition, "added_tokens": added, "pre_tokenizer": pre_tokenizer}
    return _load({**inner, "post_processor": None}), start


def _load(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
    backend.encode_special_tokens = True
    return backend


def _without_first_space(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """The pre-tokenizer without the space that it puts before the first word only."""
    if pre_tokenizer is None:
        return None
    if pre_tokenizer.get("prepend_scheme") == "first":
        return {**pre_tokenizer, "prepend_scheme": "never"}
    if pre_tokenizer["type"] == "Sequence":
        inner = [_without_first_space(part) for part in pre_tokenizer["pretokenizers"]]
        return {**pre_tokenizer, "pretokenizers": inner}
    return pre_tokenizer


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return bool(decoder["decoders"]) and all(map(_is_byte_level, decoder["decoders"]))
    return bool(decoder["type"] == "ByteLevel")


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the rest for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


def _token_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        # An added token outside the byte alphabet is plain text.
        return token.encode("utf-8")
