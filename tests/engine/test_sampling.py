"""How a token is drawn, and what is said about its probability."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from agentcache.engine.sampling import Sampler, SamplingParams, token_logprobs
from agentcache.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB = 40
PROMPT = np.array([3, 5, 5, 8], dtype=np.int32)


def sampler(*, seed: int = 0, prompt: Any = PROMPT, **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), seed, prompt=prompt, vocab_size=VOCAB)


def rows(count: int, seed: int = 0) -> Iterator[torch.Tensor]:
    """Rows of logits of both signs."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(VOCAB, generator=generator) * 2


def drawn(logits: torch.Tensor, **params: Any) -> set[int]:
    """Every id that a few hundred draws give."""
    one = sampler(temperature=1.0, **params)
    return {one.sample(logits) for _ in range(400)}


def flat(*shares: float) -> torch.Tensor:
    """Logits of ids 0, 1, ... with these probabilities up to a factor; no other id can come."""
    logits = torch.full((VOCAB,), float("-inf"))
    logits[: len(shares)] = torch.tensor(shares).log()
    return logits


def test_temperature_zero_takes_the_likeliest() -> None:
    one = sampler()
    for logits in rows(20):
        assert one.sample(logits) == int(logits.argmax())


def test_same_seed_draws_the_same() -> None:
    def draw(seed: int) -> list[int]:
        one = sampler(temperature=1.0, seed=seed)
        return [one.sample(logits) for logits in rows(20)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_min_p_leaves_out_what_is_far_below_the_likeliest() -> None:
    logits = flat(0.4, 0.3, 0.2, 0.05, 0.05)
    assert drawn(logits) == {0, 1, 2, 3, 4}
    assert drawn(logits, min_p=0.2) == {0, 1, 2}
    assert drawn(logits, min_p=0.6) == {0, 1}
    assert drawn(logits, min_p=1) == {0}


def test_min_p_is_a_share_after_temperature() -> None:
    one = sampler(temperature=2.0, min_p=0.5)
    # At temperature 2, a ratio of 0.3 becomes one of 0.55.
    assert {one.sample(flat(1.0, 0.3, 0.2)) for _ in range(400)} == {0, 1}


def test_cuts_hold_together() -> None:
    logits = flat(0.4, 0.3, 0.2, 0.06, 0.04)
    assert drawn(logits, top_k=4, top_p=0.95, min_p=0.1) == {0, 1, 2, 3}
    assert drawn(logits, top_k=4, top_p=0.75, min_p=0.1) == {0, 1, 2}
    assert drawn(logits, top_k=2, top_p=0.95, min_p=0.1) == {0, 1}
    assert drawn(logits, top_k=4, top_p=0.95, min_p=0.9) == {0}


@pytest.mark.parametrize("penalty", [1.7, 0.6])
def test_repetition_penalty_equals_transformers_over_prompt_and_output(penalty: float) -> None:
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    one, seen = sampler(repetition_penalty=penalty), PROMPT.tolist()
    changed = 0
    for logits in rows(100):
        want = int(theirs(torch.tensor([seen]), logits[None])[0].argmax())
        assert one.sample(logits) == want
        changed += want != int(logits.argmax())
        seen.append(want)
    assert changed > 5


@pytest.mark.parametrize(
    ("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (2.0, 2.0), (-2.0, 0.0), (0.0, -0.5)]
)
def test_presence_and_frequency_count_output_alone(presence: float, frequency: float) -> None:
    one = sampler(presence_penalty=presence, frequency_penalty=frequency)
    counts: Counter[int] = Counter()
    changed = 0
    for logits in rows(100):
        scores = [
            float(logit) - frequency * counts[i] - presence * (counts[i] > 0)
            for i, logit in enumerate(logits)
        ]
        want = max(range(VOCAB), key=scores.__getitem__)
        assert one.sample(logits) == want
        changed += want != int(logits.argmax())
        counts[want] += 1
    assert changed > 5


def test_repetition_penalty_scales_before_the_others_are_added() -> None:
    logits = flat(1.0, 1.0)
    logits[3], logits[7] = 4.0, 3.5  # 3 stands in the prompt
    assert sampler(repetition_penalty=2).sample(logits) == 7
    # 4 / 2 + 2 is more than 3.5; (4 + 2) / 2 would not be.
    assert sampler(repetition_penalty=2, logit_bias=((3, 2),)).sample(logits) == 3


def test_bias_moves_a_logit_by_its_amount() -> None:
    logits = torch.zeros(VOCAB)
    logits[1], logits[2] = 5.0, 3.0
    assert sampler(logit_bias=((2, 1.9),)).sample(logits) == 1
    assert sampler(logit_bias=((2, 2.1),)).sample(logits) == 2
    assert sampler(logit_bias=((1, -100),)).sample(logits) == 2
    assert sampler(logit_bias=((39, 100), (2, 1)), temperature=1.0).sample(logits) == 39


def test_penalties_leave_the_logits_alone() -> None:
    one = sampler(
        repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0, logit_bias=((1, 5),)
    )
    for logits in rows(5):
        before = logits.clone()
        one.sample(logits)
        assert torch.equal(logits, before)


def test_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="id 40, outside the vocabulary of 40"):
        sampler(logit_bias=((VOCAB, 1.0),))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"min_p": -0.1}, "min_p is -0.1; it has to be from 0 to 1"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"min_p": True}, "give a number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": -1.5}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it has to be from -2 to 2"),
        ({"presence_penalty": "1"}, "give a number"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"logit_bias": ((1, 100.5),)}, "id 1 is 100.5"),
        ({"logit_bias": ((1, math.nan),)}, "id 1 is nan"),
        ({"logit_bias": ((1, None),)}, "id 1 is None"),
        ({"logit_bias": ((-1, 1.0),)}, "no token id"),
        ({"logit_bias": (("a", 1.0),)}, "no token id"),
        ({"logit_bias": ((True, 1.0),)}, "no token id"),
        ({"logprobs": 5}, "logprobs is 5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; it has to be from 0 to 20"),
        ({"logprobs": True, "top_logprobs": 1.0}, "whole number"),
        ({"top_logprobs": 2}, "without logprobs=True"),
    ],
    ids=str,
)
def test_value_out_of_range_is_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0},
        {"min_p": 1},
        {"presence_penalty": -2},
        {"frequency_penalty": 2},
        {"logit_bias": ((0, -100), (VOCAB - 1, 100))},
        {"logprobs": True, "top_logprobs": 20},
    ],
    ids=str,
)
def test_ends_of_the_ranges_are_allowed(params: dict[str, Any]) -> None:
    assert 0 <= sampler(temperature=1.0, **params).sample(next(rows(1))) < VOCAB


def test_logprobs_are_those_of_the_whole_distribution() -> None:
    logits = torch.stack(list(rows(3)))
    ids = np.array([7, 0, 39], dtype=np.int32)
    notes = token_logprobs(logits, ids, 4)
    for note, row, token in zip(notes, logits.double(), ids.tolist(), strict=True):
        probs = row.exp() / row.exp().sum()
        assert note.id == token
        assert note.logprob == pytest.approx(math.log(probs[token]), abs=1e-5)
        ranked = probs.argsort(descending=True)[:4].tolist()
        assert [i for i, _ in note.top] == ranked
        assert [p for _, p in note.top] == pytest.approx(probs[ranked].log().tolist(), abs=1e-5)


def test_logprobs_name_no_others_unless_asked() -> None:
    (note,) = token_logprobs(torch.zeros(1, VOCAB), np.array([2], dtype=np.int32), 0)
    assert note.top == ()
    assert note.logprob == pytest.approx(-math.log(VOCAB))


def test_more_others_than_the_vocabulary_has_are_all_of_it() -> None:
    (note,) = token_logprobs(torch.zeros(1, 5), np.array([2], dtype=np.int32), 20)
    assert len(note.top) == 5
