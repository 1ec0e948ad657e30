"""Sequences that grow share their memory, and none sees what another added."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.engine.append_log import AppendLog, TokenLog

STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 12), st.lists(st.integers(0, 99), max_size=4)),
    max_size=12,
)
"""Which log so far to take, how many of its first items to keep, and what to add."""


@given(STEPS)
def test_logs_are_what_lists_would_be(steps):
    logs, lists = [AppendLog([1, 2])], [[1, 2]]
    tokens = [TokenLog(np.array([1, 2], np.int32))]
    for source, kept, more in steps:
        at = source % len(logs)
        logs.append(logs[at].first(kept).extend(more))
        tokens.append(tokens[at].first(kept).extend(np.array(more, np.int32)))
        lists.append(lists[at][:kept] + more)
    for log, numbers, items in zip(logs, tokens, lists, strict=True):
        assert [*log] == items
        assert log == tuple(items)
        assert numbers.ids.tolist() == items
        assert len(log) == len(numbers) == len(items)
        assert log[1:-1] == tuple(items[1:-1])
        assert [log[at] for at in range(-len(items), len(items))] == items + items
        with pytest.raises(IndexError):
            log[len(items)]
    for log, items in zip(logs, lists, strict=True):
        for other, others in zip(logs, lists, strict=True):
            shared = log.num_shared(other)
            assert items[:shared] == others[:shared]


def test_a_line_of_descent_shares_all_and_a_branch_nothing():
    log = AppendLog("ab")
    longer, other = log.extend("c"), log.extend("d")
    assert log.num_shared(longer) == 2
    assert longer.extend("e").num_shared(longer) == 3
    assert longer.num_shared(other) == 0
    assert log.extend("") is log


def test_arrays_of_tokens_cannot_be_written_to():
    log = TokenLog(np.array([1], np.int32))
    with pytest.raises(ValueError, match="read-only"):
        log.ids[0] = 2


@pytest.mark.parametrize("kind", ["items", "tokens"])
def test_threads_may_extend_one_log_at_once(kind):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    log = AppendLog([0]) if kind == "items" else TokenLog(np.array([0], np.int32))

    def grow(number):
        own = log
        for _ in range(2000):
            own = own.extend([number] if kind == "items" else np.array([number], np.int32))
        return [*own] if kind == "items" else own.ids.tolist()

    try:
        with ThreadPoolExecutor(4) as pool:
            grown = list(pool.map(grow, range(1, 5)))
    finally:
        sys.setswitchinterval(interval)
    assert grown == [[0] + [number] * 2000 for number in range(1, 5)]
