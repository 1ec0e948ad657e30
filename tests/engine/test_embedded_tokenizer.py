"""The embedded tokenizer: every text comes back, and its training reads what it should."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from agentcache.engine import tiny_hybrid
from agentcache.engine.tiny.vocabulary import MARKUP_TOKENS, SPECIAL_TOKENS

FILE = tiny_hybrid._ASSETS / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(FILE))
SCRIPT = Path(__file__).parents[2] / "tools" / "train_tokenizer.py"


@pytest.fixture(scope="module")
def training() -> Any:
    spec = importlib.util.spec_from_file_location("train_tokenizer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@given(text=st.text(max_size=60))
def test_text_comes_back_unchanged(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token_of_its_own() -> None:
    vocab = TOKENIZER.get_vocab()
    assert {vocab[symbol] for symbol in pre_tokenizers.ByteLevel.alphabet()} == set(range(8, 264))


def test_vocabulary_fills_the_embedding_and_the_file_stays_small(training: Any) -> None:
    vocab = TOKENIZER.get_vocab()
    assert sorted(vocab.values()) == list(range(8192))
    listed = (*SPECIAL_TOKENS, *MARKUP_TOKENS)
    assert [vocab[token] for token in listed] == list(range(8))
    assert FILE.stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1234567", ["123", "456", "7"]),
        ("    return self._name", ["ĠĠĠ", "Ġreturn", "Ġself", "._", "name"]),
        ("x = 'a'\n\n  y", ["x", "Ġ=", "Ġ'", "a", "'ĊĊ", "Ġ", "Ġy"]),
    ],
)
def test_text_is_cut_where_a_reader_would(text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in TOKENIZER.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_code_and_logs_take_about_a_token_for_four_characters() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text) / len(TOKENIZER.encode(text).ids) > 3


def test_corpus_is_distinct_strings_in_a_fixed_order(training: Any, tmp_path: Path) -> None:
    long = "a sentence that is long enough to count"
    (tmp_path / "b.txt").write_text("plain text")
    (tmp_path / "a.json").write_text(json.dumps({long + " as a key": ["short", long, {"x": long}]}))
    (tmp_path / "c.jsonl").write_text(f"// a comment\n{json.dumps({'x': long + ' again'})}\n")
    (tmp_path / "d.bin").write_text("not text")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "e.txt").write_text("left out")
    corpus = list(training.iter_corpus([tmp_path]))
    assert corpus == [long, "plain text", long + " again"]


def test_training_twice_gives_the_same_file(training: Any) -> None:
    texts = [f"word{i % 7} other{i % 11} _name.{i}\n    more" for i in range(200)]
    first, second = (training.train(iter(texts)).to_str() for _ in range(2))
    assert first == second
    assert Tokenizer.from_str(first).encode("<think>").ids == [4]
