"""Insertion makes a path that ends on a node; a split leaves the lower part what it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import Forest, ids
from testkit.strategies import array, tokens

from agentcache.tree.check import check_tree
from agentcache.types import Kind


def test_insertion_of_a_known_path_creates_nothing() -> None:
    forest = Forest()
    node = forest.add(ids(1, 2, 3, 4, 5))
    before = forest.snapshot()
    again = forest.tree.insert(forest.root, ids(1, 2, 3, 4, 5), 5)
    assert again.node is node
    assert again.created == again.splits == ()
    nothing = forest.tree.insert(node, ids(1, 2, 3, 4, 5, 6), 5)
    assert nothing.node is node
    assert nothing.created == nothing.splits == ()
    assert forest.snapshot() == before


def test_insertion_stops_where_it_is_told() -> None:
    forest = Forest()
    inserted = forest.tree.insert(forest.root, ids(1, 2, 3, 4, 5), 3)
    assert inserted.node.end == 3
    assert inserted.node.tokens.tolist() == [1, 2, 3]
    assert inserted.created == (inserted.node,)


def test_insertion_that_stops_inside_a_known_edge_splits_it_there() -> None:
    forest = Forest()
    lower = forest.add(ids(1, 2, 3, 4, 5))
    inserted = forest.tree.insert(forest.root, ids(1, 2, 3, 4, 9), 3)
    assert inserted.node.end == 3
    assert inserted.created == ()
    assert lower.parent is inserted.node
    assert list(forest.tree.nodes()) == [inserted.node, lower]


def test_insertion_goes_on_below_the_node_it_starts_from() -> None:
    forest = Forest()
    start = forest.add(ids(1, 2, 3))
    start.last_access = 5.0
    inserted = forest.tree.insert(start, ids(1, 2, 3, 4, 5), 5)
    assert inserted.node.parent is start
    assert inserted.node.last_access == start.last_access == 5.0
    assert inserted.node.tokens.tolist() == [4, 5]


def test_split_leaves_the_lower_part_its_identity_end_and_checkpoint() -> None:
    forest = Forest(page_size=2)
    lower = forest.add(ids(1, 2, 3, 4, 5, 6))
    checkpoint = lower.data[Kind.STATE]
    lower.last_access, lower.refs = 7.0, 1
    inserted = forest.tree.insert(forest.root, ids(1, 2, 3, 4), 4)
    upper = inserted.node
    assert upper is not lower
    assert lower.parent is upper
    assert (upper.start, upper.end, lower.start, lower.end) == (0, 4, 4, 6)
    assert upper.tokens.tolist() == [1, 2, 3, 4]
    assert lower.tokens.tolist() == [5, 6]
    assert lower.data[Kind.STATE] is checkpoint
    assert Kind.STATE not in upper.data
    assert upper.last_access == 7.0
    assert (upper.refs, lower.refs) == (0, 1)
    assert forest.root.children == {1: upper}
    assert upper.children == {5: lower}
    assert inserted.created == ()


def test_branch_inside_a_page_shares_that_page_once() -> None:
    forest = Forest(page_size=4)
    lower = forest.add(ids(1, 2, 3, 4, 5, 6, 7, 8))
    inserted = forest.tree.insert(forest.root, ids(1, 2, 3, 4, 5, 6, 9), 7)
    upper = inserted.node.parent
    assert upper is not None
    assert upper is lower.parent
    assert upper.end == 6
    [split] = inserted.splits
    assert (split.upper, split.lower) == (upper, lower)
    [(kind, pages)] = split.shared
    assert kind is Kind.FULL
    assert pages.tolist() == [1]
    assert upper.data[Kind.FULL].slots.tolist() == [0, 1]
    assert lower.data[Kind.FULL].slots.tolist() == [1]
    assert inserted.created == (inserted.node,)


def test_nodes_keep_their_own_copy_of_the_tokens() -> None:
    forest = Forest()
    sequence = ids(1, 2, 3, 4, 5, 6)
    lower = forest.add(sequence)
    upper = forest.add(sequence[:3])
    whole = forest.add(sequence[1:])
    sequence[:] = 0
    assert whole.tokens.tolist() == [2, 3, 4, 5, 6]
    assert upper.tokens.tolist() == [1, 2, 3]
    assert lower.tokens.tolist() == [4, 5, 6]
    assert [node.raw for node in (upper, lower)] == [
        node.tokens.tobytes() for node in (upper, lower)
    ]


@given(st.lists(tokens(max_size=14), max_size=10), st.sampled_from([1, 3, 4]))
def test_every_inserted_sequence_is_a_path_and_the_tree_stays_whole(
    sequences: list[list[int]], page_size: int
) -> None:
    forest = Forest(page_size)
    ends = {}
    for sequence in sequences:
        node = forest.add(array(sequence))
        known = ends.setdefault(tuple(sequence), node)
        assert node is known, "a node gave its end to another one"
        check_tree(forest.tree)
    for sequence, node in ends.items():
        path = forest.tree.path(node)
        assert [t for part in path for t in part.tokens.tolist()] == list(sequence)
        assert path[0].parent is forest.root
    total = {tuple(s[:k]) for s in sequences for k in range(1, len(s) + 1)}
    assert sum(len(node.tokens) for node in forest.tree.nodes()) == len(total)
    assert len(set(forest.tree.nodes())) == len(list(forest.tree.nodes()))
