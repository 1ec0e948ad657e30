"""Sessions on models of every composition: warm is cold, in windows and under pressure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from testkit.helpers import check
from testkit.models import tokenizer

from agentcache.config import CacheConfig
from agentcache.engine.families.tiny import build
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from agentcache.session import Session, Turn

MODELS = {
    "llama": ["full"],
    "gemma3": ["full", "swa"],
    "gemma4_shared": ["full", "swa"],
    "granite_swa": ["full", "swa"],
    "recurrent_gemma": ["swa", "state"],
    "mamba2": ["state"],
    "jamba": ["full", "state"],
    "kimi_linear": ["full", "state"],
    "lfm3": ["full", "swa", "state"],
    "inkling": ["full", "swa", "state"],
    "hymba": ["full", "swa", "state"],
    "deepseek_v4": ["full", "state"],
}
WINDOW = 16


def runtime_on(name: str, **settings: Any) -> Runtime:
    config = CacheConfig(**{"budget": "8MiB", "page_size": 8, "prefill_chunk": 24, **settings})
    return Runtime(build(name), tokenizer(), cache=config, poison=True)


def ids(seed: int, count: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, 250, count).tolist()
    return drawn


def say(session: Session, history: list[int], seed: int, count: int) -> Turn:
    """One verified turn of `count` new tokens, which joins the history with its answer."""
    history += ids(seed, count)
    turn = session.generate(history, max_new_tokens=5, verify=True)
    assert turn.verify is not None
    assert turn.verify.ok, turn.verify.layers
    layers = session._host.cache.pools.kv_layout.specs  # type: ignore[attr-defined]
    assert {f"{spec.layer_idx}.kv" for spec in layers} <= turn.verify.layers.keys()
    history += turn.ids.tolist()
    return turn


@pytest.mark.parametrize("name", MODELS)
def test_turns_forks_and_rewinds_are_as_if_computed_from_nothing(name: str) -> None:
    with runtime_on(name) as runtime:
        assert list(runtime.cache.used_pages()) == MODELS[name]
        history: list[int] = []
        session, ends = runtime.session(), [0]
        for number, count in enumerate((37, 9, 3, 50)):
            turn = say(session, history, number, count)
            assert turn.usage.cached_tokens >= ends[-1] - 1
            ends.append(len(history))
        assert say(session.fork(), history[:], 10, 20).usage.cached_tokens >= ends[-1] - 1
        assert say(session, history[:], 11, 7).usage.cached_tokens >= ends[-1] - 1
        session.rewind(to_turn=2)
        assert say(session, history[: ends[2]], 12, 30).usage.cached_tokens > 0
        check(runtime.cache)
        of_kinds = runtime.stats()["bytes"]
        total = of_kinds.pop("total")
        assert sum(of_kinds[kind]["reserved"] for kind in of_kinds) == total["reserved"]


@pytest.mark.parametrize("name", [name for name, kinds in MODELS.items() if "swa" in kinds])
def test_what_lies_before_the_window_is_given_back(name: str) -> None:
    with runtime_on(name) as runtime:
        say(runtime.session(), [], 0, 500)
        of_a_window = -(-WINDOW // runtime.cache.pools.page_lens["swa"]) + 1
        of_a_chunk = -(-24 // runtime.cache.pools.page_lens["swa"]) + 1
        peaks, _ = runtime.cache.peak_pages()
        assert runtime.cache.used_pages()["swa"] <= 2 * of_a_window, "of two boundaries"
        assert peaks["swa"] <= 3 * of_a_window + 2 * of_a_chunk


@pytest.mark.parametrize("name", ["gemma3", "recurrent_gemma", "mamba2", "jamba", "lfm3"])
def test_sessions_in_turn_under_pressure_stay_exact(name: str) -> None:
    with runtime_on(name) as roomy:
        for number in range(3):
            say(roomy.session(), [], number, 200)
        need = roomy.stats()["bytes"]["total"]["used"]
        rows = roomy.stats()["bytes"]["running"]["reserved"]
    with runtime_on(name, budget=int(0.6 * need) + 2 * rows, max_running=1) as runtime:
        sessions: list[tuple[Session, list[int]]] = [(runtime.session(), []) for _ in range(3)]
        for number in range(9):
            say(*sessions[number % 3], number, 66)
        evicted = runtime.stats()["evictions"]
        assert sum(evicted.values()) > 0
        check(runtime.cache)


def test_need_counts_full_layers_per_token_and_windows_per_checkpoint() -> None:
    """Two layers of each sort, two heads of width 16 for keys and for values, float32."""
    with runtime_on("gemma3") as runtime:
        assert runtime.shape.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
        assert runtime.shape.state_bytes == WINDOW * 2 * 2 * 2 * 16 * 4
