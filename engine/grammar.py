"""Replies kept to a JSON schema, a regular expression or a grammar, by llguidance."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from agentcache.errors import InvalidRequest, UnsupportedOption

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from agentcache.engine.tokenizer import Tokenizer

__all__ = ["WHITE_SPACE", "Grammar", "Grammars", "Matcher"]

WHITE_SPACE = r" |\n {0,32}"
"""Between the parts of a JSON text, each time: a space, or a new line with its indentation. Without
an end to it a model may lose itself in white space."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole reply has to be: JSON of a schema, a match of a regular expression, or what a
    grammar in the library's form of Lark allows."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str


class Matcher:
    """How far one reply has come in its grammar. Belongs to one call, so no other can disturb it.

    May be made on one thread and used on another.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self, vocab_size: int) -> torch.Tensor:
        """Which ids may come next, bool [vocab_size]; an end id where the reply may end.

        Raises InvalidRequest where the grammar cannot go on: it has become too large for the
        library's limits, or the vocabulary has no token for what has to follow.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[:vocab_size]
        if self._matcher.is_error() or not bits.any():
            reason = self._matcher.get_error() or "no token of the vocabulary can follow"
            raise InvalidRequest(f"the reply's grammar cannot go on: {reason}; make it simpler")
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits).bool()
        return allowed

    def advance(self, token: int) -> None:
        """One of the allowed ids came."""
        self._matcher.consume_token(token)


class Grammars:
    """Makes matchers for one tokenizer, on any thread.

    The library's form of the vocabulary is built when the first grammar is asked for. No grammar
    lets control tokens into a text: markup of replies (`<tool_call>`) cannot slip into a string.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._end_ids = sorted(end_ids)
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of a grammar.

        Raises UnsupportedOption without llguidance, or for a tokenizer it cannot read;
        InvalidRequest for a grammar that is none, with the library's reason.
        """
        library = _library()
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._build(library)
        made = library.LLMatcher(
            self._vocabulary,
            _definition(library, grammar),
            log_level=0,
            limits=library.LLParserLimits(verbose_errors=False),
        )
        if made.is_error():
            raise InvalidRequest(f"{grammar.kind} cannot be used: {made.get_error().strip()}")
        return Matcher(made)

    def _build(self, library: Any) -> LLTokenizer:
        definition = json.loads(self._tokenizer.source.backend_tokenizer.to_str())
        definition["padding"] = definition["truncation"] = None
        control = self._tokenizer.special_ids
        for token in definition["added_tokens"]:
            token["special"] = token["content"] in control
        try:
            built: LLTokenizer = library.LLTokenizer(
                json.dumps(definition),
                n_vocab=max(self._vocab_size, self._tokenizer.vocab_size),
                eos_token=self._end_ids or None,
            )
        except ValueError as error:
            raise UnsupportedOption(
                f"json_schema and regex cannot be used with this model's tokenizer: {error}"
            ) from error
        return built


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedOption(
            "json_schema and regex need llguidance; pip install 'agentcache[grammar]'"
        ) from error
    return llguidance


def _definition(library: Any, grammar: Grammar) -> str:
    """A grammar in the library's own form."""
    make = library.LLMatcher
    if grammar.kind == "regex":
        return str(make.grammar_from_regex(grammar.source))
    if grammar.kind == "lark":
        return str(make.grammar_from_lark(grammar.source))
    defaults = {"whitespace_pattern": WHITE_SPACE}
    return str(make.grammar_from_json_schema(grammar.source, defaults=defaults))
