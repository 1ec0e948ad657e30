"""A simulation reuses, call by call, what a runtime with a real model reuses of the same runs."""

from __future__ import annotations

import json
import random

import pytest

from agentcache.clock import ManualClock
from agentcache.config import CacheConfig
from agentcache.engine.chat import ChatFormat
from agentcache.engine.loader import load_model
from agentcache.engine.tokenizer import Tokenizer
from agentcache.replay.trace import read_paths
from agentcache.replayer import Replayer, ReplayOptions
from agentcache.runtime import Runtime
from agentcache.simulate.driver import Simulator
from agentcache.simulate.read import ChatEncoder, read_traces
from agentcache.simulate.results import Setup

OPEN_AT_ONCE = 3


@pytest.fixture(scope="module")
def loaded():
    return load_model("tiny-hybrid")


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


WORDS = ["read", "the", "file", "and", "say", "which", "line", "fails", "when", "it", "is", "run"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Six agents with one system prompt, each with a history that grows; one edits its history."""
    rng = random.Random(4)
    path = tmp_path_factory.mktemp("runs") / "agents.calls.jsonl"
    system = {"role": "system", "content": words(rng, 120)}
    with path.open("w") as file:
        for agent in range(6):
            messages = [system, {"role": "user", "content": words(rng, rng.randint(20, 60))}]
            for call in range(5):
                if agent == 3 and call == 3:
                    messages[1] = {"role": "user", "content": words(rng, 30)}
                answer = {"role": "assistant", "content": words(rng, rng.randint(5, 40))}
                row = {
                    "trajectory": f"agent-{agent}",
                    "at": 10.0 * agent + call * rng.uniform(1.0, 9.0),
                    "messages": messages,
                    "answer": answer,
                }
                file.write(json.dumps(row) + "\n")
                asks = {"role": "user", "content": words(rng, rng.randint(10, 120))}
                messages = [*messages, answer, asks]
    return path


@pytest.fixture(scope="module")
def trace(runs, loaded):
    tokenizer = Tokenizer(loaded.tokenizer)
    end_ids = tokenizer.end_ids(loaded.model.generation_config)
    encoder = ChatEncoder(
        ChatFormat(tokenizer, end_ids=end_ids), end_id=tokenizer.source.eos_token_id
    )
    [trace] = read_traces(runs, tokens=encoder, concurrency=OPEN_AT_ONCE)
    return trace


def replayed(runs, trace, config: CacheConfig) -> list[int]:
    """Tokens that each call of a replay reuses, with the trace's times on its clock."""
    clock = ManualClock()
    replayer = Replayer(
        "tiny-hybrid", read_paths([runs]), ReplayOptions(concurrency=OPEN_AT_ONCE), clock
    )

    def go_on(done: int, total: int) -> None:
        if done < total:
            clock.advance(max(0.0, trace.requests[done].at - clock.now()))

    result = replayer.run(budget=config.budget, policy=config.policy, progress=go_on)
    assert not result.rejected
    return [call.cached_tokens for call in result.calls]


@pytest.mark.parametrize("policy", ["lru", "session-lru", "auto"])
@pytest.mark.parametrize("budget", ["5MiB", "8MiB"])
def test_each_call_of_a_replay_reuses_as_much_as_in_a_simulation(
    runs, trace, loaded, policy, budget
):
    config = CacheConfig(budget=budget, policy=policy)
    with Runtime(loaded.model, loaded.tokenizer, cache=config) as runtime:
        pools, shape = runtime.cache.pools, runtime.shape
        arena_bytes = pools.pages.num_pages * pools.page_bytes
    setup = Setup(
        policy=policy,
        budget_bytes=arena_bytes,
        page_size=config.page_size,
        chunk_len=config.prefill_chunk,
        charge_running=True,
    )

    simulated = Simulator(trace, shape, setup).run()

    assert simulated.evictions
    assert list(simulated.cached) == replayed(runs, trace, config)
    assert 0 < simulated.hit_rate < 0.9
