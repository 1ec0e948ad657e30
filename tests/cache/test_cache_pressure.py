"""Who stays when memory is short: live sessions, anonymous prompts, idle ones, and checkpoints."""

from __future__ import annotations

import itertools
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest
from testkit.helpers import NAMESPACE, Agent, check, make_cache, run, tick

from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.cache import HybridCache
    from agentcache.types import IntArray

_FRESH = count(1000)
PAGE = 16
KINDS = pytest.mark.parametrize("state_pages", [0, 2], ids=["full", "full-state"])


def fresh(num: int) -> IntArray:
    """Tokens that never occurred before."""
    return np.array([next(_FRESH) for _ in range(num)], dtype=np.int32)


def joined(*parts: IntArray) -> IntArray:
    return np.concatenate(parts)


def hit(cache: HybridCache, head: IntArray) -> int:
    """How much of `head` a prompt that goes on from it would reuse."""
    prompt = joined(head, fresh(1))
    return cache.tree.match(cache.tree.root(NAMESPACE), prompt, len(head)).boundary


def idle_sessions(cache: HybridCache, num: int, num_pages: int) -> list[Agent]:
    """Sessions that took one turn of that many pages each and are never closed."""
    agents = [Agent(cache) for _ in range(num)]
    for agent in agents:
        agent.turn(fresh(PAGE * num_pages - PAGE), fresh(PAGE))
    return agents


def anonymous(cache: HybridCache, head: IntArray) -> int:
    """A prompt without a session: how much of it was reused."""
    return run(cache, joined(head, fresh(PAGE))).boundary


@KINDS
def test_sessions_that_are_never_closed_do_not_starve_anonymous_prompts(state_pages: int) -> None:
    cache = make_cache(num_pages=200, page_size=PAGE, state_pages=state_pages)
    idle_sessions(cache, 9, num_pages=20 - state_pages)
    assert cache.pools.pages.num_free <= 20, "most of the memory is taken"
    head = fresh(PAGE * 17)
    anonymous(cache, head)
    anonymous(cache, head)
    anonymous(cache, fresh(PAGE * 17))
    assert hit(cache, head) == len(head)
    assert anonymous(cache, head) == len(head)
    check(cache)


@KINDS
def test_anonymous_prompts_take_no_more_than_their_share_from_sessions(state_pages: int) -> None:
    cache = make_cache(num_pages=200, page_size=PAGE, state_pages=state_pages)
    agents = idle_sessions(cache, 9, num_pages=20 - state_pages)
    for _ in range(40):
        anonymous(cache, fresh(PAGE * 9))
        check(cache)
    kept = [agent for agent in agents if hit(cache, agent.tokens[:-1]) == len(agent.tokens) - 1]
    # an eighth of the memory is theirs, and as much as the one that runs needs
    assert len(kept) >= 6
    assert kept == agents[-len(kept) :], "those that were idle for longest made room"


@KINDS
def test_two_idle_references_on_a_prefix_do_not_outlive_a_live_session(state_pages: int) -> None:
    cache = make_cache(num_pages=200, page_size=PAGE, state_pages=state_pages)
    shared = fresh(PAGE * 40)
    old = [Agent(cache) for _ in range(2)]
    for agent in old:
        agent.turn(joined(shared, fresh(PAGE * 2)), fresh(PAGE), (len(shared),))
    live = Agent(cache)
    live.turn(fresh(PAGE * 60), fresh(PAGE))
    for _ in range(6):
        assert live.turn(fresh(4), fresh(4)) <= 5
    for _ in range(3):
        Agent(cache).turn(fresh(PAGE * 40), fresh(PAGE))
        check(cache)
    assert hit(cache, live.tokens[:-1]) == len(live.tokens) - 1
    assert live.turn(fresh(4), fresh(4)) == 5
    assert hit(cache, shared) < len(shared)


@KINDS
def test_number_of_references_keeps_nothing_that_was_used_longer_ago(state_pages: int) -> None:
    cache = make_cache(num_pages=400, page_size=PAGE, state_pages=state_pages)
    crowd = Agent(cache)
    crowd.turn(fresh(PAGE * 10), fresh(PAGE))
    forks = [crowd.fork() for _ in range(20)]
    single = Agent(cache)
    single.turn(fresh(PAGE * 10), fresh(PAGE))
    while hit(cache, crowd.tokens[:-1]):
        assert cache.evict_one()
    assert hit(cache, single.tokens[:-1]) == len(single.tokens) - 1
    for fork in forks:
        fork.close()
    check(cache)


@KINDS
def test_session_that_is_not_back_in_time_is_an_ordinary_entry(state_pages: int) -> None:
    def left(seconds: float, expect: float | None) -> bool:
        cache = make_cache(num_pages=60, page_size=PAGE, state_pages=state_pages)
        agent = Agent(cache)
        agent.turn(fresh(PAGE * 9), fresh(PAGE))
        if expect is not None:
            assert agent.ref is not None
            cache.expect(expect, agent.ref)
        for _ in range(int(seconds)):
            tick(cache)
        head = fresh(PAGE * 10)
        anonymous(cache, head)
        assert cache.evict_one()
        return hit(cache, agent.tokens[:-1]) > 0

    assert left(500, None), "it counts for ten minutes"
    assert not left(700, None)
    assert left(55, expect=30), "and for twice the time that it announced"
    assert not left(65, expect=30)
    assert left(1500, expect=1000)


