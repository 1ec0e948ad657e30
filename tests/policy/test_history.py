"""The memory of what was asked: where boundaries were, and that it stays within its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import ids

from agentcache.policy.base import Origin
from agentcache.policy.history import History

NS = b"one"


def remember(history, tokens, length=None, *, at=0.0, namespace=NS, **more):
    tokens = ids(*tokens)
    length = len(tokens) if length is None else length
    return history.remember(namespace, tokens, length, Origin.END, at, **more)


def look_up(history, tokens, limit=None, *, namespace=NS, **more):
    tokens = ids(*tokens)
    return history.look_up(namespace, tokens, len(tokens) if limit is None else limit, **more)


def test_the_deepest_boundary_within_the_limit_is_found():
    history = History()
    short, long = remember(history, [1, 2]), remember(history, [1, 2, 3, 4])
    asked = [1, 2, 3, 4, 5]
    assert look_up(history, asked) == (4, long)
    assert look_up(history, asked, limit=3) == (4, short)
    assert look_up(history, asked, limit=1) == (4, None)
    assert look_up(history, [1, 2, 3, 9]) == (3, short)
    assert look_up(history, [9, 1, 2]) == (0, None)


def test_a_boundary_that_is_made_again_is_the_same_and_keeps_its_origin():
    history = History()
    first = remember(history, [1, 2, 3])
    again = history.remember(NS, ids(1, 2, 3, 4), 3, Origin.BRANCH, 5.0)
    assert again is first
    assert (first.origin, first.used_at, len(history)) == (Origin.END, 0.0, 1)


def test_a_split_leaves_boundaries_where_they_are_and_makes_none():
    history = History()
    long = remember(history, [1, 2, 3, 4, 5, 6])
    other = remember(history, [1, 2, 3, 7])
    assert history.num_tokens == 7
    assert look_up(history, [1, 2, 3, 9]) == (3, None)
    inside = remember(history, [1, 2, 3, 4])
    assert look_up(history, [1, 2, 3, 4, 5, 6]) == (6, long)
    assert look_up(history, [1, 2, 3, 4, 5, 9]) == (5, inside)
    assert look_up(history, [1, 2, 3, 7]) == (4, other)
    assert len({long.row, other.row, inside.row}) == len(history) == 3


def test_namespaces_and_salts_are_apart():
    history = History()
    plain = remember(history, [1, 2, 3])
    salted = remember(history, [1, 2, 3], salts=((1, b"image"),))
    assert salted is not plain
    assert look_up(history, [1, 2, 3], salts=((1, b"image"),)) == (3, salted)
    assert look_up(history, [1, 2, 3], salts=((1, b"other"),)) == (1, None)
    assert look_up(history, [1, 2, 3], namespace=b"two") == (0, None)


def test_a_boundary_beyond_the_length_is_no_place_to_begin():
    history = History()
    far = remember(history, [1, 2, 3, 4, 5])
    near = remember(history, [1, 2, 3, 4, 5], 2, start=far)
    assert near.node.end == 2
    assert look_up(history, [1, 2]) == (2, near)


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)
SALTS = st.sampled_from([(), ((2, b"a"),), ((2, b"b"), (4, b"a"))])


@given(SEQUENCES, SALTS, st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_it_makes_no_difference_where_on_its_path_a_search_begins(known, salts, asked):
    """Each boundary below a sequence is a place to begin; a longer one is, to remember."""
    history = History()
    for tokens in known:
        remember(history, tokens, salts=salts)
    found = look_up(history, asked, salts=salts)
    places = [look_up(history, asked, limit, salts=salts)[1] for limit in range(len(asked) + 1)]
    for place in places:
        assert look_up(history, asked, salts=salts, start=place) == found
    for length in range(1, len(asked) + 1):
        made = {remember(history, asked, length, salts=salts, start=place) for place in places}
        assert made == {remember(history, asked, length, salts=salts)}
        assert made.pop().node.end == length


def test_a_forgotten_boundary_is_no_place_to_begin():
    history = History(max_boundaries=1)
    old = remember(history, [1, 2])
    remember(history, [7, 8])
    fresh = remember(history, [1, 2, 3], start=old)
    assert look_up(history, [1, 2, 3], start=old) == (3, fresh)


def test_what_was_used_last_is_forgotten_last():
    history = History(max_boundaries=2)
    old, middle = remember(history, [1]), remember(history, [2])
    history.refresh(old)
    remember(history, [3])
    assert history.forgotten() == [middle]
    assert look_up(history, [2]) == (0, None)
    assert look_up(history, [1]) == (1, old)


def test_boundaries_with_others_below_outlive_them():
    history = History(max_boundaries=3)
    inner = remember(history, [1, 2])
    below = [remember(history, [1, 2, 3]), remember(history, [1, 2, 4])]
    last = remember(history, [5])
    assert history.forgotten() == [below[0]]
    assert look_up(history, [1, 2, 3]) == (2, inner)
    remember(history, [6])
    assert history.forgotten() == [below[1]]
    assert look_up(history, [1, 2, 4]) == (2, inner)
    assert look_up(history, [5]) == (1, last)


def test_tokens_that_lead_to_no_boundary_any_more_go_too():
    """Two boundaries below a fork that is none: with the second of them the fork goes."""
    history = History(max_tokens=6)
    remember(history, [1, 2, 3, 4])
    remember(history, [1, 2, 5])
    remember(history, [7, 8, 9])
    assert history.num_tokens == 6
    remember(history, [7, 8, 9, 10, 11, 12])
    assert history.num_tokens == 6
    assert look_up(history, [1, 2]) == (0, None)


def test_rows_come_back_once_and_only_after_they_were_handed_out():
    history = History(max_boundaries=1)
    first = remember(history, [1])
    second = remember(history, [2])
    third = remember(history, [3])
    assert len({first.row, second.row, third.row}) == 3  # nobody has asked yet
    assert history.forgotten() == [first, second]
    assert history.forgotten() == []
    fourth, fifth = remember(history, [4]), remember(history, [5])
    assert {fourth.row, fifth.row} == {first.row, second.row}


def test_what_alone_is_more_than_the_bound_is_forgotten_at_once():
    history = History(max_tokens=3)
    boundary = remember(history, [1, 2, 3, 4])
    assert history.forgotten() == [boundary]
    assert (len(history), history.num_tokens) == (0, 0)


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(st.tuples(SEQUENCES, st.booleans()), max_size=40))
def test_random_histories_keep_to_their_bounds_and_know_all_that_they_keep(steps):
    """Against a list of what was remembered and not yet forgotten."""
    history = History(max_tokens=12, max_boundaries=5)
    kept = {}
    for number, (tokens, uses) in enumerate(steps):
        boundary = remember(history, tokens, at=float(number))
        kept[tuple(tokens)] = boundary
        if uses:
            history.refresh(boundary)
        for gone in history.forgotten():
            path = next(path for path, each in kept.items() if each is gone)
            del kept[path]  # fails where it was reported before
        assert len(history) == len(kept) <= 5
        prefixes = {path[:end] for path in kept for end in range(1, len(path) + 1)}
        assert history.num_tokens == len(prefixes) <= 12
        assert len({each.row for each in kept.values()}) == len(kept)
        for path, each in kept.items():
            assert look_up(history, path) == (len(path), each)


@given(st.lists(SEQUENCES, min_size=1, max_size=20), SEQUENCES, st.data())
def test_from_a_known_boundary_the_same_is_found_as_from_the_root(known, asked, data):
    history = History()
    boundaries = [(tokens, remember(history, tokens)) for tokens in known]
    tokens, start = data.draw(st.sampled_from(boundaries))
    whole = [*tokens, *asked]
    limit = data.draw(st.integers(0, len(whole)))
    assert look_up(history, whole, limit, start=start) == look_up(history, whole, limit)
    length = data.draw(st.integers(1, len(whole)))
    made = remember(history, whole, length, start=start)
    assert made is remember(history, whole, length)
    assert made.node.end == length


def test_lengths_are_counted_from_the_root():
    rng = np.random.default_rng(3)
    history, tokens = History(), rng.integers(0, 9, 100).astype(np.int32)
    tip = None
    for end in (10, 40, 41, 100):
        tip = history.remember(NS, tokens, end, Origin.END, 0.0, start=tip)
        assert history.look_up(NS, tokens, 100, start=tip) == (end, tip)
    assert history.num_tokens == 100


@pytest.mark.parametrize("limit", [0, 5])
def test_nothing_is_found_in_an_empty_history(limit):
    assert look_up(History(), [1, 2, 3], limit) == (0, None)
