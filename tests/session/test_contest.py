"""A runtime under pressure tells the contest of its orders what sessions do; one at ease does not
pay for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from testkit.models import micro_config, tokenizer

from agentcache.config import CacheConfig
from agentcache.engine.tiny_hybrid import build
from agentcache.runtime import Runtime


def runtime_of(**settings: Any) -> Runtime:
    return Runtime(build(micro_config()), tokenizer(), cache=CacheConfig(**settings))


def test_no_shadow_is_computed_before_something_has_to_leave() -> None:
    with runtime_of(budget="64MiB") as runtime:
        runtime.session("at-ease").generate([5, 6, 7, 8, 9], max_new_tokens=2)
        shadows = runtime._shadows
        assert shadows is not None
        assert shadows._thread is None
    assert shadows.seconds == 0


def test_under_pressure_shadows_hear_of_turns_announcements_and_ends() -> None:
    rng = np.random.default_rng(3)
    with runtime_of(budget="1MiB") as runtime:
        shadows = runtime._shadows
        assert shadows is not None
        staying = runtime.session("staying")
        staying.generate(rng.integers(5, 90, 60).tolist(), max_new_tokens=2)
        while not runtime.stats()["evictions"]:
            with runtime.session() as passing:
                passing.generate(rng.integers(5, 90, 200).tolist(), max_new_tokens=2)
        staying.generate(rng.integers(5, 90, 60).tolist(), max_new_tokens=2)
        staying.idle(expect="30s")
        runtime.on_engine(lambda: None)
        thread = shadows._thread
        assert thread is not None
    assert not thread.is_alive()
    assert shadows.seconds > 0
    for shadow in shadows._caches:
        [(name, tip)] = shadow._handles._tips.items()
        assert name == "staying", "the others are over"
        node = tip.ref.frontier.node
        assert node.due is not None
        assert 25 < node.due - tip.ref.at < 35


def test_other_policies_have_no_shadows() -> None:
    with runtime_of(budget="64MiB", policy="session-lru") as runtime:
        assert runtime._shadows is None
