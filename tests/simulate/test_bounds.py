"""Bounds: what knowledge of the future reaches, and what nothing can pass."""

from __future__ import annotations

import numpy as np
import pytest

from agentcache.simulate.bounds import BOUNDS, Bounds
from agentcache.simulate.driver import Simulator
from agentcache.simulate.future import Future
from agentcache.simulate.generate import agents, trace_a
from agentcache.simulate.relaxed import RelaxedBound
from agentcache.simulate.results import Setup
from agentcache.simulate.runs import need_bytes
from agentcache.simulate.trace import SimRequest, Trace
from agentcache.types import LayerKind, ModelShape


def shape(kv: int = 1, state: int = 8) -> ModelShape:
    layer = LayerKind("attention", num_heads=1, head_dim=1, num_kv_heads=1)
    return ModelShape(1, 1, (layer,), 10**9, token_bytes=kv, checkpoint_bytes=state)


def request(ids: list[int], prompt_len: int, at: float) -> SimRequest:
    return SimRequest(None, at, np.array(ids, np.int32), prompt_len)


def trace(*sequences: tuple[list[int], int]) -> Trace:
    made = [request(ids, length, float(at)) for at, (ids, length) in enumerate(sequences)]
    return Trace("t", "test", tuple(made))


def bound(given: Trace, budget: int, sizes: ModelShape) -> int:
    return RelaxedBound(Future(given.requests), sizes).tokens(budget)


A, B = list(range(10)), list(range(100, 110))
TWICE = trace((A, 9), ([*A, 50], 11))
BETWEEN = trace((A, 9), (B, 9), ([*A, 50], 11), ([*B, 51], 11))


def test_the_bound_keeps_fractions_of_what_fits_in_part():
    assert bound(TWICE, 18, shape()) == 10  # ten tokens and a state
    assert bound(TWICE, 9, shape()) == 5
    assert bound(TWICE, 5, shape(state=0)) == 5
    assert bound(TWICE, 10**6, shape()) == 10


def test_the_bound_counts_memory_at_each_moment():
    # both are held between requests 1 and 2; on average over all gaps there is room for more
    assert bound(BETWEEN, 36, shape()) == 20
    assert bound(BETWEEN, 18, shape()) == 10
    assert bound(BETWEEN, 27, shape()) == 15


def test_a_prompts_last_token_and_answers_nobody_reads_count_for_nothing():
    same = trace((A, 10), (A, 10), (A, 10))

    assert bound(same, 10**6, shape()) == 18
    assert bound(trace((A, 3), (B, 3)), 10**6, shape()) == 0
    assert bound(trace((A, 3)), 10**6, shape()) == 0


def test_the_future_knows_who_reads_what_and_where_prompts_part():
    given = trace((A, 9), ([*A[:6], 70, 71], 7), ([*A[:6], 80, 81], 8), (A[:4], 4))
    future = Future(given.requests)

    assert list(future.readers(0, 4)) == [0, 1, 2, 3]
    assert list(future.readers(0, 6)) == [0, 1, 2]
    assert future.plan(0) == {3, 4, 6}  # the last prompt is over at 4: it goes on from 3
    assert future.plan(2) == {3, 4}
    assert not future.plan(3)


def loop(num: int, rounds: int) -> Trace:
    """So many prompts in turn, again and again: one more than fit is too much for recency."""
    heads = [list(range(100 * n, 100 * n + 10)) for n in range(num)]
    turns = [([*heads[n], 7 + r, 8], 11) for r in range(rounds) for n in range(num)]
    return trace(*turns)


def test_clairvoyance_keeps_what_recency_loses_in_a_loop():
    given = loop(num=4, rounds=6)
    setup = Setup(policy="clairvoyant", budget_bytes=3 * 24, page_size=1, hints=False)
    recency = Simulator(
        given, shape(), Setup(policy="lru", budget_bytes=3 * 24, page_size=1, hints=False)
    ).run()

    known = Bounds(given, shape()).run(setup)

    assert recency.cached_tokens == 0
    assert known.cached_tokens >= 0.5 * bound(given, 3 * 24, shape())


def test_clairvoyant_admission_needs_no_second_occurrence():
    head = list(range(20))
    given = trace(*(([*head, 50 + n, 60 + n], 21) for n in range(3)))
    bounds = Bounds(given, shape())

    def cached(policy: str) -> tuple[int | None, ...]:
        setup = Setup(policy=policy, budget_bytes=1000, page_size=1, hints=False)
        return bounds.run(setup).cached

    assert cached("clairvoyant") == (0, 20, 20)
    assert cached("clairvoyant-evict") == (0, 0, 20)
    assert cached("unlimited") == (0, 0, 20)


def test_part_of_a_trajectory_stays_where_all_of_it_does_not_fit():
    turns = [(list(range(n + 2)), n) for n in range(10, 100, 10)]
    other = ([*range(500, 540)], 40)
    given = trace(*turns, other, (list(range(102)), 100))
    setup = Setup(policy="clairvoyant", budget_bytes=80, page_size=1, hints=False)

    cached = Bounds(given, shape()).run(setup).cached

    assert cached[-1] is not None
    assert cached[-1] > 40  # all of the last turn and its state take a hundred bytes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("state", [0, 8, 40])
def test_no_run_passes_the_bound_and_none_the_clairvoyant_by_much(seed, state):
    random = np.random.default_rng(seed)
    stems = [random.integers(0, 9, int(random.integers(4, 40))).tolist() for _ in range(6)]
    sequences = []
    for _ in range(40):
        stem = stems[int(random.integers(6))][: int(random.integers(3, 40))]
        ids = [*stem, *random.integers(0, 9, int(random.integers(2, 12))).tolist()]
        sequences.append((ids, int(random.integers(len(stem), len(ids)))))
    given, sizes = trace(*sequences), shape(state=state)
    bounds = Bounds(given, sizes)
    for budget in (60, 150, 400):
        limit = bounds.relaxed.tokens(budget)
        rates = {}
        for policy in ("lru", "session-lru", "clairvoyant-evict", "clairvoyant"):
            setup = Setup(policy=policy, budget_bytes=budget, page_size=1, hints=False)
            is_bound = policy in BOUNDS
            run = bounds.run(setup) if is_bound else Simulator(given, sizes, setup).run()
            rates[policy] = run.cached_tokens
            assert run.cached_tokens <= limit
        assert rates["clairvoyant"] >= 0.95 * max(rates.values())


def test_the_bound_of_no_limit_is_all_that_was_ever_seen_before():
    given = agents(seed=2, num_sessions=4, num_turns=4)
    unlimited = Bounds(given, shape()).run(Setup(policy="unlimited"))

    relaxed = RelaxedBound(Future(given.requests), shape())

    assert unlimited.cached_tokens == relaxed.reusable == relaxed.tokens(10**9)


def test_the_bound_is_told_as_no_run():
    given = trace_a(seed=1, scale=0.02)
    budget = need_bytes(given, shape()) // 10
    setup = Setup(policy="bound", budget_bytes=budget, budget_share=0.1)

    row = Bounds(given, shape()).run(setup).to_json()

    assert 0 < row["hit_rate"] < 1
    assert row["requests"] == len(given.requests)
    assert row["evictions"] is row["computed_p50"] is row["peak_bytes"] is None
