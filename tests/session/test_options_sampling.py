"""Penalties, probabilities and grammars as a caller of a session sees them."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from testkit.models import idle_counts, micro_runtime

from agentcache.engine.grammar import Matcher
from agentcache.errors import InvalidRequest, UnsupportedOption
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from agentcache.session import Turn

PROMPT = list(range(20, 60))
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SMALL = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": -99, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def shared() -> Iterator[Runtime]:
    """One runtime for tests that leave nothing behind but cache."""
    with micro_runtime() as made:
        yield made


def preempt_after(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, *counts: int) -> None:
    """Take the memory of whoever runs, and what it filed, once so many ids were said in all."""
    stepper, said = runtime.engine._stepper, 0
    original = stepper._say

    def preempt() -> None:
        for request in list(stepper._scheduler.running):
            stepper._suspend(request)
        stepper.cache.clear()

    def say(request: Any, ids: tuple[int, ...], text: str) -> None:
        nonlocal said
        said += len(ids)
        if ids and said in counts:
            runtime.engine.post(preempt)
        original(request, ids, text)

    monkeypatch.setattr(stepper, "_say", say)


def check_logprobs(turn: Turn, num_top: int) -> None:
    """A turn's logprobs are those of its logits."""
    assert turn.logprobs is not None
    assert [note.id for note in turn.logprobs] == turn.ids.tolist()
    if not len(turn.ids):
        return
    assert turn.logits is not None
    rows = turn.logits.log_softmax(-1)
    for note, row in zip(turn.logprobs, rows, strict=True):
        assert note.logprob == pytest.approx(float(row[note.id]), abs=1e-5)
        best = row.topk(num_top)
        assert [i for i, _ in note.top] == best.indices.tolist()
        assert [p for _, p in note.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_are_of_the_model_s_own_distribution(shared: Runtime) -> None:
    """Whatever temperature, cuts, penalties, bias and grammar make of it."""
    for options in (
        {},
        {"temperature": 1.5, "top_k": 4, "min_p": 0.1, "seed": 3},
        {"frequency_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": {7: 100}},
        {"regex": "[ab]{9}"},
    ):
        turn = shared.session().generate(
            PROMPT, max_new_tokens=6, return_logits=True, logprobs=True, top_logprobs=3, **options
        )
        assert len(turn.ids) >= 1
        check_logprobs(turn, 3)


def test_logprobs_are_none_unless_asked_for(shared: Runtime) -> None:
    session = shared.session()
    assert session.generate(PROMPT, max_new_tokens=2).logprobs is None
    assert session.generate(PROMPT, max_new_tokens=0, logprobs=True).logprobs == ()
    turn = session.generate(PROMPT, max_new_tokens=2, logprobs=True)
    assert turn.logits is None
    assert [note.top for note in turn.logprobs or ()] == [(), ()]


@pytest.mark.parametrize("stepwise", [False, True])
@pytest.mark.parametrize("return_logits", [False, True])
def test_recorded_answer_is_judged_as_a_sampled_one(
    shared: Runtime, stepwise: bool, return_logits: bool
) -> None:
    """Over several chunks, where the answer is absorbed as one extension."""
    options = {"logprobs": True, "top_logprobs": 2, "return_logits": return_logits}
    sampled = shared.session(tenant="a").generate(
        PROMPT, max_new_tokens=80, temperature=1.0, seed=1, **options
    )
    shared.clear()
    replayed = shared.session(tenant="b").generate(
        PROMPT, replay=sampled.ids.tolist(), stepwise=stepwise, **options
    )
    assert len(sampled.ids) > 40
    assert sampled.logprobs is not None
    assert replayed.logprobs is not None
    assert [n.id for n in replayed.logprobs] == sampled.ids.tolist()
    want = [n.logprob for n in sampled.logprobs]
    assert [n.logprob for n in replayed.logprobs] == pytest.approx(want, abs=1e-3)
    if return_logits:
        check_logprobs(replayed, 2)


def test_empty_recorded_answer_has_no_logprobs(shared: Runtime) -> None:
    assert shared.session().generate(PROMPT, replay=[], logprobs=True).logprobs == ()


@pytest.mark.parametrize("replay", [None, "whole", "stepwise"])
def test_logprobs_are_whole_after_preemption(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, replay: str | None
) -> None:
    options: dict[str, Any] = {"logprobs": True, "return_logits": True, "top_logprobs": 2}
    free = runtime.session(tenant="a").generate(
        PROMPT, max_new_tokens=50, temperature=1.0, seed=2, **options
    )
    assert len(free.ids) == 50
    options |= {"max_new_tokens": 50, "temperature": 1.0, "seed": 2}
    if replay is not None:
        options |= {"replay": free.ids.tolist(), "stepwise": replay == "stepwise"}
    preempt_after(runtime, monkeypatch, 5, 17, 50, 55, 67, 100)  # in the first call and the second
    for logits in (True, False):
        again = runtime.session(tenant=f"b{logits}").generate(
            PROMPT, **{**options, "return_logits": logits}
        )
        assert runtime.stats()["preempted"] > 0
        assert again.ids.tolist() == free.ids.tolist()
        assert again.logprobs is not None
        assert [n.id for n in again.logprobs] == free.ids.tolist()
        want = [n.logprob for n in free.logprobs or ()]
        assert [n.logprob for n in again.logprobs] == pytest.approx(want, abs=1e-3)
        if logits:
            check_logprobs(again, 2)


def test_frequency_penalty_breaks_a_loop_at_temperature_zero(shared: Runtime) -> None:
    def repeats(**options: Any) -> int:
        turn = shared.session().generate(PROMPT, max_new_tokens=30, **options)
        return len(turn.ids) - len(set(turn.ids.tolist()))

    free = repeats(logit_bias={0: -100})
    for option in ("frequency_penalty", "presence_penalty"):
        assert repeats(**{option: -2.0}, logit_bias={0: -100}) > free
    assert repeats(repetition_penalty=1000.0, logit_bias={0: -100}) == 0


def test_repetition_penalty_counts_the_prompt_but_presence_does_not(shared: Runtime) -> None:
    """A prompt of one id that the model is pushed to repeat."""
    likely = 77
    options = {"max_new_tokens": 1, "logit_bias": {likely: 20}}
    free = shared.session().generate([likely] * 5, **options)
    assert free.ids.tolist() == [likely]
    present = shared.session().generate([likely] * 5, **options, presence_penalty=2.0)
    assert present.ids.tolist() == [likely]
    # What the prompt holds is scaled by 1000 before the bias comes: only its sign is left of it.
    logits = shared.session().generate([likely] * 5, max_new_tokens=1, return_logits=True).logits
    assert logits is not None
    own = float(logits[0, likely])
    scaled = own / 1000 if own > 0 else own * 1000
    expected = logits[0].clone()
    expected[likely] = scaled
    turn = shared.session().generate([likely] * 5, max_new_tokens=1, repetition_penalty=1000.0)
    assert turn.ids.tolist() == [int(expected.argmax())]


def test_bias_takes_ids_as_json_has_them(shared: Runtime) -> None:
    for key in (123, "123"):
        turn = shared.session().generate(PROMPT, max_new_tokens=3, logit_bias={key: 100})
        assert turn.ids.tolist() == [123, 123, 123]


def test_penalised_reply_goes_on_after_preemption(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "max_new_tokens": 30,
        "temperature": 1.0,
        "seed": 5,
        "frequency_penalty": 1.5,
        "presence_penalty": -1.0,
        "repetition_penalty": 1.4,
    }
    free = runtime.session(tenant="a").generate(PROMPT, **options)
    preempt_after(runtime, monkeypatch, 4, 15)
    again = runtime.session(tenant="b").generate(PROMPT, **options)
    assert runtime.stats()["preempted"] == 2
    assert again.ids.tolist() == free.ids.tolist()


def test_schema_makes_json_of_a_model_that_knows_none() -> None:
    with Runtime.load("tiny-hybrid") as runtime:
        for seed in range(4):
            turn = runtime.session().chat(
                [user("How many?")],
                json_schema=SMALL,
                max_new_tokens=200,
                temperature=0.0 if seed == 0 else 1.0,
                seed=seed,
            )
            assert turn.finish_reason == "stop"
            value = json.loads(turn.text)
            assert set(value) == {"n"}
            assert -99 <= value["n"] <= 99
            assert json.loads(turn.message["content"]) == value


def test_schema_may_come_as_text(shared: Runtime) -> None:
    turns = [
        shared.session().chat([user("Hi")], json_schema=form, max_new_tokens=60)
        for form in (SMALL, json.dumps(SMALL))
    ]
    assert turns[0].ids.tolist() == turns[1].ids.tolist()
    assert "n" in json.loads(turns[0].text)


def test_reply_cut_by_its_length_is_an_honest_beginning(shared: Runtime) -> None:
    turn = shared.session().chat([user("Hi")], json_schema=SMALL, max_new_tokens=2)
    assert turn.finish_reason == "length"
    assert turn.text.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(turn.text)


def test_session_goes_on_after_a_complete_reply(shared: Runtime) -> None:
    session = shared.session()
    first = session.chat([user("Hi")], regex="abcabc", max_new_tokens=20)
    assert (first.text, first.finish_reason) == ("abcabc", "stop")
    assert shared.end_id not in first.ids  # nothing is computed to hear that it is over
    second = session.chat([user("Go on")], regex="(yes|no)", max_new_tokens=20, verify=True)
    assert second.text in ("yes", "no")
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len(first.ids) - 1
    assert second.verify is not None
    assert second.verify.ok
    assert [m["content"] for m in session.messages] == ["Hi", "abcabc", "Go on", second.text]


def test_forks_with_one_grammar_go_their_own_ways(shared: Runtime) -> None:
    """At the same time, token by token in one batch."""
    source = "(red|green|blue|yellow|black|white)( (one|two|three)){4}"
    trunk = shared.session()
    trunk.chat([user("Hi")], max_new_tokens=2)
    forks = [trunk.fork() for _ in range(4)]
    options = {"regex": source, "max_new_tokens": 40, "temperature": 3.0}
    alone = [
        fork.fork().chat([user("A colour")], **options, seed=n).text for n, fork in enumerate(forks)
    ]
    streams = [
        fork.chat([user("A colour")], **options, seed=n, stream=True)
        for n, fork in enumerate(forks)
    ]
    texts = [stream.turn.text for stream in streams]
    assert texts == alone
    assert len(set(texts)) > 1
    assert all(re.fullmatch(source, text) for text in texts)


def test_rewound_session_begins_its_grammar_anew(shared: Runtime) -> None:
    session = shared.session()
    texts = []
    for _ in range(3):
        texts.append(session.chat([user("Hi")], regex="(ab){4}", max_new_tokens=20).text)
        session.rewind(0)
    assert texts == ["abababab"] * 3


def test_preempted_call_goes_on_where_its_grammar_was(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"regex": "[a-c]{3}-[d-f]{3}-(ä€){3}", "max_new_tokens": 60, "temperature": 2.0}
    free = runtime.session(tenant="a").generate(PROMPT, **options, seed=4)
    assert re.fullmatch(str(options["regex"]), free.text)
    preempt_after(runtime, monkeypatch, 1, 3, 8)
    again = runtime.session(tenant="b").generate(PROMPT, **options, seed=4, verify=True)
    assert runtime.stats()["preempted"] == 3
    assert again.ids.tolist() == free.ids.tolist()
    assert again.text == free.text
    assert again.verify is not None
    assert again.verify.ok


@pytest.mark.parametrize("limit", [1, 4], ids=["after the prompt", "while decoding"])
def test_grammar_that_cannot_go_on_fails_its_call_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    allowed, asked = Matcher.allowed, 0

    def breaks_down(self: Matcher, vocab_size: int) -> torch.Tensor:
        nonlocal asked
        asked += 1
        if asked == limit:
            raise InvalidRequest("the reply's grammar cannot go on: too large")
        return allowed(self, vocab_size)

    monkeypatch.setattr(Matcher, "allowed", breaks_down)
    free = {"max_new_tokens": 40, "logit_bias": {0: -100}}
    want = runtime.session().generate([5, 6, 7], **free)
    runtime.clear()
    before = idle_counts(runtime)
    other = runtime.session().generate([5, 6, 7], **free, stream=True)
    with pytest.raises(InvalidRequest, match="cannot go on"):
        runtime.session().generate(PROMPT, regex="[ab]{30}", max_new_tokens=40)
    assert other.turn.ids.tolist() == want.ids.tolist()
    runtime.clear()
    after = idle_counts(runtime)
    assert (after["leases"], after["running"]) == (before["leases"], before["running"])


def test_characters_of_several_bytes_come_whole(shared: Runtime) -> None:
    """With a grammar, logprobs and a stop string that begins inside a token and ends in another."""
    options = {"regex": "(ä€😀){6}", "logprobs": True, "max_new_tokens": 200}
    whole = shared.session().generate(PROMPT, **options)
    assert whole.text == "ä€😀" * 6
    assert whole.finish_reason == "stop"
    assert len(whole.ids) > len(whole.text)  # so some characters took several tokens
    assert [n.id for n in whole.logprobs or ()] == whole.ids.tolist()

    stream = shared.session().generate(PROMPT, **options, stop=["😀ä€😀ä"], stream=True)
    pieces = [delta.text for delta in stream]
    assert "".join(pieces) == stream.turn.text == "ä€"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert stream.turn.finish_reason == "stop"
    cut = stream.turn.ids.tolist()
    assert cut == whole.ids.tolist()[: len(cut)]
    assert [n.id for n in stream.turn.logprobs or ()] == cut
    assert shared.tokenizer.decode(cut).endswith("😀ä€😀ä")


def test_stop_string_ends_a_grammar_before_it_is_complete(shared: Runtime) -> None:
    session = shared.session()
    turn = session.chat(
        [user("Hi")], regex="(abc){9}", stop="cabca", max_new_tokens=60, logprobs=True
    )
    assert turn.text == "ab"
    assert turn.finish_reason == "stop"
    assert len(turn.logprobs or ()) == len(turn.ids)
    after = session.chat([user("Go on")], max_new_tokens=2, verify=True)
    assert after.verify is not None
    assert after.verify.ok


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"json_schema": {"type": "foo"}}, "json_schema cannot be used: .*foo"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "[]"}, "give an object"),
        ({"json_schema": 5}, "give an object"),
        ({"json_schema": {"const": {1}}}, "json_schema is no JSON"),
        ({"json_schema": {"const": float("nan")}}, "json_schema is no JSON"),
        ({"regex": "a("}, "(?s)regex cannot be used: .*unclosed group"),
        ({"regex": ""}, "at least one character"),
        ({"regex": b"a"}, "at least one character"),
        ({"regex": "a", "json_schema": NUMBER}, "one of them"),
        ({"regex": "a", "replay": [1, 2]}, "replay"),
        ({"json_schema": NUMBER, "replay": "x", "stepwise": True}, "replay"),
        ({"logit_bias": {"x": 1}}, "no token id"),
        ({"logit_bias": {10**6: 1}}, "outside the vocabulary"),
        ({"logit_bias": [1, 2]}, "mapping"),
        ({"min_p": 2}, "min_p"),
        ({"top_logprobs": 3}, "logprobs=True"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
    ids=str,
)
def test_option_that_makes_no_sense_is_refused(
    shared: Runtime, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        shared.session().generate([1, 2, 3], **options)
    assert shared.stats()["leases"] == 0


def test_grammar_without_its_library_is_refused_with_the_remedy(
    make_runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedOption, match=r"agentcache\[grammar\]"):
        runtime.session().generate([1, 2, 3], regex="a")
    assert len(runtime.session().generate([1, 2, 3], max_new_tokens=2).ids) == 2


def test_logprobs_and_grammar_of_many_calls_keep_apart(shared: Runtime) -> None:
    """Calls with options and without in one batch."""
    plain = shared.session().generate(PROMPT, max_new_tokens=12)
    streams = [
        shared.session().generate(PROMPT, max_new_tokens=12, stream=True, **options)
        for options in ({}, {"regex": "[xy]{20}"}, {"logprobs": True}, {"logit_bias": {9: 100}})
    ]
    turns = [stream.turn for stream in streams]
    assert turns[0].ids.tolist() == turns[2].ids.tolist() == plain.ids.tolist()
    assert re.fullmatch("[xy]+", turns[1].text)
    assert np.all(turns[3].ids == 9)
    assert turns[0].logprobs is None
    assert len(turns[2].logprobs or ()) == len(plain.ids)
