"""When a factor is tuned, and on what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentcache.policy.base import Costs, Served
from agentcache.policy.marconi import Marconi
from agentcache.policy.tuning import Tuning

if TYPE_CHECKING:
    from collections.abc import Sequence


class Asked:
    """A tuner that is asked, and answers when it is told to."""

    def __init__(self, *, at_once: float | None = None) -> None:
        self.logs: list[Sequence[Served]] = []
        self.at_once = at_once
        self.found: float | None = None

    def start(self, log: Sequence[Served]) -> None:
        self.logs.append(log)
        self.found = self.at_once

    def result(self) -> float | None:
        found, self.found = self.found, None
        return found


def request(number: int, cached_len: int = 50, length: int = 100) -> Served:
    tokens = np.full(length, number, dtype=np.int32)
    return Served(b"", tokens, length, cached_len, (), float(number))


def serve(tuning: Tuning, numbers: range, cached_len: int = 50, length: int = 100) -> None:
    for number in numbers:
        tuning.served(request(number, cached_len, length))


def test_nothing_is_tuned_while_nothing_had_to_leave() -> None:
    tuner = Asked()
    serve(Tuning(tuner, fewest=4), range(100))
    assert tuner.logs == []


def test_window_ends_at_so_many_times_the_requests_before_the_first_eviction() -> None:
    tuner = Asked()
    tuning = Tuning(tuner, fewest=4)
    serve(tuning, range(10))
    tuning.evicted()
    serve(tuning, range(10, 49))
    assert tuner.logs == []
    tuning.evicted()
    serve(tuning, range(49, 50))
    assert [int(each.tokens[0]) for each in tuner.logs[0]] == list(range(50))
    serve(tuning, range(50, 200))
    assert len(tuner.logs) == 1, "the hit rate is what it was"


def test_log_is_bounded_in_requests_and_in_tokens() -> None:
    for bounds in ({"most_requests": 5}, {"most_tokens": 500}):
        tuner = Asked()
        tuning = Tuning(tuner, window=2, fewest=4, **bounds)
        serve(tuning, range(20))
        tuning.evicted()
        serve(tuning, range(20, 40))
        assert [int(each.tokens[0]) for each in tuner.logs[0]] == list(range(35, 40))


def test_log_keeps_its_own_copy_of_the_tokens() -> None:
    tuner = Asked()
    tuning = Tuning(tuner, fewest=1)
    tuning.evicted()
    shared = request(7)
    tuning.served(shared)
    shared.tokens[:] = 0
    assert tuner.logs[0][0].tokens.tolist() == [7] * 100


def test_drift_of_the_hit_rate_tunes_again_after_a_log_of_new_requests() -> None:
    tuner = Asked()
    tuning = Tuning(tuner, window=2, fewest=4, most_requests=20)
    serve(tuning, range(20))
    tuning.evicted()
    serve(tuning, range(20, 40))
    assert len(tuner.logs) == 1
    serve(tuning, range(40, 59), cached_len=100)
    assert len(tuner.logs) == 1, "too early"
    serve(tuning, range(59, 60), cached_len=100)
    assert len(tuner.logs) == 2
    assert tuner.logs[1][0].tokens[0] == 40


def test_marconi_takes_the_factor_over_once_it_is_known() -> None:
    tuner = Asked()
    policy = Marconi(Costs(), tuner=tuner)
    policy.taken(None, 0.0, 0.0)  # type: ignore[arg-type]
    for number in range(32):
        policy.served(request(number))
    assert len(tuner.logs) == 1
    assert policy.alpha == 0.0
    tuner.found = 0.7
    policy.served(request(32))
    assert policy.alpha == 0.7


def test_factor_that_is_known_at_once_counts_from_there_on() -> None:
    policy = Marconi(Costs(), tuner=Asked(at_once=1.3))
    policy.taken(None, 0.0, 0.0)  # type: ignore[arg-type]
    for number in range(32):
        policy.served(request(number))
    assert policy.alpha == 1.3


def test_given_factor_stays() -> None:
    policy = Marconi(Costs(), 0.4, Asked(at_once=1.3))
    assert not policy.wants_served
    assert policy.alpha == 0.4
