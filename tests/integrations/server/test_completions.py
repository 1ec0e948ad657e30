"""`/v1/completions` as it comes: the pieces are the whole text, each part of it once."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("aiohttp")
from agentcache.engine.stopping import StopStrings
from agentcache.engine.tokenizer import Tokenizer
from agentcache.integrations.server.completions import RawText

MODEL = "tiny-hybrid"
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS += ["\u2581", "a", "b", "\u2581a", "\u2581b", "END"]
ID = {word: id for id, word in enumerate(WORDS)}
EURO = [ID["<0xE2>"], ID["<0x82>"], ID["<0xAC>"]]


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """Words with a space before each, which the first of a text loses."""
    merges = [("\u2581", "a"), ("\u2581", "b")]
    model = models.BPE(ID, merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


@pytest.mark.parametrize(
    ("ids", "stops"),
    [
        ([ID["\u2581a"], ID["\u2581b"], ID["a"], ID["END"]], ()),
        ([ID["\u2581a"], ID["\u2581b"], *EURO, ID["\u2581a"]], ()),
        ([*EURO], ()),
        ([ID["\u2581a"], ID["\u2581b"], ID["b"], ID["\u2581a"]], ("bb",)),
        ([ID["\u2581a"], ID["\u2581b"], ID["a"], ID["\u2581b"]], ("bx", "b a b c")),
        ([ID["\u2581a"], *EURO, ID["\u2581b"], ID["\u2581a"]], ("\u20ac b",)),
    ],
    ids=["words", "bytes between", "bytes", "cut", "never cut", "cut after bytes"],
)
def test_pieces_of_words_add_up_to_the_text(pieces, ids, stops):
    end = ID["END"]
    decoded = pieces.decode([id for id in ids if id != end])
    before, was_cut = StopStrings(stops).push(decoded)
    whole = before if was_cut else decoded

    text = RawText(pieces, stops, end)
    said = [text.push([id]) for id in ids]

    assert "".join(said) == whole[: len("".join(said))]
    assert "".join(said) + text.rest(whole) == whole
    assert any(said) or len(ids) == len(EURO)


@pytest.mark.parametrize("stop", [None, "cut"])
def test_a_stream_says_what_the_whole_answer_says(served_here, stop):
    body = {"model": MODEL, "prompt": "Count: one, two,", "max_tokens": 24}
    plain = served_here.post("/v1/completions", body).json()["choices"][0]["text"]
    if stop is not None:
        body["stop"] = plain[len(plain) // 2 :][:3]
        plain = served_here.post("/v1/completions", body).json()["choices"][0]["text"]

    answer = served_here.post("/v1/completions", {**body, "stream": True})
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]

    assert "".join(texts) == plain
    assert events[-1] == "[DONE]"
