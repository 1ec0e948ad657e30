"""Session references: counted per node, left once, and what moving on says about a checkpoint."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import Forest, ids
from testkit.strategies import array, tokens

from agentcache.sessions.refs import References
from agentcache.tree.node import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agentcache.sessions.refs import SessionRef


class Marks:
    """References that note whom they reorder."""

    def __init__(self) -> None:
        self.reordered: list[Node] = []
        self.refs = References(self.reordered.append)


def chain() -> tuple[Forest, Node, Node, Node]:
    forest = Forest()
    return (
        forest,
        forest.add(ids(1, 2)),
        forest.add(ids(1, 2, 3, 4)),
        forest.add(ids(1, 2, 3, 4, 5, 6)),
    )


def test_live_tips_are_counted_per_node() -> None:
    marks, (_, top, _, leaf) = Marks(), chain()
    first, second = marks.refs.hold(leaf), marks.refs.hold(leaf)
    assert (leaf.refs, top.refs) == (2, 0)
    assert marks.reordered == [leaf, leaf]
    marks.refs.leave(first)
    assert leaf.refs == 1
    marks.refs.leave(second)
    assert leaf.refs == 0
    assert marks.reordered == [leaf] * 4


def test_leaving_twice_is_leaving_once() -> None:
    marks, (_, _, _, leaf) = Marks(), chain()
    keeps, leaves = marks.refs.hold(leaf), marks.refs.hold(leaf)
    assert keeps.held
    marks.refs.leave(leaves)
    marks.refs.leave(leaves)
    marks.refs.leave_all([leaves, leaves])
    assert not leaves.held
    assert leaf.refs == 1


def test_checkpoints_moved_past_are_superseded_and_told_to_the_order() -> None:
    marks, (_, top, middle, leaf) = Marks(), chain()
    ref = marks.refs.hold(leaf, [middle])
    marks.reordered.clear()
    marks.refs.leave(ref)
    assert leaf.superseded
    assert middle.superseded
    assert not top.superseded
    assert marks.reordered == [leaf, middle]


@pytest.mark.parametrize("reason", ["structural", "branching", "another tip"])
def test_checkpoint_that_others_can_want_is_not_superseded(reason: str) -> None:
    marks, (forest, _, middle, leaf) = Marks(), chain()
    ref = marks.refs.hold(middle, [leaf])
    if reason == "structural":
        middle.structural = True
    if reason == "branching":
        forest.add(ids(1, 2, 3, 4, 9))
    if reason == "another tip":
        marks.refs.hold(middle)
    marks.refs.leave(ref)
    assert not middle.superseded
    assert leaf.superseded


def test_a_new_tip_at_a_superseded_checkpoint_gives_it_its_worth_back() -> None:
    marks, (_, _, _, leaf) = Marks(), chain()
    marks.refs.leave(marks.refs.hold(leaf))
    assert leaf.superseded
    marks.refs.hold(leaf)
    assert not leaf.superseded


def test_leaving_what_was_evicted_touches_no_node() -> None:
    marks, (forest, _, middle, leaf) = Marks(), chain()
    ref = marks.refs.hold(leaf, [middle])
    forest.tree.remove_leaf(leaf, now=1.0)
    marks.reordered.clear()
    marks.refs.leave(ref)
    assert leaf.refs == 1
    assert not leaf.superseded
    assert middle.superseded
    assert marks.reordered == [middle]


def shared_chain() -> tuple[Forest, Node, Node, Node]:
    """A chain whose upper two nodes are boundaries that others may share."""
    forest, top, middle, leaf = chain()
    top.structural = middle.structural = True
    return forest, top, middle, leaf


def test_shared_boundaries_above_a_tip_are_referenced_with_it() -> None:
    marks, (_, top, middle, leaf) = Marks(), shared_chain()
    middle.structural = False
    ref = marks.refs.hold(leaf)
    assert [node.refs for node in (top, middle, leaf)] == [1, 0, 1]
    assert set(marks.reordered) == {top, leaf}
    marks.reordered.clear()
    marks.refs.leave(ref)
    assert [node.refs for node in (top, middle, leaf)] == [0, 0, 0]
    assert set(marks.reordered) == {top, leaf}
    assert not top.superseded


def test_mark_that_moves_on_takes_its_shared_boundaries_with_it() -> None:
    marks, (forest, top, middle, leaf) = Marks(), shared_chain()
    first = marks.refs.hold(leaf)
    further = forest.add(ids(1, 2, 3, 4, 5, 6, 7, 8))
    second = marks.refs.hold(further, after=first)
    marks.refs.leave(first)
    assert [node.refs for node in (top, middle, leaf, further)] == [1, 1, 0, 1]
    assert leaf.superseded
    marks.refs.leave(second)
    assert [node.refs for node in (top, middle, leaf, further)] == [0, 0, 0, 0]


def test_boundary_that_the_turn_added_is_held_from_then_on() -> None:
    marks, (forest, top, middle, leaf) = Marks(), shared_chain()
    first = marks.refs.hold(middle)
    assert (top.refs, middle.refs) == (1, 1)
    leaf.structural = True
    end = forest.add(ids(1, 2, 3, 4, 5, 6, 7))
    second = marks.refs.hold(end, after=first)
    marks.refs.leave(first)
    assert [node.refs for node in (top, middle, leaf, end)] == [1, 1, 1, 1]
    marks.refs.leave(second)
    assert [node.refs for node in (top, middle, leaf, end)] == [0, 0, 0, 0]


def test_forks_share_what_lies_above_them_and_the_last_to_go_releases_it_once() -> None:
    marks, (forest, top, middle, leaf) = Marks(), shared_chain()
    parent = marks.refs.hold(leaf)
    forks = [marks.refs.hold_again(parent) for _ in range(3)]
    assert (top.refs, middle.refs, leaf.refs) == (1, 1, 4)
    branch = forest.add(ids(1, 2, 3, 4, 9))
    moved = marks.refs.hold(branch, after=forks[0])
    marks.refs.leave(forks[0])
    for ref in (parent, forks[1], forks[1], forks[2]):
        assert (top.refs, middle.refs) == (1, 1)
        marks.refs.leave(ref)
    assert (top.refs, middle.refs, leaf.refs, branch.refs) == (1, 1, 0, 1)
    marks.refs.leave(moved)
    assert (top.refs, middle.refs, leaf.refs, branch.refs) == (0, 0, 0, 0)


def test_tips_of_one_head_that_know_nothing_of_each_other_count_one_by_one() -> None:
    marks, (forest, top, _, leaf) = Marks(), shared_chain()
    other = forest.add(ids(1, 2, 9))
    first, second = marks.refs.hold(leaf), marks.refs.hold(other)
    assert top.refs == 2
    marks.refs.leave(first)
    assert top.refs == 1
    marks.refs.leave(second)
    assert top.refs == 0


def test_tip_that_leaves_its_path_holds_only_what_lies_above_the_new_one() -> None:
    marks, (forest, top, middle, leaf) = Marks(), shared_chain()
    first = marks.refs.hold(leaf)
    branch = forest.add(ids(1, 2, 9, 9))
    second = marks.refs.hold(branch, after=first)
    marks.refs.leave(first)
    assert [node.refs for node in (top, middle, leaf, branch)] == [1, 0, 0, 1]
    marks.refs.leave(second)
    assert top.refs == 0


def test_mark_is_held_again_at_what_is_left_when_its_frontier_was_evicted() -> None:
    marks, (forest, top, middle, leaf) = Marks(), shared_chain()
    ref = marks.refs.hold(leaf)
    forest.tree.remove_leaf(leaf, now=1.0)
    again = marks.refs.hold_again(ref)
    assert again.frontier.node is middle
    marks.refs.leave(ref)
    assert (top.refs, middle.refs) == (1, 1)
    forest.tree.remove_leaf(middle, now=2.0)
    regrown = forest.add(ids(1, 2, 3, 4, 5))
    last = marks.refs.hold(regrown, after=again)
    marks.refs.leave(again)
    assert (top.refs, regrown.refs) == (1, 1)
    marks.refs.leave(last)
    assert (top.refs, regrown.refs) == (0, 0)


def test_mark_of_a_tree_that_was_emptied_stands_at_the_root() -> None:
    marks, (forest, top, middle, leaf) = Marks(), shared_chain()
    ref = marks.refs.hold(leaf)
    for node in (leaf, middle, top):
        forest.tree.remove_leaf(node, now=1.0)
    again = marks.refs.hold_again(ref)
    assert again.frontier.node is forest.root
    marks.refs.leave_all([ref, again])
    assert forest.root.refs == 0


class Visits:
    """Counts the nodes that a walk asks whether they are the root."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        is_root = Node.is_root.fget  # type: ignore[attr-defined]

        def counting(node: Node) -> bool:
            self.count += 1
            return bool(is_root(node))

        monkeypatch.setattr(Node, "is_root", property(counting))


