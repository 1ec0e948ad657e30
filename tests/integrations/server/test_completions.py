"""`/v1/completions` as it comes: the pieces are the whole text, each part of it once."""

from __future__ import annotations

import json

import pytest

MODEL = "tiny-hybrid"


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
