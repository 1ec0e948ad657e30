"""Traces through the cache without a model: what is reused, held, counted and told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from agentcache.errors import ConfigError
from agentcache.policy.base import Policy
from agentcache.policy.eviction import make_policy
from agentcache.simulate.driver import Simulator
from agentcache.simulate.generate import agents
from agentcache.simulate.results import Setup
from agentcache.simulate.runs import need_bytes
from agentcache.simulate.timed import TimedPolicy
from agentcache.simulate.trace import SimRequest, Trace
from agentcache.types import Kind, LayerKind, ModelShape

PAGE = 4
"""Tokens of a page; a token is one byte here, and a state two pages."""


def shape(kv: int = 1, state: int = 8) -> ModelShape:
    layer = LayerKind("attention", num_heads=1, head_dim=1, num_kv_heads=1)
    return ModelShape(1, 1, (layer,), 10**9, token_bytes=kv, checkpoint_bytes=state)


def request(
    ids: list[int], prompt_len: int, session: str | None = None, at: float = 0.0, **more: object
) -> SimRequest:
    return SimRequest(session, at, np.array(ids, np.int32), prompt_len, **more)  # type: ignore[arg-type]


def trace(*requests: SimRequest) -> Trace:
    return Trace("t", "test", requests)


def run(given: Trace, sizes: ModelShape | None = None, **settings: object):
    options = {"policy": "lru", "page_size": PAGE} | settings
    return Simulator(given, sizes or shape(), Setup(**options)).run()  # type: ignore[arg-type]


TURNS = trace(
    request([1, 2, 3, 4, 5], 3, "s", at=0.0),
    request([1, 2, 3, 4, 5, 6, 7, 8], 7, "s", at=1.0),
    request([1, 2, 3, 4, 9, 9, 9], 6, "other", at=2.0),
)


def test_a_turn_goes_on_from_the_end_of_the_one_before_and_not_from_inside_it():
    result = run(TURNS, budget_bytes=1000)

    # the third prompt leaves inside the first turn, where there is KV but no state
    assert result.cached == (0, 5, 0)
    assert result.computed == (3, 2, 6)
    assert result.hit_rate == 5 / 16


def test_a_model_without_states_goes_on_from_any_token():
    assert run(TURNS, shape(state=0), budget_bytes=1000).cached == (0, 5, 4)


def test_a_model_of_states_alone_goes_on_from_checkpoints():
    result = run(TURNS, shape(kv=0), budget_bytes=1000)

    assert result.cached == (0, 5, 0)
    assert result.reused[Kind.STATE.value] == 1
    assert result.reuse(Kind.FULL) == 0


def test_a_shape_that_keeps_nothing_is_refused():
    with pytest.raises(ConfigError, match="nothing to cache"):
        run(TURNS, shape(kv=0, state=0))


def test_a_branch_point_is_served_the_third_time_and_a_mark_the_second():
    head = list(range(1, 11))
    asks = [
        request([*head, 20 + n, 30 + n], 11, str(n), at=float(n), closes=True) for n in range(3)
    ]
    marked = [replace(each, marks=(10,)) for each in asks]

    assert run(trace(*asks)).cached == (0, 0, 10)
    assert run(trace(*marked)).cached == (0, 10, 10)
    assert run(trace(*marked), hints=False).cached == (0, 0, 10)
    assert run(trace(*marked), admission="marconi").cached == (0, 0, 10)


def test_every_block_serves_whole_blocks_and_files_no_end():
    ids = list(range(1, 14))
    given = trace(request(ids, 11, at=0.0), request([*ids, 99], 13, at=1.0))

    result = run(given, admission="every-block:4")

    assert result.cached == (0, 12)
    assert result.filed[Kind.STATE.value] == 3  # at 4, 8 and 12


def test_the_budget_holds_between_requests():
    given = agents(seed=1, num_sessions=4, num_turns=4)
    need = need_bytes(given, shape())
    for budget in (need // 4, need // 2):
        result = run(given, budget_bytes=budget)

        assert 0 < result.peak_bytes <= budget
        assert sum(result.held.values()) * PAGE <= budget
        assert sum(result.evictions.values()) > 0


def test_an_unlimited_cache_evicts_nothing_and_holds_all_that_is_needed():
    given = agents(seed=1, num_sessions=4, num_turns=4)

    result = run(given, budget_bytes=None, admission="marconi")

    assert not result.evictions
    assert result.peak_bytes >= need_bytes(given, shape())
    assert result.peak_bytes <= 1.1 * need_bytes(given, shape(kv=1, state=12))


def test_a_request_that_does_not_fit_is_refused_where_running_ones_count():
    given = trace(request(list(range(40)), 30), request([1, 2, 3, 4], 3, at=1.0))

    result = run(given, budget_bytes=32, charge_running=True)

    assert result.cached == (None, 0)
    assert result.refused == 1
    assert result.hit_rate == 0
    assert run(given, budget_bytes=32).refused == 0


def test_running_requests_push_entries_out_where_they_count():
    first = request(list(range(1, 9)), 6, "a", at=0.0)
    long = request(list(range(100, 116)), 14, "b", at=1.0)
    again = request([*range(1, 9), 50, 51], 9, "a", at=2.0)
    given = trace(first, long, again)

    # 16 bytes of the first turn and 24 of the second fit beside each other
    assert run(given, budget_bytes=40, charge_running=True).cached == (0, 0, 8)
    assert run(given, budget_bytes=36, charge_running=True).cached == (0, 0, 0)


def test_a_closed_session_leaves_before_one_that_goes_on():
    closed = request(list(range(1, 9)), 6, "closed", at=0.0, closes=True)
    open_ = request(list(range(20, 28)), 6, "open", at=1.0)
    new = request(list(range(40, 48)), 6, "new", at=2.0)
    back = request([*range(20, 28), 1], 9, "open", at=3.0)
    known = {"policy": "session-lru", "budget_bytes": 32}

    assert run(trace(closed, open_, new, back), **known).cached[-1] == 8
    touched = request([*range(1, 9), 9], 9, at=1.5)  # the closed one was used last
    assert run(trace(closed, open_, touched, new, back), **known).cached[-1] == 8
    unknown = run(trace(closed, open_, touched, new, back), hints=False, **known)
    assert unknown.cached[-1] == 0


def test_a_fork_goes_on_from_its_parents_tip():
    parent = request([1, 2, 3, 4, 5], 3, "parent", at=0.0)
    child = request([1, 2, 3, 4, 5, 6, 7], 6, "child", at=1.0, parent="parent", closes=True)
    later = request([1, 2, 3, 4, 5, 8, 9], 6, "parent", at=2.0)

    assert run(trace(parent, child, later)).cached == (0, 5, 5)


def test_an_announced_return_keeps_a_tip_longer():
    tips = [request([10 * n + i for i in range(8)], 6, str(n), at=float(n)) for n in range(1, 4)]
    patient = replace(tips[0], expect_s=100_000.0)
    forgotten = [replace(each, at=each.at + 700.0) for each in tips[1:]]
    back = request([*tips[0].ids.tolist(), 1], 9, "1", at=800.0)
    options = {"policy": "session-lru", "budget_bytes": 32}

    assert run(trace(patient, *forgotten, back), **options).cached[-1] == 8
    assert run(trace(tips[0], *forgotten, back), **options).cached[-1] == 0


def test_what_was_reused_counts_once():
    asks = [request([1, 2, 3, 4, 5, 10 + n], 5, at=float(n)) for n in range(1)]
    again = [request([1, 2, 3, 4, 5, 10, n], 7, at=float(n)) for n in range(20, 23)]

    result = run(trace(*asks, *again))

    assert result.cached == (0, 6, 6, 6)
    assert result.reused[Kind.STATE.value] == 1
    assert result.reused[Kind.FULL.value] == 6
    assert result.filed[Kind.FULL.value] == 9
    assert result.reuse(Kind.FULL) == 6 / 9


def test_reuse_below_and_above_a_cut_edge_is_not_counted_twice():
    long = list(range(1, 11))
    given = trace(
        request(long, 8, at=0.0),
        request([*long, 50], 11, at=1.0),  # reuses all ten
        request([*long[:6], 60, 61], 7, at=2.0, marks=(6,)),  # cuts the edge at six
        request([*long[:6], 70, 71], 7, at=3.0),  # reuses what lies above the cut
    )

    result = run(given)

    assert result.cached == (0, 10, 0, 6)
    assert result.reused[Kind.FULL.value] == 10


def test_a_stopwatch_passes_on_all_that_a_policy_is_told():
    told = {name for name in vars(Policy) if not name.startswith("_")}
    hooks = {name for name in told if callable(getattr(Policy, name))}
    policy = make_policy("lru")

    assert hooks <= vars(TimedPolicy).keys()
    for name in told - hooks:
        assert getattr(TimedPolicy(policy), name) == getattr(policy, name)


def test_equal_runs_reuse_the_same():
    given = agents(seed=3, num_sessions=5, num_turns=5)
    budget = need_bytes(given, shape()) // 8

    first, second = (run(given, policy="auto", budget_bytes=budget) for _ in range(2))

    assert first.cached == second.cached
    assert first.evictions == second.evictions


def test_json_has_the_agreed_keys():
    row = run(TURNS, budget_bytes=1000, budget_share=0.5).to_json()

    assert row.keys() >= {
        *("trace", "policy", "admission", "budget_bytes", "budget_share", "requests"),
        *("hit_rate", "flops_saved", "computed_p50", "computed_p95", "peak_bytes", "evictions"),
        *("state_reuse", "kv_reuse", "cpu_us_per_request"),
    }
    assert (row["computed_p50"], row["computed_p95"]) == (3, 6)
    assert 0 < row["flops_saved"] < 1
    assert row["cpu_us_per_request"] > 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"chunk_len": 0}, "chunk_len is 0"),
        ({"budget_bytes": 0}, "a budget of 0 bytes"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"admission": "all"}, "unknown admission"),
        ({"budget_bytes": 3}, "holds no page of 4 bytes"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        run(TURNS, **settings)