NUM_TURNS = 1000


def trajectory(forest: Forest, structural: Callable[[int], bool]) -> Iterator[Node]:
    """The ends of a session's turns; tokens are filed as it goes."""
    tokens = np.arange(2 * NUM_TURNS, dtype=np.int32)
    node = forest.root
    for turn in range(NUM_TURNS):
        node = forest.add(tokens[: 2 * turn + 2], start=node)
        node.structural = structural(turn)
        yield node


@pytest.mark.parametrize("structural", ["head", "every turn"])
def test_moving_on_touches_what_the_turn_added_however_long_the_trajectory(
    structural: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks, visits, ref = Marks(), Visits(monkeypatch), None
    costs = []
    for turn, node in enumerate(
        trajectory(Forest(), lambda turn: turn == 0 or structural == "every turn")
    ):
        marks.reordered.clear()
        before = ref
        visits.count = 0
        ref = marks.refs.hold(node, after=before, now=turn / 10)
        if before is not None:
            marks.refs.leave(before)
        costs.append((visits.count, len(marks.reordered)))
    assert max(costs) <= (3, 6)
    assert max(calls for _, calls in costs) <= 6


def test_fork_touches_nothing_of_the_trajectory_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    marks, ref = Marks(), None
    for node in trajectory(Forest(), lambda turn: turn == 0):
        before, ref = ref, marks.refs.hold(node, after=ref)
        if before is not None:
            marks.refs.leave(before)
    visits = Visits(monkeypatch)
    marks.reordered.clear()
    assert ref is not None
    fork = marks.refs.hold_again(ref)
    assert visits.count <= 3
    assert marks.reordered[0] is node
    assert len(marks.reordered) <= 2, "itself, and the shared boundary next above it"
    marks.refs.leave(fork)
    assert visits.count <= 3


def test_mark_counts_until_its_session_was_idle_for_too_long() -> None:
    marks, (_, top, middle, leaf) = Marks(), shared_chain()
    ref = marks.refs.hold(leaf, now=5.0)
    assert top.expires == middle.expires == leaf.expires == 605.0
    marks.refs.expect(ref, 10.0, 30.0)
    assert leaf.expires == 40.0, "it said itself when it would be back"
    marks.refs.expect(ref, 20.0, 5000.0)
    assert top.expires == middle.expires == leaf.expires == 5020.0
    marks.refs.leave(ref)
    assert top.expires is middle.expires is leaf.expires is None


def test_session_is_expected_back_after_the_gap_that_its_turns_had() -> None:
    marks, (forest, top, middle, leaf) = Marks(), chain()
    first = marks.refs.hold(top, now=100.0)
    assert (first.gap, top.due) == (None, None), "nobody knows after one turn"
    second = marks.refs.hold(middle, after=first, now=140.0)
    assert (second.gap, middle.due) == (40.0, 180.0)
    third = marks.refs.hold(leaf, after=second, now=160.0)
    assert (third.gap, leaf.due) == (30.0, 190.0), "later gaps count for more"
    fork = marks.refs.hold_again(third, now=175.0)
    assert (fork.gap, leaf.due) == (30.0, 190.0), "to fork is no turn"
    further = marks.refs.hold(forest.add(ids(1, 2, 3, 4, 5, 6, 7)), after=fork, now=195.0)
    assert further.gap == 25.0
    for ref in (second, third, fork):
        marks.refs.leave(ref)
    assert middle.due is leaf.due is None
    assert further.frontier.node.due == 220.0


def test_session_says_itself_when_it_will_be_back() -> None:
    marks, (_, _, _, leaf) = Marks(), chain()
    first, second = marks.refs.hold(leaf), marks.refs.hold(leaf)
    marks.refs.expect(first, 10.0, 60.0, due=40.0)
    assert leaf.due == 40.0
    marks.refs.expect(second, 11.0, 20.0, due=21.0)
    assert leaf.due == 21.0, "where several stand, the earliest"
    assert leaf.expires == 600.0


def test_longest_time_holds_where_several_tips_stand() -> None:
    marks, (_, _, _, leaf) = Marks(), chain()
    first = marks.refs.hold(leaf, now=0.0)
    second = marks.refs.hold(leaf, now=100.0)
    assert leaf.expires == 700.0
    marks.refs.expect(first, 110.0, 20.0)
    assert leaf.expires == 700.0
    marks.refs.expect(first, 110.0, 900.0)
    assert leaf.expires == 1010.0
    marks.refs.leave(second)
    assert leaf.expires == 1010.0


def test_time_is_told_to_the_order_and_a_mark_that_was_left_has_none() -> None:
    marks, (_, top, middle, leaf) = Marks(), shared_chain()
    ref = marks.refs.hold(leaf)
    marks.reordered.clear()
    marks.refs.expect(ref, 400.0, 600.0)
    assert set(marks.reordered) == {top, middle, leaf}
    marks.refs.leave(ref)
    marks.reordered.clear()
    marks.refs.expect(ref, 500.0, 600.0)
    assert marks.reordered == []
    assert leaf.expires is None


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 40, 160, 290])), max_size=40))
def test_shared_boundaries_outlast_every_session_that_keeps_taking_turns(
    turns: list[tuple[int, int]],
) -> None:
    """Three sessions part from one path below its boundaries, three stand right on those."""
    marks, forest, now = Marks(), Forest(), 0.0
    heads = [forest.add(ids(*range(4 * depth))) for depth in (1, 2, 3)]
    for head in heads:
        head.structural = True
    paths = [[*range(4 * depth), 100 * depth] for depth in (1, 2, 3)]
    paths += [[*range(4 * depth)] for depth in (1, 2, 3)]
    refs = [marks.refs.hold(forest.add(array(path)), now=now) for path in paths]
    for which, seconds in turns:
        now += seconds
        if which < 3:
            paths[which].append(7)
        before, node = refs[which], forest.add(array(paths[which]))
        node.structural |= which == 0  # one that marks each of its turns
        refs[which] = marks.refs.hold(node, after=before, now=now)
        marks.refs.leave(before)
        for above in heads[: which % 3 + 1]:
            assert above.expires is not None
            assert above.expires - now >= 300.0, "less than half of its patience is left"


