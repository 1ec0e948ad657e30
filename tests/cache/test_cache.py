"""The cache's doors, one by one: what is reused, who holds which page, and what is given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import (
    NAMESPACE,
    Agent,
    Shadow,
    absorb,
    check,
    ids,
    make_cache,
    run,
    tick,
    verify_prefix,
)
from testkit.strategies import array, tokens

from agentcache.cache import HybridCache, Lease, Match, OutOfPages
from agentcache.errors import LeaseError
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.tree.node import Node


def span(start: int, stop: int) -> IntArray:
    return np.arange(start, stop, dtype=np.int32)


def used(cache: HybridCache) -> int:
    return cache.pools.pages.num_used


def node_at(cache: HybridCache, sequence: IntArray) -> Node:
    match = cache.tree.match(cache.tree.root(NAMESPACE), sequence, len(sequence))
    assert match.boundary == len(sequence)
    return match.node


def boundary(cache: HybridCache, sequence: IntArray) -> int:
    """How far a prompt would be reused, without asking for it."""
    return cache.tree.match(cache.tree.root(NAMESPACE), sequence, len(sequence) - 1).boundary


def test_at_least_one_token_is_left_to_compute() -> None:
    cache = make_cache()
    run(cache, span(0, 6))
    run(cache, span(0, 9))
    assert run(cache, span(0, 9)).boundary == 6
    assert run(cache, span(0, 10)).boundary == 9


def test_exact_repeat_goes_on_from_a_boundary_before_the_end() -> None:
    cache = make_cache()
    run(cache, span(0, 9), structural=(8,))
    lease = run(cache, span(0, 9), structural=(8,))
    assert lease.boundary == 8
    assert lease.plan == ()


def test_limit_shortens_what_is_reused() -> None:
    cache = make_cache()
    for length in (3, 6, 9):
        run(cache, span(0, length))
    for limit, wanted in ((2, 0), (3, 3), (8, 6), (9, 9), (20, 9)):
        lease = cache.acquire(NAMESPACE, span(0, 12), limit=limit)
        assert lease.boundary == wanted
        cache.release(lease)


def test_mark_spares_the_walk_and_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    run(cache, span(0, 6))
    run(cache, span(0, 9))
    mark = cache.stand(node_at(cache, span(0, 9)))
    starts, match = [], cache.tree.match

    def listening(start: Node, *args: Any) -> Match:
        starts.append(start.end)
        return match(start, *args)

    monkeypatch.setattr(cache.tree, "match", listening)
    for known_len, wanted in ((9, 9), (8, 6), (6, 6), (5, 0), (0, 0)):
        sequence = np.concatenate([span(0, known_len), span(50, 60)])
        lease = cache.acquire(NAMESPACE, sequence, after=mark, known_len=known_len)
        assert lease.boundary == starts[-1] == wanted
        cache.release(lease)
    check(cache)


@pytest.mark.parametrize("held", [True, False])
def test_mark_whose_place_is_gone_starts_at_what_is_left(held: bool) -> None:
    cache = make_cache(policy="lru")
    run(cache, span(0, 6))
    run(cache, span(0, 9))
    mark = cache.stand(node_at(cache, span(0, 9)))
    if not held:
        cache.leave(mark)
    cache.evict_one()  # the older checkpoint
    run(cache, span(0, 6))
    while mark.frontier.alive:
        assert cache.evict_one()
    lease = cache.acquire(NAMESPACE, span(0, 12), after=mark, known_len=9)
    assert lease.boundary == boundary(cache, span(0, 12)) == 6
    cache.release(lease)
    cache.clear()
    lease = cache.acquire(NAMESPACE, span(0, 12), after=mark, known_len=9)
    assert lease.boundary == 0
    cache.release(lease)
    # filed again by somebody else, under other nodes
    run(cache, span(0, 9))
    lease = cache.acquire(NAMESPACE, span(0, 12), after=mark, known_len=9)
    assert lease.boundary == 9
    cache.release(lease)


def test_namespaces_reuse_nothing_of_each_other() -> None:
    cache = make_cache()
    run(cache, span(0, 9), namespace=b"a")
    assert run(cache, span(0, 12), namespace=b"b").boundary == 0
    assert run(cache, span(0, 12), namespace=b"a").boundary == 9
    check(cache)


def test_plan_holds_structure_and_the_branch_point() -> None:
    cache = make_cache()
    run(cache, span(0, 10))
    branch = np.concatenate([span(0, 6), span(50, 60)])
    lease = run(cache, branch, structural=(3, 12, 16))
    assert lease.match.known_len == 6
    assert lease.plan == (3, 6, 12)
    other = np.concatenate([span(0, 6), span(70, 80)])
    again = run(cache, other, structural=(3,))
    assert again.boundary == 6
    assert again.plan == ()
    check(cache)


def test_structure_inside_a_known_edge_is_filed_there() -> None:
    cache = make_cache(shadow=True)
    serve(cache, span(0, 12))
    sequence = np.concatenate([span(0, 10), span(50, 54)])
    lease = serve(cache, sequence, structural=(5,))
    assert lease.plan == (5, 10)
    for length in (5, 10, 12):
        assert boundary(cache, np.append(span(0, length), 99).astype(np.int32)) == length


def test_passing_boundaries_are_planned_but_no_structure() -> None:
    cache = make_cache()
    tick(cache)
    lease = cache.acquire(NAMESPACE, span(0, 12), structural=(4,), passing=(9, 30))
    assert lease.plan == (4, 9)
    cache.reserve(lease, 12)
    for length in lease.plan:
        assert cache.commit(lease, span(0, 12), length, lease.row)
    cache.release(lease)
    assert node_at(cache, span(0, 4)).structural
    assert not node_at(cache, span(0, 9)).structural


def test_row_is_a_private_copy_that_survives_the_eviction_of_its_source() -> None:
    cache = make_cache(shadow=True)
    serve(cache, span(0, 6))
    lease = cache.acquire(NAMESPACE, span(0, 12))
    cache.clear()
    verify_prefix(cache, lease, span(0, 12), 6)
    cache.reserve(lease, 12)
    absorb(cache, lease, span(0, 12), 6, 12)
    assert cache.commit(lease, span(0, 12), 12, lease.row)
    cache.release(lease)
    assert boundary(cache, span(0, 13)) == 12
    check(cache)


def test_state_is_loaded_before_room_is_made_for_the_tail() -> None:
    # four pages: two of KV, one checkpoint, and one that the first branch fills
    cache = make_cache(num_pages=4, state_pages=1, shadow=True)
    serve(cache, span(0, 6))
    first = cache.acquire(NAMESPACE, span(0, 8))
    cache.reserve(first, 9)
    assert cache.pools.pages.num_free == 0
    second = cache.acquire(NAMESPACE, span(0, 8))  # needs a copy, which costs the checkpoint
    assert second.boundary == 6
    verify_prefix(cache, second, span(0, 8), 6)
    assert cache.num_checkpoints == 0
    node = first.locked
    cache.release(first)
    tick(cache)
    cache.release(second)
    check(cache)
    assert used(cache) == 0
    assert node.evicted_at == 2.0


def test_own_next_turn_goes_on_in_the_partial_page() -> None:
    cache = make_cache()
    run(cache, span(0, 6))
    before = used(cache)
    lease = cache.acquire(NAMESPACE, span(0, 8))
    cache.reserve(lease, 8)
    assert used(cache) == before, "the page was copied"
    tail = node_at(cache, span(0, 6)).data[Kind.FULL].slots[-1]
    assert lease.table.last == tail
    cache.release(lease)
    check(cache)


def test_second_branch_copies_the_partial_page() -> None:
    cache = make_cache(shadow=True)
    serve(cache, span(0, 6))
    before = used(cache)
    first = cache.acquire(NAMESPACE, span(0, 8))
    assert used(cache) == before
    other = np.concatenate([span(0, 6), span(50, 52)])
    second = cache.acquire(NAMESPACE, other)
    assert used(cache) == before + 1
    assert second.table.last != first.table.last
    for lease, sequence in ((first, span(0, 8)), (second, other)):
        cache.reserve(lease, 8)
        absorb(cache, lease, sequence, 6, 8)
        assert cache.commit(lease, sequence, 8, lease.row)
    cache.release(first)
    cache.release(second)
    check(cache)
    # both ends are whole pages of their own branch
    for sequence in (span(0, 9), np.append(other, 7).astype(np.int32)):
        lease = cache.acquire(NAMESPACE, sequence)
        assert lease.boundary == 8
        verify_prefix(cache, lease, sequence, 8)
        cache.release(lease)


def test_branch_after_the_page_was_filled_copies_it_too() -> None:
    cache = make_cache(shadow=True)
    serve(cache, span(0, 6))
    serve(cache, span(0, 8))
    before = used(cache)
    lease = cache.acquire(NAMESPACE, np.concatenate([span(0, 6), span(50, 52)]))
    assert lease.boundary == 6
    assert used(cache) == before + 1
    cache.release(lease)
    assert used(cache) == before
    check(cache)


def test_request_that_filed_nothing_gives_the_rest_of_the_page_back() -> None:
    cache = make_cache(shadow=True)
    serve(cache, span(0, 6))
    before = used(cache)
    for _ in range(3):
        lease = cache.acquire(NAMESPACE, span(0, 8))
        assert used(cache) == before
        cache.reserve(lease, 8)
        absorb(cache, lease, span(0, 8), 6, 8)
        cache.release(lease)
        check(cache)
    assert used(cache) == before


def test_request_cut_short_leaves_the_page_to_go_on_where_it_filed_last() -> None:
    cache = make_cache(page_size=8, shadow=True)
    lease = cache.acquire(NAMESPACE, span(0, 12))
    cache.reserve(lease, 12)
    absorb(cache, lease, span(0, 12), 0, 3)
    assert cache.commit(lease, span(0, 12), 3, lease.row)
    absorb(cache, lease, span(0, 12), 3, 11)
    cache.release(lease)
    check(cache)
    before = used(cache)
    sequence = np.concatenate([span(0, 3), span(60, 64)])
    lease = cache.acquire(NAMESPACE, sequence)
    assert lease.boundary == 3
    assert used(cache) == before, "the page was copied"
    cache.reserve(lease, 7)
    absorb(cache, lease, sequence, 3, 7)
    cache.release(lease)


def test_boundary_at_a_page_border_neither_claims_nor_copies() -> None:
    cache = make_cache()
    run(cache, span(0, 8))
    before = used(cache)
    lease = cache.acquire(NAMESPACE, span(0, 12))
    assert lease.boundary == 8
    assert lease.own == []
    assert used(cache) == before
    cache.release(lease)


def test_pages_of_a_request_follow_one_another() -> None:
    cache = make_cache()
    lease = cache.acquire(NAMESPACE, span(0, 40))
    for length in range(1, 41):
        cache.reserve(lease, length)
        assert lease.table.capacity - length < 4
    assert list(lease.table.runs(0, 40)) == [(0, 40)]
    assert cache.commit(lease, span(0, 40), 40, lease.row)
    cache.release(lease)
    check(cache)


def test_next_pages_are_neighbours_though_lower_ones_are_free() -> None:
    cache = make_cache()
    run(cache, span(0, 16))
    lease = cache.acquire(NAMESPACE, span(50, 80))
    cache.reserve(lease, 8)
    cache.clear()
    cache.reserve(lease, 20)
    assert list(lease.table.runs(0, 20)) == [(16, 20)]
    cache.release(lease)


def test_equal_prompts_at_once_end_as_one_copy() -> None:
    cache = make_cache(shadow=True)
    leases = [cache.acquire(NAMESPACE, span(0, 11)) for _ in range(2)]
    for lease in leases:
        assert lease.boundary == 0
        cache.reserve(lease, 10)
        absorb(cache, lease, span(0, 11), 0, 10)
    for lease in leases:
        assert cache.commit(lease, span(0, 11), 10, lease.row)
        check(cache)
    assert cache.num_checkpoints == 1
    first, second = leases
    cache.release(first)
    # the second goes on from its own pages
    absorb(cache, second, span(0, 11), 10, 11)
    assert cache.commit(second, span(0, 11), 11, second.row)
    cache.release(second)
    check(cache)
    # three pages of the first, the second's own copy of the last, two checkpoints of two pages
    assert used(cache) == 3 + 1 + 2 * 2
    lease = cache.acquire(NAMESPACE, span(0, 14))
    verify_prefix(cache, lease, span(0, 14), 11)
    cache.release(lease)


def serve(
    cache: HybridCache, sequence: IntArray, *, structural: tuple[int, ...] = (), chunk: int = 99
) -> Lease:
    """`run`, with a shadow of the model's work that is verified at every step."""
    tick(cache)
    lease = cache.acquire(NAMESPACE, sequence, structural=structural)
    stops = {*lease.plan, *range(lease.boundary + chunk, len(sequence), chunk), len(sequence)}
    at = lease.boundary
    for stop in sorted(stops):
        cache.reserve(lease, stop)
        absorb(cache, lease, sequence, at, stop)
        at = stop
        if stop in lease.plan or stop == len(sequence):
            assert cache.commit(lease, sequence, stop, lease.row)
            check(cache)
    cache.release(lease)
    check(cache)
    return lease


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("chunk", [1, 5, 99])
def test_odd_lengths_are_filed_under_exactly_their_tokens(page_size: int, chunk: int) -> None:
    cache = make_cache(num_pages=400, page_size=page_size, shadow=True)
    trunk = span(0, 40)
    for length in (1, 2, 7, 8, 9, 15, 16, 17, 31, 40):
        lease = serve(cache, trunk[:length], structural=(length // 2,), chunk=chunk)
        assert lease.boundary < length
    for cut in (1, 3, 8, 16, 20, 33):
        branch = np.concatenate([trunk[:cut], span(100 + cut, 112 + cut)])
        serve(cache, branch, structural=(cut + 1,), chunk=chunk)
        again = serve(cache, np.append(branch, 99).astype(np.int32), chunk=chunk)
        assert again.boundary == len(branch)


def test_second_request_shares_what_the_first_filed_while_it_runs() -> None:
    cache = make_cache(shadow=True)
    first = cache.acquire(NAMESPACE, span(0, 12), structural=(6,))
    assert first.plan == (6,)
    cache.reserve(first, 12)
    absorb(cache, first, span(0, 12), 0, 6)
    assert cache.commit(first, span(0, 12), 6, first.row)
    branch = np.concatenate([span(0, 6), span(50, 54)])
    second = cache.acquire(NAMESPACE, branch)
    assert second.boundary == 6
    cache.reserve(second, 10)
    absorb(cache, second, branch, 6, 10)
    absorb(cache, first, span(0, 12), 6, 12)
    for lease, sequence in ((second, branch), (first, span(0, 12))):
        assert cache.commit(lease, sequence, len(sequence), lease.row)
        cache.release(lease)
        check(cache)
    assert first.committed_len == 12


def test_commit_behind_what_is_filed_changes_nothing() -> None:
    cache = make_cache()
    lease = cache.acquire(NAMESPACE, span(0, 12))
    cache.reserve(lease, 12)
    assert not cache.commit(lease, span(0, 12), 0, lease.row), "nothing is no boundary"
    assert cache.commit(lease, span(0, 12), 8, lease.row)
    before = used(cache)
    assert not cache.commit(lease, span(0, 12), 5, lease.row)
    assert cache.commit(lease, span(0, 12), 8, lease.row)
    assert used(cache) == before
    assert lease.committed_len == 8
    assert [node.end for node in lease.filed] == [8]
    cache.release(lease)


def test_checkpoint_can_be_filed_from_another_row() -> None:
    cache = make_cache(shadow=True)
    pools = cache.pools
    assert isinstance(pools, Shadow)
    staging = pools.rows.num_rows
    pools.absorbed.append(None)
    lease = cache.acquire(NAMESPACE, span(0, 10), structural=(7,))
    cache.reserve(lease, 10)
    absorb(cache, lease, span(0, 10), 0, 10)
    pools.absorbed[staging] = tuple(range(7))
    assert cache.commit(lease, span(0, 10), 7, staging)
    assert cache.commit(lease, span(0, 10), 10, lease.row)
    cache.release(lease)
    for length in (7, 10):
        sequence = np.append(span(0, length), 99).astype(np.int32)
        lease = cache.acquire(NAMESPACE, sequence)
        assert lease.boundary == length
        verify_prefix(cache, lease, sequence, length)
        cache.release(lease)


def test_structural_boundaries_are_remembered_and_others_are_not() -> None:
    cache = make_cache()
    run(cache, span(0, 10), structural=(4,))
    assert node_at(cache, span(0, 4)).structural
    assert not node_at(cache, span(0, 10)).structural
    run(cache, span(0, 12), structural=(10,))
    assert not node_at(cache, span(0, 10)).structural, "it was reused, not filed"


def test_request_without_room_for_its_checkpoint_goes_on_unfiled() -> None:
    cache = make_cache(num_pages=4, state_pages=2)
    lease = cache.acquire(NAMESPACE, span(0, 12))
    cache.reserve(lease, 12)
    assert not cache.commit(lease, span(0, 12), 12, lease.row)
    assert cache.metrics.get("unfiled", "state") == 1
    assert lease.filed == []
    check(cache)
    cache.reserve(lease, 16)
    cache.release(lease)
    check(cache)
    assert used(cache) == 0
    assert list(cache.tree.nodes()) == []


def test_released_lease_opens_no_door_any_more() -> None:
    cache = make_cache()
    lease = cache.acquire(NAMESPACE, span(0, 6))
    cache.release(lease)
    for door in (
        lambda: cache.release(lease),
        lambda: cache.reserve(lease, 6),
        lambda: cache.commit(lease, span(0, 6), 6, lease.row),
        lambda: cache.suspend(lease, span(0, 6), 6),
    ):
        with pytest.raises(LeaseError):
            door()
    assert cache.pools.rows.num_free == cache.pools.rows.num_rows
    check(cache)


@pytest.mark.parametrize("filed", [0, 7])
def test_release_gives_everything_back_but_what_is_filed(filed: int) -> None:
    cache = make_cache()
    run(cache, span(0, 6))
    before = used(cache)
    lease = cache.acquire(NAMESPACE, span(0, 30))
    cache.reserve(lease, 30)
    if filed:
        assert cache.commit(lease, span(0, 30), filed, lease.row)
    cache.release(lease)
    assert cache.leases == set()
    assert used(cache) == before + (2 if filed else 0)
    check(cache)


def test_suspended_request_goes_on_from_its_frontier() -> None:
    cache = make_cache(shadow=True)
    sequence = span(0, 20)
    lease = cache.acquire(NAMESPACE, sequence)
    cache.reserve(lease, 13)
    absorb(cache, lease, sequence, 0, 13)
    assert cache.suspend(lease, sequence, 13)
    assert cache.leases == set()
    assert cache.pools.rows.num_free == cache.pools.rows.num_rows
    check(cache)
    again = cache.acquire(NAMESPACE, sequence)
    assert again.boundary == 13
    verify_prefix(cache, again, sequence, 13)
    cache.release(again)


def test_request_suspended_before_it_began_leaves_nothing() -> None:
    cache = make_cache()
    lease = cache.acquire(NAMESPACE, span(0, 20))
    assert not cache.suspend(lease, span(0, 20), 0)
    assert used(cache) == 0
    check(cache)


def test_clear_frees_what_is_idle_and_leaves_who_runs() -> None:
    cache = make_cache(shadow=True)
    serve(cache, span(0, 10), structural=(5,))
    serve(cache, span(40, 50))
    lease = cache.acquire(NAMESPACE, span(0, 16))
    before = used(cache)
    freed = cache.clear()
    assert freed == (before - used(cache)) * cache.pools.page_bytes > 0
    assert used(cache) == 3, "the pages that the request reads"
    check(cache)
    cache.reserve(lease, 16)
    absorb(cache, lease, span(0, 16), 10, 16)
    assert cache.commit(lease, span(0, 16), 16, lease.row)
    cache.release(lease)
    assert boundary(cache, span(0, 17)) == 16
    assert cache.clear() > 0
    assert used(cache) == 0
    assert list(cache.tree.nodes()) == []
    assert cache.clear() == 0


def leaving(cache: HybridCache, agents: dict[str, Agent]) -> list[str]:
    """Evicts everything; the names of trajectories in the order in which their tips went."""
    out = []
    while cache.evict_one():
        check(cache)
        gone = [
            name
            for name, agent in agents.items()
            if agent.frontier is not None and Kind.STATE not in agent.frontier.data
        ]
        out.extend(name for name in gone if name not in out)
    return out


def test_unreferenced_leaves_before_referenced_whatever_their_age() -> None:
    cache = make_cache(num_pages=20)  # of which one entry is more than the ordinary ones' share
    agents = {name: Agent(cache) for name in ("held", "idle", "over")}
    for number, agent in enumerate(agents.values()):
        agent.turn(span(10 * number, 10 * number + 5), ids(90, 91))
    agents["over"].close()
    ref = agents["idle"].ref
    assert ref is not None
    cache.leave(ref)
    idle = agents["idle"].frontier
    assert idle is not None
    idle.superseded = False
    cache.refs._reorder(idle)
    assert leaving(cache, agents) == ["over", "idle", "held"]


def test_lru_does_not_ask_who_is_alive() -> None:
    cache = make_cache(policy="lru")
    agents = {name: Agent(cache) for name in ("first", "second", "third")}
    for number, agent in enumerate(agents.values()):
        agent.turn(span(10 * number, 10 * number + 5), ids(90, 91))
    agents["third"].close()
    assert leaving(cache, agents) == ["first", "second", "third"]


def test_reuse_makes_an_entry_young_again() -> None:
    cache = make_cache()
    agents = {name: Agent(cache) for name in ("first", "second")}
    for number, agent in enumerate(agents.values()):
        agent.turn(span(10 * number, 10 * number + 5), ids(90, 91))
        agent.close()
    first = agents["first"]
    assert run(cache, first.tokens, commit=False).boundary == 6
    assert first.frontier is not None
    assert not first.frontier.superseded
    assert leaving(cache, agents) == ["second", "first"]


def test_recency_is_that_of_use_not_of_news_about_sessions() -> None:
    cache = make_cache(policy="lru")
    agents = {name: Agent(cache) for name in ("first", "second")}
    for number, agent in enumerate(agents.values()):
        agent.turn(span(10 * number, 10 * number + 5), ids(90, 91))
        assert agent.frontier is not None
        assert agent.frontier.last_access == number + 1.0
    tick(cache)
    agents["first"].close()
    assert leaving(cache, agents) == ["first", "second"]


def test_checkpoint_a_request_goes_on_from_is_not_the_next_to_leave() -> None:
    cache = make_cache()
    agents = {name: Agent(cache) for name in ("past", "idle")}
    for number, agent in enumerate(agents.values()):
        agent.turn(span(10 * number, 10 * number + 5), ids(90, 91))
    agents["past"].close()
    tick(cache)
    agents["idle"].close()
    idle = agents["idle"].frontier
    assert idle is not None
    idle.superseded = False
    cache.refs._reorder(idle)
    tick(cache)
    lease = cache.acquire(NAMESPACE, agents["past"].tokens)
    assert lease.boundary == 6
    assert cache.evict_one()
    assert idle.generation == 1
    assert Kind.STATE in lease.locked.data
    assert lease.locked.last_access == 4.0
    cache.release(lease)


def test_checkpoint_filed_on_the_way_can_be_evicted_while_its_request_runs() -> None:
    cache = make_cache()
    lease = cache.acquire(NAMESPACE, span(0, 9))
    cache.reserve(lease, 9)
    tick(cache)
    assert cache.commit(lease, span(0, 9), 5, lease.row)
    assert lease.locked.last_access == 1.0
    assert cache.num_checkpoints == 1
    assert cache.evict_one()
    assert cache.num_checkpoints == 0
    assert not cache.evict_one()
    cache.release(lease)
    check(cache)
    assert used(cache) == 0


def test_entry_passed_over_while_it_was_read_can_be_evicted_later() -> None:
    cache = make_cache(state_pages=0)
    run(cache, span(0, 6))
    lease = cache.acquire(NAMESPACE, span(0, 9))
    assert not cache.evict_one()
    cache.release(lease)
    assert cache.evict_one()
    assert used(cache) == 0


def test_checkpoints_a_trajectory_has_moved_past_leave_first() -> None:
    cache = make_cache()
    agent, other = Agent(cache), Agent(cache)
    other.turn(span(50, 55), ids(90))
    other_tip = other.frontier
    ends = []
    for number in range(3):
        agent.turn(span(4 * number, 4 * number + 3), ids(80 + number))
        ends.append(agent.frontier)
    gone = []
    for _ in range(2):
        assert cache.evict_one()
        gone.append([node is not None and Kind.STATE in node.data for node in ends])
    # the hole from 3 to 11 is smaller, for its depth, than that from 0 to 7
    assert gone == [[True, False, True], [False, False, True]]
    assert other_tip is not None
    assert Kind.STATE in other_tip.data
    assert boundary(cache, np.append(agent.tokens, 1).astype(np.int32)) == len(agent.tokens) - 1


def test_inner_checkpoint_leaves_without_its_node() -> None:
    cache = make_cache()
    run(cache, span(0, 6))
    run(cache, span(0, 12))
    inner = node_at(cache, span(0, 6))
    before = used(cache)
    assert cache.evict_one()
    assert set(inner.data) == {Kind.FULL}
    assert used(cache) == before - 2
    assert inner.evicted_at == 2.0
    assert cache.metrics.group("evictions") == {"state": 1}
    assert boundary(cache, span(0, 8)) == 0, "KV alone is no boundary"
    assert boundary(cache, span(0, 13)) == 12
    leaf = node_at(cache, span(0, 12))
    tick(cache)
    assert cache.evict_one()
    assert used(cache) == 0
    assert leaf.evicted_at == 3.0
    assert cache.metrics.group("evictions") == {"state": 2, "full": 2}


def test_references_never_pin_what_the_budget_needs() -> None:
    cache = make_cache(num_pages=16, state_pages=2)
    agents = [Agent(cache) for _ in range(4)]
    for number, agent in enumerate(agents):
        agent.turn(span(10 * number, 10 * number + 6), ids(90))
    lease = cache.acquire(NAMESPACE, span(100, 164))
    cache.reserve(lease, 64)
    assert used(cache) == 16
    cache.release(lease)
    check(cache)
    assert used(cache) == 0
    for agent in agents:
        agent.turn(ids(1), ids(2))
        agent.close()
    check(cache)


def test_what_a_request_reads_is_never_evicted() -> None:
    cache = make_cache(num_pages=16, state_pages=2, shadow=True)
    serve(cache, span(0, 10), structural=(5,))
    lease = cache.acquire(NAMESPACE, span(0, 12))
    hungry = cache.acquire(NAMESPACE, span(50, 99))
    with pytest.raises(OutOfPages):
        cache.reserve(hungry, 4 * 16)
    verify_prefix(cache, lease, span(0, 12), 10)
    cache.release(lease)
    cache.release(hungry)
    check(cache)


def test_reservation_that_does_not_fit_takes_nothing() -> None:
    cache = make_cache(num_pages=8)
    lease = cache.acquire(NAMESPACE, span(0, 20))
    cache.reserve(lease, 9)
    before = used(cache)
    with pytest.raises(OutOfPages, match="2 pages short") as short:
        cache.reserve(lease, 40)
    assert short.value.missing == 2
    assert (len(lease.table), used(cache)) == (3, before)
    check(cache)
    cache.reserve(lease, 32)
    assert cache.pools.pages.num_free == 0
    cache.release(lease)
    assert used(cache) == 0


def test_acquisition_without_a_row_takes_nothing() -> None:
    cache = make_cache(num_rows=1)
    run(cache, span(0, 6))
    lease = cache.acquire(NAMESPACE, span(40, 50))
    before, locks = used(cache), node_at(cache, span(0, 6)).locks
    with pytest.raises(OutOfPages):
        cache.acquire(NAMESPACE, span(0, 9))
    assert (used(cache), node_at(cache, span(0, 6)).locks) == (before, locks)
    check(cache)
    cache.release(lease)
    assert run(cache, span(0, 9)).boundary == 6


def test_acquisition_without_a_page_for_its_tail_takes_nothing() -> None:
    cache = make_cache(num_pages=3, state_pages=0)
    run(cache, span(0, 6))
    first = cache.acquire(NAMESPACE, span(0, 12))
    cache.reserve(first, 12)
    assert cache.pools.pages.num_free == 0
    node, rows = node_at(cache, span(0, 6)), cache.pools.rows.num_free
    with pytest.raises(OutOfPages):
        cache.acquire(NAMESPACE, span(0, 9))  # the page is claimed, and there is none to copy to
    assert (node.locks, cache.pools.rows.num_free, used(cache)) == (1, rows, 3)
    check(cache)
    cache.release(first)
    assert run(cache, span(0, 9)).boundary == 6


class Injected(Exception):
    """What the tests make fail."""


def request(cache: HybridCache) -> None:
    """A request that resumes inside a page, files on the way and always ends."""
    sequence = np.concatenate([span(0, 6), span(50, 60)])
    lease = cache.acquire(NAMESPACE, sequence, structural=(9,))
    try:
        cache.reserve(lease, 16)
        for length in (*lease.plan, 16):
            cache.commit(lease, sequence, length, lease.row)
    finally:
        cache.release(lease)


@pytest.mark.parametrize(
    "name", ["load_state", "copy_tail", "save_state", "clear_state", "alloc", "alloc_scattered"]
)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("warm", [True, False])
def test_fault_anywhere_gives_everything_back(name: str, at: int, warm: bool) -> None:
    cache = make_cache(shadow=True)
    pools: Any = cache.pools
    if warm:
        serve(cache, span(0, 6))
        serve(cache, span(0, 8))  # so that the request has to copy the page it resumes in
    rows, pages = pools.rows.num_free, used(cache)
    owner: Any = pools.pages if name.startswith("alloc") else pools
    original: Callable[..., Any] = getattr(owner, name)
    count = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise Injected
        return original(*args, **kwargs)

    setattr(owner, name, failing)
    try:
        request(cache)
    except Injected:
        assert count == at
    finally:
        setattr(owner, name, original)
    assert pools.rows.num_free == rows
    assert cache.leases == set()
    check(cache)
    if count < at:
        return  # the request never did this so often
    if at == 1:
        assert used(cache) == pages
    cache.clear()
    assert used(cache) == 0
    serve(cache, np.concatenate([span(0, 6), span(50, 60)]), structural=(9,))


def test_pages_are_counted_by_kind_and_peaks_are_kept() -> None:
    cache = make_cache()
    assert cache.used_pages() == {Kind.FULL: 0, Kind.STATE: 0}
    run(cache, span(0, 10), structural=(4,))
    assert cache.used_pages() == {Kind.FULL: 3, Kind.STATE: 4}
    assert cache.peak_pages() == ({Kind.FULL: 3, Kind.STATE: 4}, 7)
    cache.clear()
    assert cache.used_pages() == {Kind.FULL: 0, Kind.STATE: 0}
    run(cache, span(20, 40), commit=False)
    assert cache.used_pages() == {Kind.FULL: 0, Kind.STATE: 0}
    assert cache.peak_pages() == ({Kind.FULL: 5, Kind.STATE: 4}, 7)


def test_peak_counts_the_copy_of_a_tail() -> None:
    cache = make_cache()
    run(cache, span(0, 6))
    leases = [cache.acquire(NAMESPACE, span(0, 8)) for _ in range(3)]
    assert cache.used_pages()[Kind.FULL] == 4
    for lease in leases:
        cache.release(lease)
    assert cache.used_pages()[Kind.FULL] == 2
    assert cache.peak_pages()[0][Kind.FULL] == 4


def test_what_was_filed_and_reused_is_counted() -> None:
    cache = make_cache()
    run(cache, span(0, 10), structural=(4,))
    run(cache, span(0, 13))
    assert cache.metrics.group("filed") == {"full": 13, "state": 3}
    assert cache.metrics.group("reused") == {"state": 1}


def test_model_without_attention_keeps_checkpoints_only() -> None:
    cache = make_cache(kv=False, num_pages=3, state_pages=1, shadow=True)
    for length in (5, 9, 12):
        lease = serve(cache, span(0, length))
        cache_len = lease.boundary
    assert cache_len == 9
    assert used(cache) == 3
    serve(cache, span(0, 14))
    assert used(cache) == 3
    assert boundary(cache, span(0, 6)) == 0, "the oldest checkpoint left"
    assert boundary(cache, span(0, 15)) == 14


def test_model_without_state_reuses_kv_alone() -> None:
    cache = make_cache(state_pages=0, shadow=True)
    serve(cache, span(0, 6))
    lease = serve(cache, span(0, 9), structural=(7,))
    assert lease.boundary == 6
    assert lease.plan == (7,)
    assert node_at(cache, span(0, 7)).structural, "what others share does not leave with this end"
    assert cache.num_checkpoints == 0
    assert used(cache) == 3
    cache.clear()
    assert used(cache) == 0


LAYOUTS: list[dict[str, Any]] = [
    {"state_pages": 1},
    {"state_pages": 2},
    {"state_pages": 0},
    {"state_pages": 1, "kv": False},
    {"state_pages": 0, "window": 5, "swa_page": 2},
    {"state_pages": 0, "window": 5, "swa_page": 3, "kv": False},
    {"state_pages": 1, "window": 5, "swa_page": 2},
]


class Walk:
    """Requests in any order over pools that remember what every slot holds."""

    def __init__(self, **layout: Any) -> None:
        self.cache = make_cache(num_rows=3, shadow=True, **layout)
        self.running: list[tuple[IntArray, Lease, int]] = []

    def start(self, sequence: IntArray, mark: int) -> None:
        tick(self.cache)
        wanted = boundary(self.cache, sequence)
        try:
            lease = self.cache.acquire(NAMESPACE, sequence, structural=(mark,))
        except OutOfPages:
            return
        assert lease.boundary == wanted
        verify_prefix(self.cache, lease, sequence, wanted)
        self.running.append((sequence, lease, wanted))

    def step(self, which: int, amount: int, commit: bool) -> None:
        sequence, lease, at = self.running.pop(which % len(self.running))
        stop = min(at + amount, len(sequence))
        try:
            self.cache.reserve(lease, stop)
        except OutOfPages:
            self.cache.suspend(lease, sequence, at)
            return
        absorb(self.cache, lease, sequence, at, stop)
        if commit:
            self.cache.commit(lease, sequence, stop, lease.row)
        self.running.append((sequence, lease, stop))

    def end(self, which: int, commit: bool) -> None:
        sequence, lease, at = self.running.pop(which % len(self.running))
        if commit:
            self.cache.suspend(lease, sequence, at)
        else:
            self.cache.release(lease)


@given(
    st.sampled_from([1, 3, 4]),
    st.sampled_from(LAYOUTS),
    st.sampled_from([14, 40]),
    st.lists(
        st.tuples(
            st.sampled_from(["start", "start", "step", "step", "step", "end", "evict"]),
            tokens(max_size=20),
            st.integers(0, 20),
            st.booleans(),
        ),
        max_size=40,
    ),
)
def test_every_resumed_request_reads_the_kv_and_state_of_its_own_tokens(
    page_size: int,
    layout: dict[str, Any],
    num_pages: int,
    steps: list[tuple[str, list[int], int, bool]],
) -> None:
    walk = Walk(page_size=page_size, num_pages=num_pages, **layout)
    for what, sequence, number, flag in steps:
        if what == "start":
            walk.start(array(sequence), number)
        elif what == "evict":
            walk.cache.evict_one()
        elif walk.running and what == "step":
            walk.step(number, 1 + number % 7, flag)
        elif walk.running:
            walk.end(number, flag)
        check(walk.cache)
    while walk.running:
        walk.end(0, False)
    walk.cache.clear()
    assert used(walk.cache) == 0
    pools = walk.cache.pools
    assert isinstance(pools, Shadow)
    assert pools.arena == [None] * num_pages, "freed pages were not declared free"
