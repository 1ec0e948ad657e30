"""What the cache is told of sessions, and what it makes of it when memory is short."""

from __future__ import annotations

import numpy as np
from testkit.helpers import Agent, make_cache

from agentcache.types import Kind


def some(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def stands(agent: Agent) -> bool:
    """Whether the agent's tip is still in the tree."""
    assert agent.ref is not None
    return agent.ref.frontier.alive


def test_session_that_said_it_will_be_back_outlives_one_that_said_nothing() -> None:
    cache = make_cache(num_pages=100)
    told, silent = Agent(cache), Agent(cache)
    told.turn(some(20, 1), some(4, 2))  # used longer ago than the other
    silent.turn(some(20, 3), some(4, 4))
    assert told.ref is not None
    cache.expect(30.0, told.ref)
    while stands(silent):
        assert cache.evict_one()
    assert stands(told)


def test_head_of_sessions_that_take_turns_leaves_after_their_tips_and_idle_ones() -> None:
    cache = make_cache(num_pages=200)
    head = some(12, 0)
    agents = [Agent(cache) for _ in range(2)]
    for turn in range(3):
        for number, agent in enumerate(agents):
            new = some(8, 10 * turn + number + 1)
            agent.turn(np.concatenate([head, new]) if turn == 0 else new, some(4, 99), (12,))
    idle = Agent(cache)
    idle.turn(some(20, 50), some(4, 51))
    (node,) = (node for node in cache.tree.nodes() if node.structural)
    while any(map(stands, [*agents, idle])):
        assert Kind.STATE in node.data, "the head left while a tip stood"
        assert cache.evict_one()
