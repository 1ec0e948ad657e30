"""Hazards and the index made of them: worked by hand, and searched over all times to stop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.policy.hazard import _MOST_ENDED, SECONDS, SHARES, ReturnTimes, Waiting, _gittins

STARTS = np.array([0.0, 1.0, 3.0])
"""Ages [0, 1), [1, 3) and from 3 on, which is taken as [3, 9)."""


def waiting(*entries: tuple[int, int, float]) -> Waiting:
    kinds, groups, seconds = zip(*entries, strict=True) if entries else ((), (), ())
    return Waiting(
        np.array(kinds, dtype=np.int64),
        np.array(groups, dtype=np.int64),
        np.array(seconds, dtype=np.float64),
    )


def index(times: ReturnTimes, kind: int, seconds: float, group: int = 0):
    found = times.index(np.array([kind]), np.array([group]), np.array([seconds]))
    return float(found[0])


def test_ended_waits_count_at_every_age_that_they_passed():
    times = ReturnTimes(1, starts=STARTS)
    times.ended(0, 0, 2.0, used=True)  # 1 s of the first age, 1 s of the second, used there
    times.ended(0, 0, 0.5, used=False)
    times.ended(0, 0, 10.0, used=False)  # 1 s, 2 s, and all that is beyond 3 s
    times.learn(waiting())
    assert times._waited[0, 0].tolist() == [2.5, 3.0, 7.0]
    assert times._uses[0, 0].tolist() == [0.0, 1.0, 0.0]


def test_a_time_on_a_bound_belongs_to_the_age_that_begins_there():
    times = ReturnTimes(1, starts=STARTS)
    times.ended(0, 0, 1.0, used=True)
    times.learn(waiting())
    assert times._uses[0, 0].tolist() == [0.0, 1.0, 0.0]
    assert times._waited[0, 0].tolist() == [1.0, 0.0, 0.0]


def test_what_waits_counts_as_if_its_wait_had_ended_unused():
    ages = [0.0, 0.5, 1.0, 2.0, 3.0, 10.0]
    ended, alive = ReturnTimes(2, (1, 2), STARTS), ReturnTimes(2, (1, 2), STARTS)
    for age in ages:
        ended.ended(1, 1, age, used=False)
    ended.learn(waiting())
    assert np.array_equal(alive._waiting(waiting(*[(1, 1, age) for age in ages])), ended._waited)


def test_it_makes_no_difference_when_ended_waits_are_added_up():
    """All at once, or as they come: in between only what would fill memory is."""
    rng = np.random.default_rng(5)
    often, once = ReturnTimes(3, (2, 2)), ReturnTimes(3, (2, 2))
    for _ in range(3 * _MOST_ENDED // 2):
        wait = int(rng.integers(3)), int(rng.integers(4)), float(rng.exponential(9))
        for times in (often, once):
            times.ended(*wait, used=wait[2] < 5)
        if rng.random() < 0.01:
            often.learn(waiting())
    assert 0 < len(once._ended) < _MOST_ENDED
    often.learn(waiting())
    once.learn(waiting())
    for kind, group in np.ndindex(3, 4):
        for at in (0.1, 3.0, 200.0):
            assert index(often, kind, at, group) == pytest.approx(index(once, kind, at, group))


@given(st.lists(st.floats(0, 1e9), min_size=1), st.integers(-4, 4), st.integers(2, 30))
def test_ranges_that_double_are_found_as_by_searching(seconds, first, count):
    starts = np.concatenate([[0.0], 2.0**first * 2.0 ** np.arange(count)])
    at = np.concatenate([seconds, starts, np.nextafter(starts[1:], 0)])
    times = ReturnTimes(1, starts=starts)
    assert times._octave is not None
    assert times._ages(at).tolist() == (np.searchsorted(starts, at, side="right") - 1).tolist()


@pytest.mark.parametrize("starts", [SHARES, STARTS, np.array([0.0, 3.0, 6.0, 12.0])])
def test_other_ranges_are_searched(starts):
    times = ReturnTimes(1, starts=starts)
    assert times._octave is None
    assert times._ages(starts).tolist() == list(range(len(starts)))


def test_hazards_are_uses_over_waiting_seconds():
    """With so many uses the prior is of no weight: 3 of 4 return in the second age."""
    times = ReturnTimes(1, starts=STARTS)
    for _ in range(30_000):
        times.ended(0, 0, 2.0, used=True)
    for _ in range(10_000):
        times.ended(0, 0, 3.0, used=False)
    times.learn(waiting())
    # First age: nobody in 40,000 s. Second: 30,000 uses in 30,000 x 1 s + 10,000 x 2 s.
    assert times._hazard[0, 0] < 1e-4
    assert times._hazard[0, 1] == pytest.approx(0.6, rel=1e-3)


def test_a_class_without_news_goes_by_what_all_do():
    times = ReturnTimes(2, starts=STARTS)
    for _ in range(1000):
        times.ended(0, 0, 0.5, used=True)
    times.learn(waiting())
    overall = 1000.5 / (500 + 60)
    assert times.mean[1] == pytest.approx(overall)
    assert times._hazard[1] == pytest.approx(np.full(3, overall))


def test_the_index_of_a_constant_hazard_is_the_hazard():
    hazard = np.full((1, 3), 0.25)
    assert _gittins(hazard, np.array([1.0, 2.0, 6.0]))[0] == pytest.approx(np.full(3, 0.25))


@given(st.lists(st.floats(0.01, 3.0), min_size=3, max_size=3))
def test_the_index_is_the_best_ratio_over_all_times_to_stop(rates):
    """Every stop on a fine grid, by adding up small steps: none is better, and one is as good."""
    hazard, widths, step = np.array(rates), np.array([1.0, 2.0, 6.0]), 1e-2
    found = _gittins(hazard[None], widths)[0]
    for age in range(3):
        rate = np.repeat(hazard[age:], np.round(widths[age:] / step).astype(int))
        alive = np.exp(-np.concatenate([[0.0], np.cumsum(rate * step)]))
        used = 1 - alive[1:]
        seconds = np.cumsum((alive[1:] + alive[:-1]) / 2 * step)
        assert found[age] == pytest.approx((used / seconds).max(), rel=1e-3)


def test_an_entry_that_is_soon_due_is_worth_more_than_its_present_hazard():
    quiet_then_busy = np.array([[0.001, 2.0, 0.001]])
    found = _gittins(quiet_then_busy, np.array([1.0, 1.0, 6.0]))[0]
    # Kept until 2 s: used with 1 - exp(-2), after 1 s and then (1 - exp(-2)) / 2 s.
    assert found[0] == pytest.approx(0.865 / (1 + 0.432), rel=0.01)
    assert found[1] == pytest.approx(2.0)
    assert found[2] == pytest.approx(0.001)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(0, 1e7), st.booleans()),
        max_size=40,
    ),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(0, 1e7)), max_size=20),
)
def test_whatever_was_seen_an_index_is_finite_and_not_negative(seen, alive):
    times = ReturnTimes(3, (2, 2))
    for kind, group, seconds, used in seen:
        times.ended(kind, group, seconds, used=used)
    times.learn(waiting(*alive))
    for kind in range(3):
        for group in range(4):
            ages = np.concatenate([SECONDS, [1e9]])
            same = np.full(len(ages), kind), np.full(len(ages), group)
            found = times.index(*same, ages)
            assert np.isfinite(found).all()
            assert (found >= 0).all()


def test_traits_raise_and_lower_a_group_against_its_class():
    times = ReturnTimes(1, (2, 2), STARTS)
    for _ in range(200):
        times.ended(0, 0b11, 0.5, used=True)
        times.ended(0, 0b01, 0.5, used=False)
        times.ended(0, 0b10, 0.5, used=True)
        times.ended(0, 0b00, 0.5, used=False)
    times.learn(waiting())
    first, second = index(times, 0, 0.0, 0b10), index(times, 0, 0.0, 0b00)
    assert first > 1.5 * times._index[0, 0] > 3 * second
    # The second trait makes no difference.
    assert index(times, 0, 0.0, 0b11) == pytest.approx(first, rel=0.05)


def test_a_trait_is_believed_only_with_uses_to_show():
    """Two uses more are next to nothing, two hundred are not."""
    factors = []
    for count in (2, 200):
        times = ReturnTimes(1, (2, 1), STARTS)
        for _ in range(count):
            times.ended(0, 0, 0.5, used=True)
            times.ended(0, 1, 0.5, used=False)
        times.learn(waiting())
        factors.append(float(times._factor[0, 0]))
    assert 1 < factors[0] < 1.5 < factors[1]


def test_surprise_is_minus_the_logarithm_of_the_density():
    """The density integrates to one, but for what is left beyond the last age."""
    times = ReturnTimes(1, (2, 1), STARTS)
    for at in (0.5, 0.5, 2.0, 4.0, 4.0, 5.0):
        times.ended(0, 0, at, used=True)
        times.ended(0, 1, at, used=False)
    times.learn(waiting())
    step = 1e-2
    at = np.arange(step / 2, 9.0, step)
    density = np.exp([-times.surprise(0, 0, seconds) for seconds in at])
    hazard = times._hazard[0] * times._factor[0, 0]
    left = np.exp(-hazard @ np.array([1.0, 2.0, 6.0]))
    assert density.sum() * step + left == pytest.approx(1.0, abs=1e-3)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_the_index_is_a_number_however_long_nothing_was_used():
    """As many as a server sees in a week or two, each of which waited for a day."""
    times = ReturnTimes(1)
    many = np.zeros(300_000, dtype=np.int64)
    times.learn(Waiting(many, many, np.full(len(many), 1e5)))
    found = times.index(many[: len(SECONDS)], many[: len(SECONDS)], SECONDS)
    assert np.isfinite(found).all()
