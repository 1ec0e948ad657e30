"""Sessions that take turns in a round, with less room than they need (B56)."""

from __future__ import annotations

import numpy as np
import pytest
from testkit.helpers import Agent, check, make_cache

NUM_TURNS, HEAD_LEN, BODY_LEN, PAGE = 16, 48, 400, 4


def computed(policy: str, share: float, num_sessions: int = 3) -> tuple[int, int]:
    """Prompt tokens computed after the first round, and what the best static choice computes.

    That one keeps as many sessions whole as there is room for, and computes the rest each turn.
    """
    new, reply = 8, 4
    each = (BODY_LEN + NUM_TURNS * (new + reply)) // PAGE + 5 * 2
    room = int(share * (HEAD_LEN // PAGE + 2 + num_sessions * each))
    cache = make_cache(num_pages=room, page_size=PAGE, num_rows=4, state_pages=2, policy=policy)
    rng = np.random.default_rng(0)

    def some(count: int) -> np.ndarray:
        return rng.integers(0, 1000, count).astype(np.int32)

    head = some(HEAD_LEN)
    agents = [Agent(cache) for _ in range(num_sessions)]
    for agent in agents:
        agent.turn(np.concatenate([head, some(BODY_LEN)]), some(reply), structural=(HEAD_LEN,))
    total, static = 0, 0
    kept = int(share * num_sessions)
    for _ in range(NUM_TURNS):
        for number, agent in enumerate(agents):
            total += agent.turn(some(new), some(reply), structural=(HEAD_LEN,))
            prompt_len = len(agent.tokens) - reply
            static += new + 1 if number < kept else prompt_len - HEAD_LEN
        check(cache)
    return total, static


def test_sessions_that_fit_compute_only_what_is_new() -> None:
    total, _ = computed("session-lru", 1.0)
    assert total == 3 * NUM_TURNS * 9


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7, 0.5])
def test_loss_in_a_round_is_at_most_one_and_a_half_of_the_best_static_choice(share: float) -> None:
    total, static = computed("session-lru", share)
    assert total <= 1.5 * static


def test_round_of_eight_with_room_for_a_few_is_no_thrash() -> None:
    """Plain LRU loses nearly everything: whoever comes next has just been evicted."""
    ours, static = computed("session-lru", 0.4, num_sessions=8)
    plain, _ = computed("lru", 0.4, num_sessions=8)
    assert ours <= 1.5 * static
    assert ours < 0.85 * plain