class World:
    """Marks in any order; every reference is recounted, and what the order was told is kept."""

    def __init__(self) -> None:
        self.forest = Forest(3)
        self.told: dict[Node, tuple[Any, ...]] = {}
        self.refs = References(self.tell, patience_s=10.0)
        self.held: list[tuple[list[int], SessionRef]] = []
        self.left: list[SessionRef] = []
        self.now = 0.0

    def tell(self, node: Node) -> None:
        self.told[node] = self.place(node)

    def place(self, node: Node) -> tuple[Any, ...]:
        return node.refs > 0, node.superseded, node.expires, node.due

    def turn(self, which: int, tokens: list[int], structural: int) -> None:
        """A session goes on; without one, a new one begins. `structural` picks a node's mark."""
        path, after = self.held.pop(which % len(self.held)) if self.held else ([], None)
        path = [*path, *tokens]
        node = self.forest.add(array(path))
        on_path = self.forest.tree.path(node)
        on_path[structural % len(on_path)].structural = True
        self.stand(path, node, on_path[:-1][-2:], after)
        if after is not None:
            self.leave(after)

    def begin(self, tokens: list[int], _: int) -> None:
        self.stand(tokens, self.forest.add(array(tokens)), [], None)

    def stand(
        self, path: list[int], node: Node, filed: list[Node], after: SessionRef | None
    ) -> None:
        ref = self.refs.hold(node, filed, after=after, now=self.now)
        self.held.append((path, ref))

    def parallel(self, which: int, tokens: list[int]) -> None:
        """A turn that goes on from a mark that was left meanwhile."""
        if self.left:
            after = self.left[which % len(self.left)]
            node = self.forest.add(array([0, *tokens]))
            self.stand([0, *tokens], node, [], after)

    def fork(self, which: int, up: int) -> None:
        """A mark at another one's place, or at one above it."""
        if self.held:
            path, after = self.held[which % len(self.held)]
            node = after.frontier.living()
            if up == 0:
                self.held.append((path[: node.end], self.refs.hold_again(after, self.now)))
                return
            for _ in range(up):
                node = node.parent or node
            self.stand(path[: node.end], node, [], after)

    def close(self, which: int) -> None:
        if self.held:
            _, ref = self.held.pop(which % len(self.held))
            self.leave(ref)

    def leave(self, ref: SessionRef) -> None:
        self.refs.leave(ref)
        self.left.append(ref)

    def evict(self, which: int) -> None:
        leaves = [node for node in self.forest.tree.nodes() if self.forest.tree.can_remove(node)]
        if leaves:
            self.forest.tree.remove_leaf(leaves[which % len(leaves)], self.now)

    def wait(self, which: int, seconds: float) -> None:
        self.now += seconds
        if self.held:
            ref = self.held[which % len(self.held)][1]
            self.refs.expect(ref, self.now, 2 * seconds, due=self.now + seconds)

    def check(self) -> None:
        refs: Counter[Node] = Counter()
        anchors: Counter[object] = Counter()
        for _, ref in self.held:
            refs[ref.frontier.node] += ref.frontier.alive
            path = set(self.forest.tree.path(ref.frontier.node)) - {ref.frontier.node}
            anchor = ref._anchor
            while anchor is not None:
                if ref.frontier.alive and anchor.at.alive:
                    assert anchor.at.node in path, "a boundary that does not lie above"
                anchors[anchor] += 1
                if anchors[anchor] > 1:
                    break
                anchor = anchor.above
        for anchor, holders in anchors.items():
            assert anchor.holders == holders  # type: ignore[attr-defined]
            refs[anchor.at.node] += anchor.at.alive  # type: ignore[attr-defined]
        for node in (self.forest.root, *self.forest.tree.nodes()):
            assert node.refs == refs[node], f"{node}: {refs[node]} counted"
            assert not (node.refs and node.superseded)
            nothing = (False, False, None, None)
            assert self.told.get(node, nothing) == self.place(node), f"{node} moved in silence"


WHICH = st.integers(0, 7)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), tokens(max_size=6), WHICH),
        st.tuples(st.just("turn"), WHICH, tokens(max_size=4), WHICH),
        st.tuples(st.just("parallel"), WHICH, tokens(max_size=6)),
        st.tuples(st.just("fork"), WHICH, st.integers(0, 2)),
        st.tuples(st.just("close"), WHICH),
        st.tuples(st.just("evict"), WHICH),
        st.tuples(st.just("wait"), WHICH, st.sampled_from([1.0, 4.0, 20.0])),
    ),
    max_size=30,
)


@given(STEPS)
def test_references_are_a_recount_of_the_marks_and_none_is_left_at_the_end(
    steps: list[tuple[str, Any]],
) -> None:
    world = World()
    for what, *values in steps:
        getattr(world, what)(*values)
        world.check()
    for _ in range(len(world.held)):
        world.close(0)
        world.check()
    assert all(node.refs == 0 for node in (world.forest.root, *world.forest.tree.nodes()))
