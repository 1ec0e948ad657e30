"""Who leaves first: the keys of the policies, and the order that keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import Forest, ids

from agentcache.errors import ConfigError, UnknownPolicy
from agentcache.policy.eviction import make_policy
from agentcache.policy.ranked import EvictionOrder, RankedPolicy
from agentcache.tree.node import Node, Residency
from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.policy.base import Key, Rank


def node(
    last_access: float,
    *,
    refs: int = 0,
    superseded: bool = False,
    expires: float | None = None,
    num_pages: int = 0,
) -> Node:
    made = Node(0, ids(1), None, 1)
    made.last_access, made.refs, made.superseded = last_access, refs, superseded
    made.expires = expires
    hold_pages(made, num_pages)
    return made


def hold_pages(of: Node, num_pages: int) -> None:
    of.data[Kind.FULL] = Residency(np.zeros(num_pages, dtype=np.int32), 0)


def order_of(policy: str, num_pages: int = 0) -> EvictionOrder:
    order = make_policy(policy).order(num_pages)
    assert isinstance(order, EvictionOrder)
    return order


def drain(order: EvictionOrder, now: float = 0.0) -> list[Node]:
    out = []
    while (first := order.pop(now)) is not None:
        out.append(first)
    return out


def ordered(policy: str, *nodes: Node) -> list[Node]:
    order = order_of(policy)
    for each in nodes:
        order.push(each, 0.0)
    return drain(order)


def test_lru_asks_for_recency_only() -> None:
    tip, old, past = node(1, refs=1), node(2), node(3, superseded=True)
    assert ordered("lru", past, old, tip) == [tip, old, past]


def test_session_lru_takes_superseded_then_unreferenced_then_tips() -> None:
    tip, old_tip = node(2, refs=3), node(1, refs=1)
    idle, old_idle = node(4), node(3)
    past, old_past = node(9, superseded=True), node(8, superseded=True)
    referenced_past = node(7, refs=1, superseded=True)
    nodes = [tip, idle, past, old_idle, old_past, old_tip, referenced_past]
    assert ordered("session-lru", *nodes) == [
        past,
        old_past,
        old_idle,
        idle,
        old_tip,
        tip,
        referenced_past,
    ]


def test_number_of_references_does_not_matter() -> None:
    many, one = node(1, refs=9), node(2, refs=1)
    assert ordered("session-lru", one, many) == [many, one]


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(UnknownPolicy, match=r"'fifo'.*auto, gdsf, .*lru, marconi") as error:
        make_policy("fifo")
    assert error.value.name == "fifo"
    assert isinstance(error.value, ConfigError)


def test_nodes_of_equal_rank_leave_in_the_order_they_came() -> None:
    nodes = [node(1) for _ in range(5)]
    assert ordered("lru", *nodes) == nodes


def test_node_pushed_anew_leaves_once_and_at_its_new_place() -> None:
    order = order_of("lru")
    a, b = node(1), node(2)
    order.push(a, 0.0)
    order.push(b, 0.0)
    a.last_access = 3
    order.push(a, 0.0)
    assert drain(order) == [b, a]
    assert order.pop(0.0) is None


def test_node_taken_out_comes_back_only_when_pushed_again() -> None:
    order = order_of("lru")
    a = node(1)
    order.push(a, 0.0)
    order.push(a, 0.0)
    assert order.pop(0.0) is a
    assert order.pop(0.0) is None
    order.push(a, 0.0)
    assert order.pop(0.0) is a


def test_node_that_left_the_tree_is_skipped() -> None:
    order = order_of("lru")
    gone, stays = node(1), node(2)
    order.push(gone, 0.0)
    order.push(stays, 0.0)
    gone.generation += 1
    order.push(gone, 0.0)
    assert drain(order) == [stays]


def test_order_of_few_nodes_stays_small_over_many_changes() -> None:
    order = order_of("lru")
    nodes = [node(0) for _ in range(10)]
    rng = np.random.default_rng(0)
    largest = 0
    for time in range(100_000):
        each = nodes[int(rng.integers(10))]
        each.last_access = float(time)
        order.push(each, 0.0)
        largest = max(largest, len(order._heaps[0]))
    assert largest <= 1025
    assert drain(order) == sorted(nodes, key=lambda n: n.last_access)


def test_compaction_takes_only_what_is_stale() -> None:
    order = order_of("lru")
    nodes = [node(float(at)) for at in range(3000)]
    for each in nodes:
        order.push(each, 0.0)
    for each in nodes[::3]:
        order.remove(each)
    for each in nodes[1::3]:
        each.last_access += 10_000
        order.push(each, 0.0)
    for _ in range(3):
        for each in nodes[2::3]:
            order.push(each, 0.0)
    assert drain(order) == [*nodes[2::3], *nodes[1::3]]


def test_reference_that_expired_is_an_ordinary_entry() -> None:
    order = order_of("session-lru")
    expired, live = node(1, refs=1, expires=5.0), node(0, refs=1, expires=9.0)
    old, young = node(0.5), node(2)
    for each in (expired, live, young, old):
        order.push(each, 0.0)
    assert order.pop(4.9) is old
    assert drain(order, 5.0) == [expired, young, live]


def expected(last_access: float, due: float, *, structural: bool = False) -> Node:
    """The tip of a session whose turns came at even gaps so far."""
    made = node(last_access, refs=1, expires=1000.0)
    made.due, made.structural = due, structural
    return made


def test_tips_of_sessions_that_take_turns_leave_last_and_the_one_expected_last_first() -> None:
    order = order_of("session-lru")
    soon, late, once = expected(5, due=12.0), expected(4, due=18.0), node(6, refs=1)
    ordinary = node(9)
    for each in (soon, late, once, ordinary):
        order.push(each, 0.0)
    assert drain(order, 10.0) == [ordinary, once, late, soon]


def test_session_that_stays_away_for_several_of_its_gaps_is_no_longer_expected() -> None:
    away, once, back = expected(4, due=6.0), node(5, refs=1), expected(4, due=20.0)

    def left(now: float) -> list[Node]:
        order, ordinary = order_of("session-lru"), node(9)
        for each in (away, once, back, ordinary):
            order.push(each, 7.0)
        assert order.pop(7.0) is ordinary
        return drain(order, now)

    assert left(9.9) == [once, back, away]
    assert left(10.0) == [away, once, back]


def test_reference_expires_though_its_session_is_expected() -> None:
    order = order_of("session-lru")
    tip, first, ordinary = expected(4, due=900.0), node(1), node(5)
    tip.expires = 30.0
    for each in (tip, first, ordinary):
        order.push(each, 7.0)
    assert order.pop(29.9) is first
    assert drain(order, 30.0) == [tip, ordinary]


def test_shared_boundary_above_live_tips_leaves_after_them() -> None:
    order = order_of("session-lru")
    head, tip = expected(1, due=9.0, structural=True), expected(4, due=20.0)
    for each in (head, tip):
        order.push(each, 7.0)
    assert drain(order, 7.0) == [tip, head]


def test_reference_without_a_time_never_expires() -> None:
    order = order_of("session-lru")
    forever, idle = node(1, refs=1), node(2)
    order.push(forever, 0.0)
    order.push(idle, 0.0)
    assert drain(order, 1e9) == [idle, forever]


def test_reference_that_was_prolonged_counts_on() -> None:
    order = order_of("session-lru")
    tip, idle = node(1, refs=1, expires=5.0), node(2)
    for each in (tip, idle):
        order.push(each, 0.0)
    tip.expires = 50.0
    order.push(tip, 4.0)
    assert drain(order, 20.0) == [idle, tip]


def test_time_brings_nobody_back_who_was_taken_out() -> None:
    order = order_of("session-lru")
    tip = node(1, refs=1, expires=5.0)
    order.push(tip, 0.0)
    order.remove(tip)
    assert order.pop(9.0) is None
    order.push(tip, 0.0)
    assert order.pop(1.0) is tip
    assert order.pop(9.0) is None


def shares(ordinary_pages: int, tip_access: float) -> list[str]:
    """What leaves, of an ordinary entry and a tip in a memory of 80 pages."""
    order = order_of("session-lru", 80)
    names = {
        node(5, num_pages=ordinary_pages): "ordinary",
        node(tip_access, refs=1, num_pages=40): "tip",
    }
    for each in names:
        order.push(each, 0.0)
    return [names[each] for each in drain(order)]


def test_reference_gives_way_to_younger_ordinary_entries_until_they_have_their_share() -> None:
    assert shares(9, tip_access=4) == ["tip", "ordinary"]
    assert shares(10, tip_access=4) == ["ordinary", "tip"]
    assert shares(9, tip_access=6) == ["ordinary", "tip"], "the tip was used later"


def test_share_is_that_of_the_entries_that_are_there() -> None:
    order = order_of("session-lru", 80)
    ordinary = [node(5 + number, num_pages=6) for number in range(2)]
    tips = [node(number, refs=1, num_pages=10) for number in range(2)]
    for each in (*ordinary, *tips):
        order.push(each, 0.0)
    # twelve pages of ordinary entries are enough; six are not
    assert drain(order) == [ordinary[0], *tips, ordinary[1]]


@pytest.mark.parametrize("how", ["taken out", "shrunk", "demoted", "referenced"])
def test_share_follows_what_happens_to_the_entries(how: str) -> None:
    order = order_of("session-lru", 80)
    big, small, tip = node(5, num_pages=20), node(6, num_pages=2), node(1, refs=1, num_pages=30)
    for each in (big, small, tip):
        order.push(each, 0.0)
    if how == "taken out":
        order.remove(big)
    elif how == "shrunk":
        hold_pages(big, 1)
    elif how == "demoted":
        big.data[Kind.FULL] = Residency(big.data[Kind.FULL].slots, 0, tier=2)
    else:
        big.refs = 1
    if how != "taken out":
        order.push(big, 0.0)
    assert order.pop(0.0) is tip


def test_checkpoint_in_the_middle_leaves_by_the_hole_it_would_leave() -> None:
    forest = Forest()
    chain = [forest.add(ids(*range(end))) for end in (10, 20, 30, 34, 60)]
    for each in chain[:-1]:
        each.superseded = True
    # 30 leaves a hole from 20 to 34: the smallest, for what its depth is
    assert ordered("session-lru", *chain) == [chain[2], chain[1], chain[3], chain[0], chain[4]]


def test_end_that_nobody_stands_on_any_more_leaves_before_any_checkpoint_in_the_middle() -> None:
    forest = Forest()
    middle, end = forest.add(ids(*range(40))), forest.add(ids(*range(41)))
    other = forest.add(ids(*range(100, 400)))
    for each in (middle, end, other):
        each.superseded = True
    assert ordered("session-lru", middle, end, other) == [end, other, middle]


class Counted(float):
    """A key that counts how often keys are compared."""

    compared = 0

    def __lt__(self, other: float) -> bool:
        Counted.compared += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return float(self) == float(other)  # type: ignore[arg-type]

    __hash__ = float.__hash__


class ByAccess(RankedPolicy):
    """LRU whose comparisons are counted."""

    def rank(self, node: Node, now: float) -> Rank:
        return 0, Counted(node.last_access), None


@dataclass
class Known:
    """Heads worked out elsewhere."""

    nodes: list[Node | None]
    weights: list[int]
    num_pages: int

    def first(self, queue: int) -> Node | None:
        return self.nodes[queue]

    def move(self, node: Node, queue: int, key: Key) -> None:
        raise AssertionError("nothing is moved between the queues of these policies")


@pytest.mark.parametrize("pushes", [1, 3])
def test_pushes_and_pops_look_at_a_few_entries_however_many_there_are(pushes: int) -> None:
    """Twice the entries cost a comparison or two more, stale ones and clean-ups included."""

    def cost(num: int) -> float:
        order = EvictionOrder(ByAccess(), 0)
        rng = np.random.default_rng(num)
        Counted.compared = 0
        for _ in range(pushes):
            for each in [node(float(key)) for key in rng.permutation(num)]:
                for _ in range(pushes):
                    order.push(each, 0.0)
        assert len(drain(order)) == num * pushes
        return Counted.compared / (num * pushes * pushes)

    few, many = cost(200), cost(6400)
    assert few < 30
    assert many - few < 5 * 5, "five times twice as many"


def test_one_pop_among_many_that_have_not_expired_looks_at_none_of_them() -> None:
    order = order_of("session-lru")
    asked = 0

    class Asked(type(order._policy)):  # type: ignore[misc]
        def rank(self, node: Node, now: float) -> Rank:
            nonlocal asked
            asked += 1
            return super().rank(node, now)  # type: ignore[no-any-return]

    order._policy = Asked()
    nodes = [node(at, refs=1, expires=1000.0 + at) for at in range(2000)]
    for each in nodes:
        order.push(each, 0.0)
    assert order.pop(0.0) is nodes[0]
    assert asked == 2000
    assert [order.pop(999.0) for _ in range(9)] == nodes[1:10]
    assert asked == 2000
    assert order.pop(1019.5) is nodes[10]
    assert asked == 2010, "those whose time has passed, and no others"


WHAT = ["touch", "refs", "supersede", "expire", "due", "structure", "grow", "remove", "leave"]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from([*WHAT, "wait", "pop"]),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(CHANGES, st.sampled_from(["lru", "session-lru"]), st.sampled_from([0, 24]))
def test_order_agrees_with_a_list_that_is_ranked_anew_each_time(
    steps: list[tuple[str, int]], policy: str, num_pages: int
) -> None:
    rules = make_policy(policy)
    order, nodes, present = order_of(policy, num_pages), [node(0) for _ in range(6)], set()
    now = 0.0

    def first() -> Node | None:
        heads: list[Node | None] = []
        weights = []
        for queue in range(rules.num_queues):
            here = [nodes[at] for at in present if rules.rank(nodes[at], now)[0] == queue]
            heads.append(min(here, key=lambda n: rules.rank(n, now)[1], default=None))
            weights.append(sum(len(n.data[Kind.FULL].slots) for n in here))
        if not present:
            return None
        return heads[rules.choose(Known(heads, weights, num_pages))]

    for time, (what, which) in enumerate(steps):
        each = nodes[which]
        if what == "wait":
            now += which
            continue
        if what == "pop":
            wanted, got = first(), order.pop(now)
            assert (got is None) == (wanted is None)
            if got is not None and wanted is not None:
                assert rules.rank(got, now)[:2] == rules.rank(wanted, now)[:2]
                present.remove(nodes.index(got))
            continue
        if what == "leave":
            order.remove(each)
            present.discard(which)
            continue
        if what == "touch":
            each.last_access = float(time)
        elif what == "refs":
            each.refs = 1 - each.refs
        elif what == "supersede":
            each.superseded = not each.superseded
        elif what == "expire":
            each.expires = now + which
        elif what == "due":
            each.due = now + which
        elif what == "structure":
            each.structural = not each.structural
        elif what == "grow":
            hold_pages(each, which)
        else:
            each.generation = 1
        order.push(each, now)
        present.discard(which)
        if not each.generation:
            present.add(which)
