"""Ways in which prefix caches for hybrid models fail in practice, played through at the cache.

Trajectories here are counted in tokens; nothing is computed. Where it matters what a slot holds,
the pools remember it.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from testkit.helpers import (
    NAMESPACE,
    Agent,
    Shadow,
    absorb,
    check,
    make_cache,
    published_slots,
    run,
    verify_prefix,
)

from agentcache.cache import HybridCache, Lease, OutOfPages
from agentcache.types import IntArray, Kind

_FRESH = count(1000)


def fresh(num: int) -> IntArray:
    """Tokens that never occurred before."""
    return np.array([next(_FRESH) for _ in range(num)], dtype=np.int32)


def joined(*parts: IntArray) -> IntArray:
    return np.concatenate(parts)


def known(cache: HybridCache, prompt: IntArray) -> int:
    """How much of a prompt would be reused."""
    return cache.tree.match(cache.tree.root(NAMESPACE), prompt, len(prompt) - 1).boundary


def computed(cache: HybridCache, prompt: IntArray, structural: tuple[int, ...] = ()) -> int:
    return len(prompt) - run(cache, prompt, structural=structural).boundary


class Running:
    """A request that advances in pieces over `Shadow` pools."""

    def __init__(self, cache: HybridCache, tokens: IntArray) -> None:
        self.cache = cache
        self.tokens = tokens
        self.lease: Lease = cache.acquire(NAMESPACE, tokens)
        self.at = self.lease.boundary

    def advance(self, num: int, *, file: bool = False) -> None:
        stop = min(self.at + num, len(self.tokens))
        self.cache.reserve(self.lease, stop)
        absorb(self.cache, self.lease, self.tokens, self.at, stop)
        self.at = stop
        if file:
            assert self.cache.commit(self.lease, self.tokens, stop, self.lease.row)

    def finish(self) -> int:
        """Absorb the rest, file it and release; what was reused."""
        self.advance(len(self.tokens), file=True)
        self.cache.release(self.lease)
        check(self.cache)
        return self.lease.boundary


def shadow_cache() -> HybridCache:
    return make_cache(num_pages=200, shadow=True)


def test_interleaved_prompts_with_odd_chunks_file_exact_states() -> None:
    cache = shadow_cache()
    prompts = [fresh(23), fresh(19)]
    running = [Running(cache, prompt) for prompt in prompts]
    for size in (7, 5, 3, 6, 1):
        for each in running:
            each.advance(size, file=size != 5)
    for each in running:
        each.finish()
    for _ in range(10):
        Running(cache, fresh(9)).finish()
    for prompt in prompts:
        again = Running(cache, joined(prompt, fresh(3)))
        assert again.lease.boundary == len(prompt)
        again.finish()


def test_what_is_published_never_changes() -> None:
    cache = shadow_cache()
    prompt = fresh(14)
    Running(cache, prompt).finish()
    pools = cache.pools
    assert isinstance(pools, Shadow)

    def published() -> dict[object, object]:
        slots = {(page, at): pools.arena[page][at] for page, at in published_slots(cache)}
        states = {
            page: pools.arena[page]
            for node in cache.tree.nodes()
            for page in node.data[Kind.STATE].slots.tolist()
        }
        return {**slots, **{("state", page): value for page, value in states.items()}}

    before = published()
    a, b = joined(prompt, fresh(4)), joined(prompt, fresh(5))
    first, second = Running(cache, a), Running(cache, b)
    for _ in range(4):
        first.advance(1)
        second.advance(1)
    first.finish()
    second.finish()
    assert Running(cache, joined(a, fresh(2))).finish() == len(a)
    assert Running(cache, joined(b, fresh(2))).finish() == len(b)
    after = published()
    assert {key: after[key] for key in before} == before


def test_regenerated_reply_does_not_go_on_from_the_old_one() -> None:
    cache = shadow_cache()
    prompt, reply = fresh(12), fresh(9)
    Running(cache, joined(prompt, reply)).finish()
    again = Running(cache, prompt)
    assert again.lease.boundary < len(prompt)
    again.finish()
    other = Running(cache, joined(prompt, fresh(9)))
    assert other.finish() == len(prompt)


def test_kv_without_states_is_no_hit() -> None:
    cache = shadow_cache()
    prompt = fresh(20)
    Running(cache, prompt).finish()
    keeps = Running(cache, joined(prompt, fresh(4)))  # keeps the KV while the states go
    while cache.evict_one():
        pass
    again = Running(cache, joined(prompt, fresh(6)))
    assert again.lease.boundary == 0
    assert again.lease.match.lens == {Kind.FULL: 20, Kind.STATE: 0}
    assert again.lease.match.vetoed_by is Kind.STATE
    again.finish()
    keeps.finish()


@pytest.mark.parametrize("kv", [True, False])
def test_exact_repeats_compute_a_few_tokens_each(kv: bool) -> None:
    cache = make_cache(kv=kv)
    prompt = fresh(30)
    costs = [computed(cache, prompt, structural=(26,)) for _ in range(4)]
    assert costs == [30, 4, 1, 1]


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_length_and_state_move_together_around_a_boundary(more: int) -> None:
    cache = shadow_cache()
    prompt = fresh(17)
    for length in (9, 16, 17):
        Running(cache, prompt[:length]).finish()
    sequence = joined(prompt, fresh(1))[: 17 + more]
    lease = cache.acquire(NAMESPACE, sequence)
    assert lease.boundary == (9 if more < 0 else 16 + more)
    verify_prefix(cache, lease, sequence, lease.boundary)
    cache.release(lease)


def test_shared_head_hits_from_the_second_request_where_it_is_marked() -> None:
    cache = make_cache(num_pages=2000)
    head = fresh(150)
    costs = [computed(cache, joined(head, fresh(70)), structural=(150,)) for _ in range(8)]
    assert costs == [220] + [70] * 7


def test_shared_head_hits_from_the_third_request_where_nobody_marked_it() -> None:
    cache = make_cache(num_pages=2000)
    head = fresh(150)
    costs = [computed(cache, joined(head, fresh(70))) for _ in range(8)]
    assert costs == [220, 220] + [70] * 6


@pytest.mark.parametrize("reply_len", [1, 5])
def test_turn_of_an_append_only_chat_computes_what_is_new(reply_len: int) -> None:
    cache = make_cache(num_pages=1000)
    agent = Agent(cache)
    costs = [agent.turn(fresh(11), fresh(reply_len)) for _ in range(10)]
    # the last token of a reply was sampled and never absorbed
    assert costs == [11] + [12] * 9


def test_repeats_of_the_session_and_its_shared_head_are_both_reused() -> None:
    cache = make_cache(num_pages=4000)
    head = fresh(100)
    agents = [Agent(cache) for _ in range(8)]
    first = [agent.turn(joined(head, fresh(10)), fresh(4), (100,)) for agent in agents]
    assert first == [110] + [10] * 7
    for _ in range(3):
        assert [agent.turn(fresh(10), fresh(4)) for agent in agents] == [11] * 8


def test_parked_session_is_either_usable_or_gone() -> None:
    for num_pages in range(12, 60, 3):
        cache = make_cache(num_pages=num_pages)
        parked, others = Agent(cache), [Agent(cache), Agent(cache)]
        for _ in range(4):
            parked.turn(fresh(6), fresh(3))
        for _ in range(3):
            for other in others:
                if len(other.tokens) < 24:
                    other.turn(fresh(7), fresh(2))
                check(cache)
        match = cache.tree.match(cache.tree.root(NAMESPACE), parked.tokens, len(parked.tokens))
        assert match.lens[Kind.FULL] == match.known_len == match.boundary


def test_idle_sessions_never_block_a_new_one() -> None:
    cache = make_cache(num_pages=40)
    agents = [Agent(cache) for _ in range(100)]
    for agent in agents:
        assert agent.turn(fresh(20), fresh(4)) == 20
    check(cache)
    assert cache.pools.pages.num_free < 8, "the budget was never full"
    first = agents[0]
    assert first.turn(fresh(3), fresh(3)) == 24 + 3
    check(cache)


@pytest.mark.parametrize("policy", ["lru", "session-lru"])
def test_nobody_is_evicted_while_there_is_room_for_all(policy: str) -> None:
    def rounds(num_pages: int) -> tuple[HybridCache, list[int]]:
        cache = make_cache(num_pages=num_pages, policy=policy)
        agents = [Agent(cache) for _ in range(3)]
        for agent, length in zip(agents, (100, 150, 150), strict=True):
            agent.turn(fresh(length), fresh(2))
        return cache, [agent.turn(fresh(4), fresh(2)) for _ in range(5) for agent in agents]

    cache, costs = rounds(10_000)
    assert costs == [5] * 15
    need = cache.pools.pages.num_used
    cache, costs = rounds(need)
    assert costs == [5] * 15
    assert cache.metrics.group("evictions") == {}


def test_many_turns_keep_to_a_budget_of_three_checkpoints() -> None:
    turns, state_pages = 50, 5
    kv_pages = -(-turns * 9 // 4)
    cache = make_cache(num_pages=kv_pages + 3 * state_pages, state_pages=state_pages)
    agent = Agent(cache)
    costs = [agent.turn(fresh(6), fresh(3)) for _ in range(turns)]
    assert costs == [6] + [7] * (turns - 1)
    check(cache)
    assert cache.num_checkpoints <= 4
    assert cache.peak_pages()[1] <= cache.pools.pages.num_pages


def test_trajectory_larger_than_the_budget_fails_alone_and_leaves_it_usable() -> None:
    cache = make_cache(num_pages=20)
    agent = Agent(cache)
    agent.turn(fresh(8), fresh(2))
    with pytest.raises(OutOfPages):
        Agent(cache).turn(fresh(100), fresh(2))
    check(cache)
    assert cache.leases == set()
    assert agent.turn(fresh(3), fresh(2)) <= 13
    check(cache)


@pytest.mark.parametrize("length", [64, 65, 67])
def test_ten_forks_cost_ten_checkpoints_and_ten_tails(length: int) -> None:
    cache = make_cache(num_pages=400, min_gain=8)
    parent = Agent(cache)
    parent.turn(fresh(length), fresh(1))
    before, num_used = cache.used_pages(), cache.pools.pages.num_used
    forks = [parent.fork() for _ in range(10)]
    assert cache.pools.pages.num_used == num_used
    for fork in forks:
        # the token that the parent sampled last, and the fork's own; no branch point between them
        assert fork.turn(fresh(1), fresh(1)) == 2
    check(cache)
    after = cache.used_pages()
    assert after[Kind.FULL] - before[Kind.FULL] <= 10
    assert after[Kind.STATE] - before[Kind.STATE] == 10 * cache.pools.state_pages
    for fork in forks:
        fork.close()
    assert parent.turn(fresh(1), fresh(1)) == 2


def test_fork_keeps_the_tip_worth_what_it_was_while_the_parent_moves_on() -> None:
    cache = make_cache(num_pages=400)
    parent = Agent(cache)
    parent.turn(fresh(20), fresh(3))
    tip = parent.frontier
    assert tip is not None
    child = parent.fork()
    parent.turn(fresh(5), fresh(3))
    assert (tip.refs, tip.superseded) == (1, False)
    child.close()
    assert (tip.refs, tip.superseded) == (0, True)


def test_other_tenants_prompt_is_neither_reused_nor_visible() -> None:
    cache = make_cache()
    prompt = fresh(20)
    run(cache, prompt, structural=(16,), namespace=b"a")
    other = run(cache, prompt, structural=(16,), namespace=b"b")
    assert (other.boundary, other.match.known_len) == (0, 0)
    assert other.plan == (16,), "no branch point tells of the other tenant"
    assert run(cache, prompt, namespace=b"a").boundary == 16


def test_head_outlives_the_reply_headers_of_past_turns() -> None:
    """The head that every new session wants is the oldest of all, and must not go first."""
    cache = make_cache(num_pages=4000)
    agent, head = Agent(cache), fresh(40)
    for number in range(10):
        new = fresh(20) if number else np.concatenate([head, fresh(20)])
        end = len(agent.tokens) + len(new) - 3
        agent.turn(new, fresh(6), (40,), (end,))
    num_past_tips = 9
    for _ in range(num_past_tips + 3):
        cache.evict_one()
    assert known(cache, np.concatenate([head, fresh(20)])) == 40


def test_checkpoint_before_the_reply_header_is_superseded_by_the_next_one() -> None:
    cache = make_cache(num_pages=400)
    agent = Agent(cache)
    agent.turn(fresh(20), fresh(6), passing=(17,))
    header = cache.tree.match(cache.tree.root(NAMESPACE), agent.tokens[:17], 17).node
    assert header.end == 17
    agent.turn(fresh(20), fresh(6), passing=(len(agent.tokens) + 17,))
    assert header.superseded


def test_release_of_an_unfiled_request_is_no_eviction() -> None:
    cache = make_cache(num_pages=4, state_pages=2)
    lease = cache.acquire(NAMESPACE, fresh(12))
    cache.reserve(lease, 12)
    cache.commit(lease, fresh(12), 12, lease.row)
    cache.release(lease)
    assert cache.metrics.group("evictions") == {}


def test_head_that_live_sessions_share_does_not_leave_before_their_tips() -> None:
    """Each session that lost its tip comes back to the head; it must not be the first to go."""
    cache = make_cache(num_pages=4000)
    head = fresh(40)
    agents = [Agent(cache) for _ in range(3)]
    for agent in agents:
        agent.turn(joined(head, fresh(20)), fresh(6), structural=(40,))
    # One more session comes by, so that the head was wanted later than any tip.
    late = Agent(cache)
    late.turn(joined(head, fresh(20)), fresh(6), structural=(40,))
    for _ in range(len(agents)):
        cache.evict_one()
    assert known(cache, joined(head, fresh(5))) == 40
    assert known(cache, joined(late.tokens, fresh(5))) > 40


def test_head_of_sessions_that_are_over_makes_room_for_others() -> None:
    """A reference lasts as long as its session: stale heads must not starve anonymous prompts."""
    cache = make_cache(num_pages=4000)
    head, anonymous = fresh(40), fresh(30)
    agent = Agent(cache)
    agent.turn(joined(head, fresh(20)), fresh(6), structural=(40,))
    agent.close()
    run(cache, anonymous)
    while known(cache, joined(head, fresh(5))):
        assert cache.evict_one()
    assert known(cache, joined(anonymous, fresh(5))) == 30
