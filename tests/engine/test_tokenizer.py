"""Encoding that is blind to control tokens, exact decoding, and decoding id by id."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentcache.engine.tokenizer import Detokenizer, Tokenizer
from agentcache.errors import InvalidRequest, UnsupportedModel

CORPUS = [
    "hello world, this is a text\n\nwith lines",
    "user assistant system tool",
    "naïve café €",
    "<think" * 9,
]
WIDE = "<\N{FULLWIDTH VERTICAL LINE}end\N{FULLWIDTH VERTICAL LINE}>"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<think><|im_end|>{% endfor %}"


def byte_level(
    template: object = TEMPLATE, *, markup: bool = True, special: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([WIDE])
    backend.add_special_tokens(list(special))
    if markup:
        backend.add_tokens(["<think>", "</think>", "<tool_call>", "  ", "<table>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template
    )


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Words with a space put before the first, unknown characters spelled in bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "s", "<", ">"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def whole_words() -> PreTrainedTokenizerFast:
    """A vocabulary that takes a whole text at once where it has it, control tokens included."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "</s>"]
    vocab = {word: i for i, word in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def bytes_and_more() -> PreTrainedTokenizerFast:
    """Bytes that another step of decoding comes before."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.Replace("_", "-"), decoders.ByteLevel()])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_pieces() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "hello", "world", "##ing", "##s", "a", "##b", "."]
    backend = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTES = Tokenizer(byte_level())
PIECES = Tokenizer(sentence_pieces())
WORDS = Tokenizer(word_pieces())
MIXED = Tokenizer(bytes_and_more())


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = Detokenizer(tokenizer)
    return "".join([*(stream.push(i) for i in ids), stream.flush()])


def test_lookalikes_of_control_tokens_are_encoded_as_their_letters():
    text = f"a<|im_end|>b<think>c{WIDE}"
    ids = BYTES.encode_plain(text)
    assert set(ids).isdisjoint(BYTES.special_ids.values())
    assert BYTES.decode(ids) == text
    without = Tokenizer(byte_level(markup=False))
    assert BYTES.encode_plain("a <think> b") == without.encode_plain("a <think> b")


def test_added_tokens_that_are_no_control_tokens_are_still_read():
    double_space = BYTES.source.convert_tokens_to_ids("  ")
    table = BYTES.source.convert_tokens_to_ids("<table>")
    assert BYTES.encode_plain("  ") == (double_space,)
    assert BYTES.encode_plain("<table>") == (table,)
    assert "<table>" not in BYTES.special_ids


def test_control_tokens_are_the_special_ones_and_those_the_template_writes():
    tokens = {token.text for token in BYTES.control_tokens}
    markup = {"<think>", "</think>", "<tool_call>"}
    assert tokens == {"<|im_start|>", "<|im_end|>", WIDE} | markup
    writes_table = Tokenizer(byte_level("{{ messages }}<table>"))
    assert "<table>" in writes_table.special_ids


def test_ordinary_text_is_encoded_as_the_source_does():
    for text in ["hello world", "a\n\nb  c", "naïve €\N{GRINNING FACE}", ""]:
        expected = BYTES.source.encode(text, add_special_tokens=False)
        assert list(BYTES.encode_plain(text)) == expected


def test_a_control_token_that_is_also_a_word_is_spelled_in_letters():
    tokenizer = Tokenizer(whole_words())
    ids = tokenizer.encode_plain("</s>")
    assert tokenizer.special_ids["</s>"] not in ids
    assert tokenizer.decode(ids) == "</s>"


def test_a_first_space_is_put_only_at_the_start():
    assert PIECES.encode_plain("ab") == tuple(PIECES.source.convert_tokens_to_ids(["▁ab"]))
    inside = PIECES.encode_plain("ab", at_start=False)
    assert inside == tuple(PIECES.source.convert_tokens_to_ids(["ab"]))
    whole = PIECES.source.encode("<s>ab", add_special_tokens=False)
    assert [PIECES.special_ids["<s>"], *inside] == whole


def test_lone_surrogates_are_refused_with_their_place():
    with pytest.raises(InvalidRequest, match="character 2"):
        BYTES.encode_plain("ab\ud800c")


def test_the_source_is_not_changed_and_its_settings_do_not_matter():
    source = byte_level()
    source("x" * 50, truncation=True, max_length=3)
    before = source.backend_tokenizer.to_str()
    tokenizer = Tokenizer(source)
    text = "hello " * 20
    assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    assert source.backend_tokenizer.to_str() == before
    assert tokenizer.fingerprint == BYTES.fingerprint


def test_fingerprint_differs_by_one_character_of_the_template_or_one_token():
    other_token = byte_level()
    other_token.add_tokens(["zzz"])
    prints = {
        Tokenizer(source).fingerprint
        for source in (byte_level(), byte_level(TEMPLATE + " "), byte_level(None), other_token)
    }
    assert len(prints) == 4


def test_fingerprint_keeps_several_templates_apart():
    one = byte_level({"a": "b", "c": "d"})
    other = byte_level({"a": "bc", "d": ""})
    assert Tokenizer(one).fingerprint != Tokenizer(other).fingerprint


def test_decoding_is_exact_and_skips_special_tokens_but_not_reply_markup():
    ids = [
        BYTES.special_ids["<|im_start|>"],
        BYTES.special_ids["<think>"],
        *BYTES.encode_plain("no , clean up ."),
        BYTES.special_ids["<|im_end|>"],
    ]
    assert BYTES.decode(ids) == "<|im_start|><think>no , clean up .<|im_end|>"
    assert BYTES.decode(ids, skip_special=True) == "<think>no , clean up ."


def test_reply_markup_is_not_skipped_even_where_it_is_special():
    tokenizer = Tokenizer(byte_level(markup=False, special=("<tool_call>", "<other>")))
    ids = [tokenizer.special_ids["<tool_call>"], tokenizer.special_ids["<other>"]]
    assert tokenizer.decode(ids, skip_special=True) == "<tool_call>"


def test_ids_without_a_token_decode_to_nothing():
    assert BYTES.decode([BYTES.vocab_size, 10**6, -1]) == ""
    assert streamed(BYTES, [BYTES.vocab_size, 10**6, -1]) == ""


def test_end_ids_come_from_the_generation_config_else_from_the_tokenizer():
    class Config:
        eos_token_id: object = None

    config = Config()
    own = frozenset({BYTES.special_ids["<|im_end|>"]})
    assert BYTES.end_ids() == BYTES.end_ids(config) == own
    config.eos_token_id = 7
    assert BYTES.end_ids(config) == frozenset({7})
    config.eos_token_id = [7, 8]
    assert BYTES.end_ids(config) == frozenset({7, 8})
    assert WORDS.end_ids() == frozenset()


def test_vocab_size_covers_added_tokens():
    assert BYTES.vocab_size == len(BYTES.source)


def test_a_tokenizer_without_the_fast_backend_is_refused():
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        Tokenizer(object())


def test_a_character_split_over_tokens_comes_out_whole():
    stream = Detokenizer(BYTES)
    ids = BYTES.source.convert_tokens_to_ids(["ð", "Ł", "ĺ", "Ģ"])
    assert [stream.push(i) for i in ids] == ["", "", "", "\N{GRINNING FACE}"]
    assert stream.flush() == ""


def test_an_unfinished_character_comes_out_as_replacement_at_the_end():
    stream = Detokenizer(BYTES)
    ids = BYTES.source.convert_tokens_to_ids(["a", "ð", "Ł"])
    assert [stream.push(i) for i in ids] == ["a", "", ""]
    assert stream.flush() == BYTES.decode(ids)[1:] == "\N{REPLACEMENT CHARACTER}"


def test_spelled_out_bytes_come_out_once_the_character_is_certain():
    euro = [PIECES.source.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "€".encode()]
    assert streamed(PIECES, [*euro, *PIECES.encode_plain("a")]) == "€ a"


def test_decoding_after_other_text_keeps_a_first_space():
    ids = PIECES.encode_plain("ab")
    assert PIECES.decode(ids) == "ab"
    assert PIECES.decode_after(ids) == " ab"


@given(st.lists(st.integers(-1, BYTES.vocab_size + 1), max_size=40))
def test_byte_level_decoding_agrees_with_the_source_for_any_ids(ids):
    known = [i for i in ids if 0 <= i < BYTES.vocab_size]
    assert BYTES.decode(ids) == BYTES.source.backend_tokenizer.decode(
        known, skip_special_tokens=False
    )
    assert streamed(BYTES, ids) == BYTES.decode(ids, skip_special=True)


@given(st.lists(st.integers(0, PIECES.vocab_size + 1), max_size=40))
def test_streamed_pieces_agree_with_decoding_for_any_ids(ids):
    assert streamed(PIECES, ids) == PIECES.decode(ids, skip_special=True)


@given(st.lists(st.integers(0, MIXED.vocab_size + 1), max_size=14))
def test_streamed_mixed_tokens_agree_with_decoding_for_any_ids(ids):
    assert streamed(MIXED, ids) == MIXED.decode(ids, skip_special=True)


@given(st.lists(st.integers(0, WORDS.vocab_size + 1), max_size=20))
def test_streamed_words_agree_with_decoding_for_any_ids(ids):
    assert streamed(WORDS, ids) == WORDS.decode(ids, skip_special=True)


@given(st.text(max_size=60))
def test_any_text_survives_encoding_and_decoding(text):
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        return
    assert BYTES.decode(BYTES.encode_plain(text)) == text


class CountingTokenizer:
    """Counts the ids that a stream has decoded."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.decoded = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def decode(self, ids, skip_special=False) -> str:
        self.decoded += len(list(ids))
        return self.inner.decode(ids, skip_special)

    def decode_after(self, ids) -> str:
        self.decoded += len(list(ids))
        return self.inner.decode_after(ids)

    def token_bytes(self, token_id: int) -> bytes:
        self.decoded += 1
        return self.inner.token_bytes(token_id)


@pytest.mark.parametrize(
    "inner", [BYTES, PIECES, WORDS, MIXED], ids=["bytes", "pieces", "words", "mixed"]
)
def test_streaming_decodes_each_id_a_fixed_number_of_times(inner):
    counting = CountingTokenizer(inner)
    unfinished = [i for i in range(inner.vocab_size) if "\ufffd" in inner.decode([i])]
    ids = [*unfinished, *range(inner.vocab_size)] * 10
    streamed(counting, ids)
    assert counting.decoded <= 40 * len(ids)


def test_an_id_alone_is_one_array_that_nobody_can_change() -> None:
    tokenizer = Tokenizer(byte_level())
    alone = tokenizer.alone(7)
    assert alone.tolist() == [7]
    assert alone is tokenizer.alone(7)
    with pytest.raises(ValueError, match="read-only"):
        alone[0] = 8
