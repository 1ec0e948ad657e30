"""exact=True: the same logits to the last bit, whatever the cache held and wherever it lay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from testkit.helpers import check
from testkit.models import tokenizer

from agentcache.config import CacheConfig
from agentcache.engine.families.tiny import build
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from agentcache.session import Turn

CHUNK = 16
MODELS = ["granitemoehybrid", "llama", "gemma3", "jamba"]


def runtime_on(name: str, **settings: Any) -> Runtime:
    config = CacheConfig(**{"budget": "8MiB", "page_size": 4, "prefill_chunk": CHUNK, **settings})
    return Runtime(build(name), tokenizer(), cache=config, poison=True)


def ids(seed: int, count: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, 250, count).tolist()
    return drawn


def say(runtime: Runtime, prompt: list[int], **options: Any) -> Turn:
    settings = {"exact": True, "return_logits": True, **options}
    if "replay" not in options:
        settings = {"max_new_tokens": 6, **settings}
    turn = runtime.session().generate(prompt, **settings)
    assert turn.logits is not None
    return turn


PROMPT = ids(0, 75)


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    given: str = request.param
    return given


def cold(name: str, prompt: list[int], **options: Any) -> Turn:
    with runtime_on(name) as fresh:
        return say(fresh, prompt, **options)


def test_logits_are_equal_to_the_last_bit_for_every_length_of_a_hit(name: str) -> None:
    wanted = cold(name, PROMPT)
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, 4 * CHUNK, 70, 74):
        with runtime_on(name) as runtime:
            say(runtime, ids(9, 40))  # so that pages and rows lie elsewhere
            say(runtime, [*PROMPT[:length], 251])
            turn = say(runtime, PROMPT)
            assert turn.usage.cached_tokens == length // CHUNK * CHUNK
            assert turn.ids.tolist() == wanted.ids.tolist()
            assert torch.equal(turn.logits, wanted.logits), length
            check(runtime.cache)


def test_next_turn_is_as_if_its_whole_prompt_were_new(name: str) -> None:
    with runtime_on(name) as runtime:
        session = runtime.session()
        first = session.generate(PROMPT, max_new_tokens=9, exact=True)
        longer = [*PROMPT, *first.ids.tolist(), *ids(1, 30)]
        turn = session.generate(longer, max_new_tokens=5, exact=True, return_logits=True)
        assert turn.usage.cached_tokens == len(PROMPT) // CHUNK * CHUNK
    wanted = cold(name, longer)
    assert turn.logits is not None
    assert torch.equal(turn.logits, wanted.logits[:5])


def test_others_in_the_same_step_change_nothing(name: str) -> None:
    wanted = cold(name, PROMPT)
    with runtime_on(name, max_running=6) as runtime:
        streams = [
            runtime.session().generate(
                prompt, max_new_tokens=6, return_logits=True, stream=True, exact=exact
            )
            for prompt, exact in (
                (ids(2, 33), False),
                (PROMPT, True),
                (ids(3, 50), True),
                (PROMPT, False),
            )
        ]
        turns = [stream.turn for stream in streams]
    assert torch.equal(turns[1].logits, wanted.logits)


def test_exact_calls_and_others_share_nothing_even_in_one_session(name: str) -> None:
    wanted = cold(name, [*PROMPT, 5, 6, 7])
    with runtime_on(name) as runtime:
        session = runtime.session()
        session.generate(PROMPT, max_new_tokens=0)
        exact = session.generate(
            [*PROMPT, 5, 6, 7], max_new_tokens=6, exact=True, return_logits=True
        )
        assert exact.usage.cached_tokens == 0
        assert exact.logits is not None
        assert torch.equal(exact.logits, wanted.logits)
        plain = session.generate([*PROMPT, 5, 6, 7, 8], max_new_tokens=2, verify=True)
        assert plain.usage.cached_tokens >= len(PROMPT) - 1
        assert plain.verify is not None
        assert plain.verify.ok
        check(runtime.cache)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_preempted_exact_calls_give_the_same_logits(name: str) -> None:
    prompts = [ids(n, 200) for n in range(3)]
    with runtime_on(name) as roomy:
        wanted = [say(roomy, prompt, max_new_tokens=40) for prompt in prompts]
        used = roomy.stats()["bytes"]["total"]["used"]
    with runtime_on(name, budget=int(0.6 * used), max_running=3) as runtime:
        streams = [
            runtime.session().generate(
                prompt, max_new_tokens=40, exact=True, return_logits=True, stream=True
            )
            for prompt in prompts
        ]
        for stream, right in zip(streams, wanted, strict=True):
            assert torch.equal(stream.turn.logits, right.logits)
        assert runtime.stats()["preempted"] > 0


def test_runtime_can_be_exact_by_default_and_a_call_can_decline() -> None:
    model, config = build("llama"), CacheConfig(budget="8MiB", prefill_chunk=CHUNK)
    with Runtime(model, tokenizer(), cache=config, exact=True) as runtime:
        session = runtime.session()
        session.generate(PROMPT, max_new_tokens=0)
        again = session.generate([*PROMPT, 4], max_new_tokens=0)
        assert again.usage.cached_tokens == len(PROMPT) // CHUNK * CHUNK
        declined = session.generate([*PROMPT, 4, 5], max_new_tokens=0, exact=False)
        assert declined.usage.cached_tokens == 0


def preempt_once(runtime: Runtime, num_outputs: int) -> None:
    """Take the memory of the call that keeps its logits, once it has that many outputs."""
    stepper = runtime.engine._stepper
    step, done = stepper.step, []

    def stepped() -> None:
        step()
        for request in list(stepper._scheduler.running):
            is_due = request.spec.return_logits and request.num_outputs >= num_outputs
            if is_due and request.lease is not None and not done:
                done.append(request)
                stepper._suspend(request)

    stepper.step = stepped  # type: ignore[method-assign]


def test_reply_that_another_prompt_repeats_is_not_taken_from_there(name: str) -> None:
    wanted = cold(name, PROMPT, max_new_tokens=48)
    reply = wanted.ids.tolist()
    later = [*PROMPT, *reply[:38], 9, 9, 9]
    for others in ([*PROMPT, *reply[:40]], [*PROMPT, *reply[:39], *[9] * 100]):
        with runtime_on(name) as runtime:
            runtime.session().generate(others, max_new_tokens=0, exact=True)
            preempt_once(runtime, 43)
            assert torch.equal(say(runtime, PROMPT, max_new_tokens=48).logits, wanted.logits)
            assert runtime.stats()["preempted"] == 1
            assert torch.equal(say(runtime, later).logits, cold(name, later).logits)


def test_recorded_reply_is_absorbed_in_the_same_passes_after_a_preemption(name: str) -> None:
    recorded = {"replay": ids(5, 60)}
    wanted = cold(name, PROMPT, **recorded)
    with runtime_on(name) as runtime:
        preempt_once(runtime, 1)
        assert torch.equal(say(runtime, PROMPT, **recorded).logits, wanted.logits)
        assert runtime.stats()["preempted"] == 1


def test_boundary_where_another_sequence_left_is_not_gone_on_from() -> None:
    """Edges are cut there, and a window may be whole at the cut and nowhere behind it."""
    base, probe = ids(0, 130), [*ids(0, 130)[:80], *ids(3, 60)]

    def wide(**settings: Any) -> Runtime:
        config = CacheConfig(budget="8MiB", page_size=4, prefill_chunk=32)
        return Runtime(
            build("gemma3", sliding_window=200), tokenizer(), cache=config, poison=True, **settings
        )

    with wide() as fresh:
        wanted = say(fresh, probe)
    for num_evicted in range(1, 8):
        with wide() as runtime:
            for prompt in (
                *(base, [*base[:70], *ids(4, 60)], [*base[:50], *ids(5, 80)]),
                *([*base[:70], *ids(6, 1)], [*base[:50], *ids(8, 60)], base, [*base, *ids(11, 80)]),
            ):
                runtime.session().generate(prompt, max_new_tokens=0, exact=True)
            for _ in range(num_evicted):
                runtime.on_engine(runtime.cache.evict_one)
            turn = say(runtime, probe)
            assert turn.usage.cached_tokens % 32 == 0
            assert torch.equal(turn.logits, wanted.logits), num_evicted
