"""Recorded answers in the tokens that were sampled for them, and in those of their text."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from testkit.command import agentcache

from agentcache import CacheConfig, Runtime
from agentcache.replay.trace import Call, ReadResult, Trajectory, read_file
from agentcache.replayer import Replayer, ReplayOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agentcache.replay.results import ReplayResult
    from agentcache.types import Usage

BUDGET = "64MiB"
FOREIGN = 10**6
"""An id that no model here has."""


class Traffic:
    """Sampled turns of two sessions: what they used, and how they were exported."""

    def __init__(self, folder: Path) -> None:
        store, out = folder / "runs.db", folder / "traffic.jsonl"
        self.usages: list[Usage] = []
        options = {"max_new_tokens": 40, "temperature": 1.0}
        with Runtime.load("tiny-hybrid", cache=CacheConfig(budget=BUDGET), store=store) as runtime:
            for name in ("one", "two"):
                with runtime.session(name) as session:
                    messages = [{"role": "user", "content": f"Say {name}. " * 20}]
                    for _ in range(3):
                        turn = session.complete(messages, seed=len(self.usages), **options)
                        self.usages.append(turn.usage)
                        messages += [turn.message, {"role": "user", "content": "More."}]
        done = agentcache("sessions", "export", "--all", f"--out={out}", f"--store={store}")
        assert done.status == 0, done.stderr
        self.runs = read_file(out)

    @property
    def prompt_lens(self) -> list[int]:
        return [usage.prompt_tokens for usage in self.usages]

    @property
    def cached_lens(self) -> list[int]:
        return [usage.cached_tokens for usage in self.usages]


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Traffic:
    return Traffic(tmp_path_factory.mktemp("traffic"))


def replayer(runs: list[Trajectory], **options: bool) -> Replayer:
    read = ReadResult(tuple(runs), 1, 0, 0, (), (), ())
    return Replayer("tiny-hybrid", read, ReplayOptions(**options))


def replayed(runs: list[Trajectory], **options: bool) -> ReplayResult:
    return replayer(runs, **options).run(budget=BUDGET)


def with_calls(runs: list[Trajectory], **changes: object) -> list[Trajectory]:
    return [
        replace(run, calls=tuple(replace(call, **changes) for call in run.calls)) for run in runs
    ]


def calls_of(runs: list[Trajectory]) -> Iterator[Call]:
    return (call for run in runs for call in run.calls)


def prompt_lens(result: ReplayResult) -> list[int]:
    return [call.prompt_tokens for call in result.calls]


@pytest.fixture(scope="module")
def by_text(traffic: Traffic) -> list[int]:
    """Prompt lengths where answers are encoded from their text."""
    lens = prompt_lens(replayed(with_calls(traffic.runs, answer_ids=None, fingerprint=None)))
    assert lens != traffic.prompt_lens, "the model spells its answers otherwise than its tokenizer"
    return lens


def test_a_stepwise_replay_of_sampled_traffic_reuses_the_same_tokens_in_every_call(
    traffic: Traffic,
) -> None:
    result = replayed(traffic.runs, stepwise=True)
    assert prompt_lens(result) == traffic.prompt_lens
    assert [call.cached_tokens for call in result.calls] == traffic.cached_lens
    assert result.tokens.hit_rate == sum(traffic.cached_lens) / sum(traffic.prompt_lens) > 0.5


def test_a_whole_replay_has_the_same_prompts_and_reuses_the_last_token_of_replies_too(
    traffic: Traffic,
) -> None:
    result = replayed(traffic.runs)
    assert prompt_lens(result) == traffic.prompt_lens
    more = [
        call.cached_tokens - cached
        for call, cached in zip(result.calls, traffic.cached_lens, strict=True)
    ]
    assert more == [0, 1, 1] * 2


def test_the_need_is_that_of_the_ids_that_are_replayed(traffic: Traffic) -> None:
    for runs in (traffic.runs, with_calls(traffic.runs, answer_ids=None)):
        made = replayer(runs)
        assert made.need_bytes() == made.run(budget=BUDGET).need_bytes


def test_ids_need_no_fingerprint_where_they_say_the_answer(traffic: Traffic) -> None:
    runs = with_calls(traffic.runs, fingerprint=None)
    assert prompt_lens(replayed(runs)) == traffic.prompt_lens


def test_ids_that_say_something_else_give_way_to_the_text(
    traffic: Traffic, by_text: list[int]
) -> None:
    ids = next(calls_of(traffic.runs)).answer_ids
    assert ids is not None
    for fingerprint in (None, "of another model"):
        runs = with_calls(traffic.runs, answer_ids=ids[::-1], fingerprint=fingerprint)
        assert prompt_lens(replayed(runs)) == by_text


def test_ids_of_the_very_model_are_taken_whatever_the_answer_says(traffic: Traffic) -> None:
    runs = with_calls(traffic.runs[:1], answer={"role": "assistant", "content": "Other."})
    first, second, _ = replayed(runs).calls
    ids = runs[0].calls[0].answer_ids
    assert ids is not None
    assert first.output_tokens == len(ids)
    assert second.cached_tokens > first.prompt_tokens


def test_foreign_ids_refuse_the_call_and_the_others_go_on(traffic: Traffic) -> None:
    [first, *rest] = traffic.runs[0].calls
    bad = replace(first, answer_ids=(1, 2, FOREIGN), fingerprint=None)
    for refused in (bad, replace(bad, fingerprint=first.fingerprint)):
        result = replayed([replace(traffic.runs[0], calls=(refused, *rest))])
        [message] = result.rejected
        assert "call 0: answer_ids[2] is 1000000, outside the vocabulary of " in message
        assert "leave answer_ids out" in message
        assert [call.call for call in result.calls] == [1, 2]
        assert result.files.partial == 1


def test_foreign_ids_of_another_model_give_way_to_the_text(
    traffic: Traffic, by_text: list[int]
) -> None:
    runs = with_calls(traffic.runs, answer_ids=(FOREIGN,), fingerprint="of another model")
    result = replayed(runs)
    assert not result.rejected
    assert prompt_lens(result) == by_text
