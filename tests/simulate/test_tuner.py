"""Marconi's alpha by replay."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from agentcache.policy.base import Costs, Served
from agentcache.policy.cost import PublishedShape
from agentcache.policy.marconi import Marconi
from agentcache.policy.tuning import ALPHAS
from agentcache.simulate.driver import Simulator
from agentcache.simulate.results import Setup
from agentcache.simulate.trace import SimRequest, Trace
from agentcache.simulate.tuner import ReplayTuner, best_alpha, log_trace

if TYPE_CHECKING:
    import pytest

SHAPE = PublishedShape().shape()
SETUP = Setup(policy="marconi", admission="marconi", budget_bytes=900_000_000)


def log_of(num: int, seed: int = 0) -> list[Served]:
    """Long prefixes that come back seldom among short ones that are asked once or twice."""
    rng = np.random.default_rng(seed)
    longs = [rng.integers(0, 9000, 3000).astype(np.int32) for _ in range(2)]
    out = []
    for number in range(num):
        fresh = rng.integers(0, 9000, 300).astype(np.int32)
        tokens = np.concatenate([longs[number // 6 % 2], fresh[:40]]) if number % 6 == 0 else fresh
        out.append(Served(b"", tokens, len(tokens) - 10, 0, (), float(number)))
    return out


def saved(log: list[Served], alpha: float) -> float:
    requests = [SimRequest(None, each.at, each.tokens, each.prompt_len) for each in log]
    trace, policy = Trace("t", "t", tuple(requests)), Marconi(Costs.of(SHAPE), alpha)
    return Simulator(trace, SHAPE, SETUP, policy=policy).run().flops_saved


def test_factor_saves_most_and_of_equals_the_smallest_is_taken() -> None:
    log = log_of(60)
    worth = [saved(log, alpha) for alpha in ALPHAS]
    found = best_alpha(log, SHAPE, SETUP)
    assert found == ALPHAS[int(np.argmax(np.round(worth, 12)))]
    assert found > 0, "recency alone loses the long prefixes"


def test_factor_is_0_where_it_makes_no_difference() -> None:
    assert best_alpha(log_of(3), SHAPE, SETUP) == 0.0


def test_namespaces_share_nothing() -> None:
    tokens = np.arange(500, dtype=np.int32)
    both = [Served(name, tokens, 490, 0, (200,), 3.0) for name in (b"a", b"b", b"a")]
    trace = log_trace(both)
    cached = Simulator(trace, SHAPE, Setup(policy="lru")).run().cached
    assert cached[0] == cached[1] == 0
    assert cached[2] == 201, "of its own kind, up to what was declared"
    assert [request.marks for request in trace.requests] == [(201,)] * 3


def test_search_beside_the_caller_finds_the_same_and_tells_it_once() -> None:
    log = log_of(30)
    there = ReplayTuner(SHAPE, SETUP, in_background=True)
    assert there.result() is None
    there.start(log)
    there.start(log[:1])  # one is running
    deadline = time.monotonic() + 100
    while (found := there.result()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert found == best_alpha(log, SHAPE, SETUP)
    assert there.result() is None


def test_search_that_fails_leaves_the_factor_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    tuner = ReplayTuner(SHAPE, SETUP, in_background=True)
    tuner.start(log_of(3))
    assert tuner._thread is not None
    tuner._thread.join(30)
    assert tuner.result() is None
    assert "alpha stays as it is" in caplog.text


def test_simulated_runs_tune_at_the_same_request_each_time() -> None:
    requests = [SimRequest(None, each.at, each.tokens, each.prompt_len) for each in log_of(120)]
    trace = Trace("t", "t", tuple(requests))
    runs = [Simulator(trace, SHAPE, SETUP).run() for _ in range(2)]
    assert runs[0].cached == runs[1].cached
    fixed = Simulator(trace, SHAPE, SETUP, policy=Marconi(Costs.of(SHAPE), 0.0)).run()
    assert runs[0].flops_saved > fixed.flops_saved
