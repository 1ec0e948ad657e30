"""Replies that a stop string cut down: the sampled ids up to the cut, what is left encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from testkit.models import tokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentcache.engine.chat import ChatFormat
from agentcache.engine.tokenizer import Detokenizer, Tokenizer
from agentcache.session.prompts import PromptBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.types import IntArray


def spelled_in_bytes() -> Any:
    """Words with a space put before the first, unknown characters spelled in bytes."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "\u00e9"]
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


TOKENIZERS = {"bytes": Tokenizer(tokenizer()), "pieces": Tokenizer(spelled_in_bytes())}
TEXTS = st.text(alphabet="ab \u00e9\U0001f989<", max_size=9)


def cut(inner: Tokenizer, ids: list[int], text: str) -> IntArray:
    builder = PromptBuilder(ChatFormat(inner), inner, inner.vocab_size)
    return builder.cut_ids(np.array(ids, np.int32), text)


def kept_len(inner: Tokenizer, ids: list[int], text: str) -> int:
    """By the definition: the most ids whose whole text begins the text, character by character."""
    reader, said, kept = Detokenizer(inner), "", 0
    for count, token in enumerate(ids, start=1):
        said += reader.push(token)
        if not text.startswith(said):
            break
        if said == inner.decode(ids[:count], skip_special=True):
            kept = count
    return kept


@pytest.mark.parametrize("name", TOKENIZERS)
@given(TEXTS, st.data())
def test_a_reply_keeps_its_ids_as_far_as_their_text_is_whole(name, text, data):
    inner = TOKENIZERS[name]
    ids = list(inner.encode_plain(text, at_start=False))
    some = st.integers(0, inner.vocab_size - 1)
    ids += data.draw(st.lists(st.one_of(some, st.sampled_from(ids or [0])), max_size=6))
    whole = inner.decode(ids, skip_special=True)
    said = whole[: data.draw(st.integers(0, len(whole)))]
    kept = kept_len(inner, ids, said)
    found = cut(inner, ids, said)
    left = said[len(inner.decode(ids[:kept], skip_special=True)) :]
    rest = ChatFormat(inner).encode_reply(left)
    assert found.tolist() == [*ids[:kept], *rest.tolist()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["ab ", "\U0001f989", "a\u00e9\U0001f989b "])
def test_a_cut_decodes_each_id_a_fixed_number_of_times(name, text, monkeypatch):
    inner, decoded = TOKENIZERS[name], [0]

    def counted(method: Callable[..., str]) -> Callable[..., str]:
        def count(self: Tokenizer, ids: Any, **how: Any) -> str:
            decoded[0] += len(ids)
            return method(self, ids, **how)

        return count

    for method in ("decode", "decode_after"):
        monkeypatch.setattr(Tokenizer, method, counted(getattr(Tokenizer, method)))
    ids = list(inner.encode_plain(text * 300, at_start=False))
    said = inner.decode(ids)[:-1]
    decoded[0] = 0
    found = cut(inner, ids, said)
    assert decoded[0] <= 10 * len(ids)
    assert inner.decode(found.tolist()) == said
