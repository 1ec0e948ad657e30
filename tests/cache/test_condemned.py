"""A condemned path: nobody finds it or what was computed from it, whoever still reads it may."""

from __future__ import annotations

import random

import numpy as np
import pytest
from testkit.helpers import NAMESPACE, absorb, ids, verify_prefix
from testkit.tiers import (
    COMPOSITIONS,
    Crowd,
    check_tiers,
    demote_all,
    make_tiered,
    node_at,
    serve,
    wander,
)

HEAD = ids(*range(1, 10))
PATH = ids(*range(1, 16))
BRANCH = np.concatenate([HEAD, ids(40, 41, 42, 43)])
OTHER = ids(50, 51, 52, 53, 54)

compositions = pytest.mark.parametrize("name", COMPOSITIONS)


@compositions
def test_path_is_found_no_more_until_it_is_computed_again(name: str) -> None:
    cache = make_tiered(lower_pages=0, **COMPOSITIONS[name])
    serve(cache, PATH)
    again = np.append(PATH, 30).astype(np.int32)
    assert cache.peek(NAMESPACE, again, limit=15) == 15
    entries = sum(len(node.data) for node in cache.tree.nodes())
    assert cache.condemn(node_at(cache, PATH)) == entries > 0
    check_tiers(cache)
    assert cache.peek(NAMESPACE, again, limit=15) == 0
    assert cache.pools.pages.num_used == 0
    assert serve(cache, again).boundary == 0
    assert cache.peek(NAMESPACE, np.append(again, 31), limit=16) == 16


@compositions
def test_what_branches_off_goes_along_and_other_paths_stay(name: str) -> None:
    cache = make_tiered(lower_pages=0, **COMPOSITIONS[name])
    for tokens in (HEAD, PATH, BRANCH, OTHER):
        serve(cache, tokens)
    cache.condemn(node_at(cache, PATH))
    check_tiers(cache)
    assert cache.peek(NAMESPACE, np.append(BRANCH, 30), limit=len(BRANCH)) == 0
    assert cache.peek(NAMESPACE, np.append(OTHER, 30), limit=len(OTHER)) == len(OTHER)


@compositions
def test_running_request_goes_on_and_leaves_nothing_behind(name: str) -> None:
    cache = make_tiered(lower_pages=0, **COMPOSITIONS[name])
    serve(cache, HEAD)
    longer = np.concatenate([HEAD, ids(*range(60, 70))])
    lease = cache.acquire(NAMESPACE, longer)
    assert lease.boundary == len(HEAD)
    cache.condemn(node_at(cache, HEAD))
    check_tiers(cache)
    assert cache.peek(NAMESPACE, longer, limit=18) == 0
    cache.reserve(lease, len(longer))
    absorb(cache, lease, longer, len(HEAD), len(longer))
    assert cache.commit(lease, longer, len(longer), lease.row)
    verify_prefix(cache, lease, longer, len(longer))
    assert cache.peek(NAMESPACE, longer, limit=18) == 0
    assert serve(cache, HEAD).boundary == 0  # beside the one that is still read
    assert cache.peek(NAMESPACE, longer, limit=18) == len(HEAD)
    cache.release(lease)
    check_tiers(cache)
    assert {node.end for node in cache.tree.nodes()} == {len(HEAD)}


def test_session_that_stands_on_the_path_starts_from_nothing() -> None:
    """Also while somebody else keeps alive what its mark points to."""
    cache = make_tiered(lower_pages=0, state_pages=1)
    serve(cache, PATH)
    node = node_at(cache, PATH)
    mark, fork = cache.stand(node), cache.stand(node)
    reader = cache.acquire(NAMESPACE, np.append(PATH, 7).astype(np.int32))
    cache.condemn(node)
    longer = np.append(PATH, 8).astype(np.int32)
    assert node.generation == 0
    assert serve(cache, longer, after=mark, known_len=len(PATH)).boundary == 0
    cache.release(reader)
    assert node.generation == 1
    cache.clear()
    assert serve(cache, longer, after=fork, known_len=len(PATH)).boundary == 0
    cache.leave(mark, cache.stand_again(fork), fork)
    cache.clear()
    assert not list(cache.tree.nodes())


@compositions
def test_what_lies_on_a_lower_tier_goes_too(name: str) -> None:
    cache = make_tiered(lower_pages=64, **COMPOSITIONS[name])
    serve(cache, PATH)
    demote_all(cache)
    assert cache.pools.pages.num_used == 0
    cache.condemn(node_at(cache, PATH))
    check_tiers(cache)
    assert not list(cache.tree.nodes())


def test_condemned_twice_or_at_the_root_is_nothing_more() -> None:
    cache = make_tiered(lower_pages=0, state_pages=1)
    serve(cache, PATH)
    node = node_at(cache, PATH)
    reader = cache.acquire(NAMESPACE, np.append(PATH, 7).astype(np.int32))
    cache.condemn(node)
    assert cache.condemn(node) == 0
    cache.release(reader)
    assert cache.condemn(node) == 0
    assert cache.condemn(cache.tree.root(NAMESPACE)) == 0
    check_tiers(cache)


@compositions
@pytest.mark.parametrize("lower_pages", [0, 20])
def test_crowd_goes_on_through_it(name: str, lower_pages: int) -> None:
    """Any path, at any moment: all that is read stays right, and at the end nothing is left."""
    crowd = Crowd(make_tiered(num_pages=30, lower_pages=lower_pages, **COMPOSITIONS[name]))
    rng, num = random.Random(lower_pages), 0
    for _ in range(25):
        wander(crowd, rng, 10)
        nodes = list(crowd.cache.tree.nodes())
        if nodes:
            crowd.cache.condemn(rng.choice(nodes))
            crowd.check()
            num += bool(crowd.flights)
    assert num > 5, "hardly ever was anybody running"
    assert crowd.counts["hit"] > 10
    crowd.end()
