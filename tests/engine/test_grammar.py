"""Matchers: what may come next, on the embedded tokenizer and on odd ones."""

from __future__ import annotations

import json
import random
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch
from testkit.helpers import ids
from testkit.models import tokenizer
from transformers import PreTrainedTokenizerFast

from agentcache.engine.grammar import Grammar, Grammars, Matcher
from agentcache.engine.sampling import Sampler, SamplingParams
from agentcache.engine.tokenizer import Tokenizer
from agentcache.errors import InvalidRequest, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Iterator

END = 0
SPARE = 40
"""Rows of logits beyond the tokenizer's vocabulary, as padded embeddings have them."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def text_of() -> Tokenizer:
    return Tokenizer(tokenizer())


@pytest.fixture(scope="module")
def grammars(text_of: Tokenizer) -> Grammars:
    return Grammars(text_of, frozenset({END}), text_of.vocab_size + SPARE)


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def regex(source: str) -> Grammar:
    return Grammar("regex", source)


def allowed(matcher: Matcher, text_of: Tokenizer) -> list[int]:
    mask = matcher.allowed(text_of.vocab_size + SPARE)
    assert mask.dtype == torch.bool
    assert mask.shape == (text_of.vocab_size + SPARE,)
    return mask.nonzero()[:, 0].tolist()


def walk(matcher: Matcher, text_of: Tokenizer, seed: int) -> Iterator[int]:
    """A reply that takes any allowed id, however unlikely; without the end id."""
    choose = random.Random(seed)
    for _ in range(400):
        token = choose.choice(allowed(matcher, text_of))
        matcher.advance(token)
        if token == END:
            return
        yield token
        if matcher.is_complete:
            return
    raise AssertionError("a bounded grammar did not end")


@pytest.mark.parametrize("seed", range(6))
def test_any_way_through_a_schema_is_json_of_it(
    grammars: Grammars, text_of: Tokenizer, seed: int
) -> None:
    text = text_of.decode(walk(grammars.matcher(schema(PERSON)), text_of, seed))
    value = json.loads(text)
    assert set(value) == {"name", "age", "tags"}
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"a", "b"}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("source", [r"[ä€😀]{3,5}", r"\d{4}-\d{2}", "(yes|no)( please){0,2}"])
def test_any_way_through_a_regex_matches_it(
    grammars: Grammars, text_of: Tokenizer, source: str, seed: int
) -> None:
    text = text_of.decode(walk(grammars.matcher(regex(source)), text_of, seed))
    assert re.fullmatch(source, text)


def test_end_is_allowed_just_where_the_reply_may_end(
    grammars: Grammars, text_of: Tokenizer
) -> None:
    matcher = grammars.matcher(regex("a(bc)*"))
    (a,), (b,), (c,) = map(text_of.encode_plain, "abc")
    ends = [END in allowed(matcher, text_of)]
    for token in (a, b, c, b, c):
        matcher.advance(token)
        ends.append(END in allowed(matcher, text_of))
    assert ends == [False, True, False, True, False, True]
    assert not matcher.is_complete
    matcher.advance(END)
    assert matcher.is_complete


def test_reply_is_complete_where_nothing_can_follow(grammars: Grammars, text_of: Tokenizer) -> None:
    matcher = grammars.matcher(regex("ab"))
    for token in text_of.encode_plain("a") + text_of.encode_plain("b"):
        assert not matcher.is_complete
        matcher.advance(token)
    assert matcher.is_complete


def test_control_tokens_are_no_text(grammars: Grammars, text_of: Tokenizer) -> None:
    """The markup of tool calls is decoded as text, so a grammar of any text might let it in."""
    free = set(allowed(grammars.matcher(regex(r"(.|\n)*")), text_of))
    assert "<tool_call>" in text_of.special_ids
    assert free & set(text_of.special_ids.values()) == {END}
    assert len(free) > 8000


def test_markup_of_any_form_is_no_text() -> None:
    source = pieces()
    source.add_tokens(["[CALL]"])
    source.chat_template = "{% for m in messages %}[CALL]{{ m['content'] }}{% endfor %}"
    text_of = Tokenizer(source)
    call = text_of.special_ids["[CALL]"]
    matcher = Grammars(text_of, frozenset({2}), text_of.vocab_size).matcher(regex("[A-Z\\[\\]]+"))
    mask = matcher.allowed(text_of.vocab_size)
    assert mask[text_of.encode_plain("[")[0]]
    assert not mask[call]


def test_rows_beyond_the_vocabulary_never_come(grammars: Grammars, text_of: Tokenizer) -> None:
    free = allowed(grammars.matcher(regex(r"(.|\n)*")), text_of)
    assert max(free) < text_of.vocab_size


def test_matchers_of_one_grammar_know_nothing_of_each_other(
    grammars: Grammars, text_of: Tokenizer
) -> None:
    left, right = (grammars.matcher(regex("(aX|bY)")) for _ in range(2))
    before = allowed(right, text_of)
    left.advance(text_of.encode_plain("a")[0])
    assert allowed(right, text_of) == before
    right.advance(text_of.encode_plain("b")[0])
    assert text_of.decode(allowed(left, text_of)) == "X"
    assert text_of.decode(allowed(right, text_of)) == "Y"


def test_white_space_between_the_parts_has_an_end(grammars: Grammars, text_of: Tokenizer) -> None:
    matcher = grammars.matcher(schema({"type": "object", "properties": {"n": {"type": "null"}}}))
    matcher.advance(text_of.encode_plain("{")[0])
    spaces = 0
    while white := [t for t in allowed(matcher, text_of) if text_of.decode([t]).isspace()]:
        token = max(white, key=lambda t: len(text_of.decode([t])))
        spaces += len(text_of.decode([token]))
        assert spaces <= 33
        matcher.advance(token)
    assert spaces > 1


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (schema({"type": "foo"}), "json_schema cannot be used: .*foo"),
        (schema({"type": "object", "properties": 5}), "properties must be an object"),
        (schema({"$ref": "http://localhost/other.json"}), "localhost/other.json"),
        (schema({"enum": []}), "Unsatisfiable"),
        (schema({"not": {"type": "integer"}}), 'Unimplemented keys: \\["not"\\]'),
        (regex("a("), "regex cannot be used: .*unclosed group"),
        (regex("(?=a)b"), "look-ahead"),
    ],
    ids=lambda value: value.source if isinstance(value, Grammar) else "",
)
def test_grammar_that_is_none_is_refused_in_the_library_s_words(
    grammars: Grammars, grammar: Grammar, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"(?s){words}"):
        grammars.matcher(grammar)


def test_matcher_that_cannot_go_on_says_so(grammars: Grammars, text_of: Tokenizer) -> None:
    matcher = grammars.matcher(regex("abc"))
    matcher.advance(text_of.encode_plain("z")[0])
    assert not matcher.is_complete
    with pytest.raises(InvalidRequest, match="grammar cannot go on"):
        allowed(matcher, text_of)


def test_missing_library_is_named_with_its_remedy(
    text_of: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = Grammars(text_of, frozenset({END}), text_of.vocab_size)
    with pytest.raises(UnsupportedOption, match=r"pip install 'agentcache\[grammar\]'"):
        fresh.matcher(regex("a"))


def words_only() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, from which no text can be spelled byte by byte."""
    model = tokenizers.models.WordLevel({"[UNK]": 0, "yes": 1, "no": 2}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_tokenizer_that_the_library_cannot_read_is_refused() -> None:
    grammars = Grammars(Tokenizer(words_only()), frozenset(), 3)
    with pytest.raises(UnsupportedOption, match="this model's tokenizer"):
        grammars.matcher(regex("yes"))


def pieces() -> PreTrainedTokenizerFast:
    """A tokenizer of pieces, with bytes for what it does not know and a mark for spaces."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for piece in ("▁", "a", "b", "▁a", "ab", "▁ab"):
        vocab[piece] = len(vocab)
    model = tokenizers.models.BPE(vocab, [("a", "b"), ("▁", "a"), ("▁", "ab")], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def test_pieces_and_single_bytes_spell_a_match_too() -> None:
    text_of = Tokenizer(pieces())
    grammars = Grammars(text_of, frozenset({2}), text_of.vocab_size)
    for seed in range(5):
        matcher, out, choose = grammars.matcher(regex("(ab)? ab é{2}")), [], random.Random(seed)
        while not matcher.is_complete:
            mask = matcher.allowed(text_of.vocab_size)
            out.append(choose.choice(mask.nonzero()[:, 0].tolist()))
            matcher.advance(out[-1])
        assert re.fullmatch("(ab)? ab é{2}", text_of.decode_after(out))


def test_every_end_id_is_allowed_where_the_reply_may_end(text_of: Tokenizer) -> None:
    other = text_of.special_ids["<|pad|>"]
    grammars = Grammars(text_of, frozenset({END, other}), text_of.vocab_size)
    matcher = grammars.matcher(regex("a*"))
    assert {END, other} <= set(allowed(matcher, text_of)[:10])
    matcher.advance(other)
    assert matcher.is_complete


def test_sampler_keeps_to_the_grammar_under_bias_and_temperature(
    grammars: Grammars, text_of: Tokenizer
) -> None:
    """A bias of 100 towards a forbidden id, which the model likes best as well."""
    forbidden = text_of.encode_plain("z")[0]
    vocab = text_of.vocab_size + SPARE
    logits = torch.zeros(vocab)
    logits[forbidden] = 50.0
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, logit_bias=((forbidden, 100),), top_k=3)
        one = Sampler(
            params,
            0,
            prompt=ids(1, 2),
            vocab_size=vocab,
            matcher=grammars.matcher(regex("[abc]{8}")),
        )
        out: list[int] = []
        while not one.is_complete:
            out.append(one.sample(logits))
        assert re.fullmatch("[abc]{8}", text_of.decode(out))