@KINDS
def test_session_that_came_back_late_counts_again(state_pages: int) -> None:
    cache = make_cache(num_pages=60, page_size=PAGE, state_pages=state_pages)
    agent = Agent(cache)
    agent.turn(fresh(PAGE * 9), fresh(PAGE))
    for _ in range(700):
        tick(cache)
    assert agent.turn(fresh(3), fresh(3)) == 4
    head = fresh(PAGE * 10)
    anonymous(cache, head)
    while hit(cache, head):
        assert cache.evict_one()
    assert hit(cache, agent.tokens[:-1]) == len(agent.tokens) - 1


@KINDS
def test_share_of_anonymous_prompts_counts_the_head_that_they_have_in_common(
    state_pages: int,
) -> None:
    """With more than their share, the oldest of their own leaves, not the session's."""
    cache = make_cache(num_pages=200, page_size=PAGE, state_pages=state_pages)
    agent = Agent(cache)
    agent.turn(fresh(PAGE * 20), fresh(PAGE))
    head = fresh(PAGE * 80)
    tails = [joined(head, fresh(PAGE)) for _ in range(4)]
    for prompt in (*tails, *tails):
        run(cache, prompt)
    for _ in range(3):
        assert cache.evict_one()
        assert hit(cache, agent.tokens[:-1]) == len(agent.tokens) - 1


def chains(
    num_turns: int, num_chains: int, *, in_turns: bool, num_pages: int, state_pages: int
) -> tuple[HybridCache, list[Agent]]:
    """Append-only sessions of equal turns, one after another or all at once."""
    cache = make_cache(num_pages=num_pages, state_pages=state_pages)
    agents = [Agent(cache) for _ in range(num_chains)]
    order = [agent for agent in agents for _ in range(num_turns)]
    if in_turns:
        order = [agent for _ in range(num_turns) for agent in agents]
    for agent in order:
        agent.turn(fresh(30), fresh(6))
    check(cache)
    return cache, agents


def with_a_third_of_the_states(
    num_turns: int, num_chains: int, *, in_turns: bool, state_pages: int
) -> tuple[HybridCache, list[Agent]]:
    """The same with room for all KV and for a third of the checkpoints."""

    def played(num_pages: int) -> tuple[HybridCache, list[Agent]]:
        return chains(
            num_turns, num_chains, in_turns=in_turns, num_pages=num_pages, state_pages=state_pages
        )

    whole, _ = played(100_000)
    assert whole.num_checkpoints == num_turns * num_chains
    room = whole.used_pages()[Kind.FULL] + whole.num_checkpoints // 3 * state_pages
    cache, agents = played(room)
    assert cache.num_checkpoints == num_turns * num_chains // 3
    assert cache.used_pages()[Kind.FULL] == whole.used_pages()[Kind.FULL], "KV had to leave"
    return cache, agents


@pytest.mark.parametrize(
    ("num_turns", "in_turns", "state_pages"),
    [
        # fewer leave each chain three states besides its tip, too few for any order to be sure of
        *itertools.product((16, 20, 40), (False, True), (1, 2, 5, 9)),
    ],
)
def test_forks_of_a_chain_whose_states_were_thinned_reuse_half_of_their_depth(
    num_turns: int, in_turns: bool, state_pages: int
) -> None:
    cache, agents = with_a_third_of_the_states(
        num_turns, 3, in_turns=in_turns, state_pages=state_pages
    )
    for agent in agents:
        for share in (0.25, 0.5, 0.75):
            depth = int(share * len(agent.tokens))
            assert hit(cache, agent.tokens[:depth]) >= depth / 2
        assert hit(cache, agent.tokens[:-1]) == len(agent.tokens) - 1


@pytest.mark.parametrize("in_turns", [False, True])
def test_states_of_a_long_chain_do_not_leave_from_the_shallow_end(in_turns: bool) -> None:
    cache, agents = with_a_third_of_the_states(40, 3, in_turns=in_turns, state_pages=4)
    for agent in agents:
        assert agent.frontier is not None
        path = cache.tree.path(agent.frontier)
        left = [node.end for node in path if Kind.STATE in node.data]
        gone = [node.end for node in path if Kind.STATE not in node.data]
        assert min(left) < min(gone), "the first of all was not the first to go"
        assert np.mean(gone) > np.mean(left), "more leave at the deep end"
        for tenth in range(1, 10):
            assert any(end in range(144 * tenth, 144 * (tenth + 1)) for end in gone)
        assert max(np.diff([0, *left])) <= 1440 / 5, "no fifth of the chain is without any"


@KINDS
def test_place_of_a_fork_survives_its_parent_s_next_turns(state_pages: int) -> None:
    """What a fork stands on is a tip, and no checkpoint that was moved past."""
    cache = make_cache(num_pages=400, page_size=PAGE, state_pages=state_pages)
    parent = Agent(cache)
    parent.turn(fresh(PAGE * 10), fresh(PAGE))
    child = parent.fork()
    for _ in range(5):
        parent.turn(fresh(PAGE), fresh(PAGE))
    for _ in range(4):
        cache.evict_one()
    assert child.turn(fresh(3), fresh(3)) <= 4
