"""Salted ranges: shared below the salt, private from it on, equal only at one place and digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import Forest, ids
from testkit.strategies import array, tokens

from agentcache.tree.check import check_tree
from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Salts
    from agentcache.types import IntArray

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
SEQUENCE = ids(1, 2, 3, 4, 5, 6, 7, 8)


def file(forest: Forest, sequence: IntArray, salts: Salts = (), *, state: bool = True) -> Node:
    """`Forest.add` of a salted sequence."""
    inserted = forest.tree.insert(forest.root, sequence, len(sequence), salts)
    for node in inserted.created:
        count = -(-node.end // forest.page_size) - node.start // forest.page_size
        forest.tree.commit(node, Kind.FULL, forest.pages(count))
    if state and Kind.STATE not in inserted.node.data:
        forest.tree.commit(inserted.node, Kind.STATE, forest.pages(1))
    return inserted.node


def known(forest: Forest, sequence: IntArray, salts: Salts = ()) -> tuple[int, int]:
    """How far a sequence is known, and its boundary."""
    match = forest.tree.match(forest.root, sequence, len(sequence), salts)
    return match.known_len, match.boundary


def test_range_is_shared_below_its_salt_and_private_from_there_on() -> None:
    forest = Forest()
    file(forest, SEQUENCE, ((4, A),))
    file(forest, SEQUENCE[:4])
    assert known(forest, SEQUENCE, ((4, A),)) == (8, 8)
    for salts in (((4, B),), ()):
        assert known(forest, SEQUENCE, salts) == (4, 4)


def test_salted_sequence_knows_no_more_of_a_plain_one_than_lies_below_the_salt() -> None:
    forest = Forest()
    file(forest, SEQUENCE)
    assert known(forest, SEQUENCE, ((4, A),)) == (4, 0)
    assert known(forest, SEQUENCE, ((0, A),)) == (0, 0)
    assert known(forest, SEQUENCE) == (8, 8)


@pytest.mark.parametrize(("at", "shared"), [(3, 3), (4, 8), (5, 4)])
def test_salts_are_equal_at_the_same_position_only(at: int, shared: int) -> None:
    forest = Forest()
    file(forest, SEQUENCE, ((4, A),))
    assert known(forest, SEQUENCE, ((at, A),))[0] == shared


@pytest.mark.parametrize(
    ("salts", "shared"),
    [
        (((2, A), (5, B)), 8),
        (((2, A), (5, C)), 5),
        (((2, A), (6, B)), 5),
        (((2, A),), 5),
        (((2, B), (5, B)), 2),
        (((5, B),), 2),
        ((), 2),
    ],
)
def test_second_salt_parts_what_the_first_has_in_common(salts: Salts, shared: int) -> None:
    forest = Forest()
    file(forest, SEQUENCE, ((2, A), (5, B)))
    assert known(forest, SEQUENCE, salts)[0] == shared


def test_salts_at_neighbouring_positions_make_an_edge_of_one_token() -> None:
    forest = Forest()
    end = file(forest, SEQUENCE, ((3, A), (4, B)))
    assert [node.end for node in forest.tree.path(end)] == [3, 4, 8]
    assert [node.salt for node in forest.tree.path(end)] == [None, A, B]
    assert known(forest, SEQUENCE, ((3, A), (4, B))) == (8, 8)


def test_whole_sequence_may_be_salted() -> None:
    forest = Forest()
    file(forest, SEQUENCE, ((0, A),))
    assert known(forest, SEQUENCE, ((0, A),)) == (8, 8)
    assert known(forest, SEQUENCE)[0] == known(forest, SEQUENCE, ((0, B),))[0] == 0


@pytest.mark.parametrize("at", [8, 9])
def test_salt_beyond_the_last_token_is_not_in_force(at: int) -> None:
    forest = Forest()
    end = file(forest, SEQUENCE, ((at, A),))
    assert [node.salt for node in forest.tree.path(end)] == [None]
    assert known(forest, SEQUENCE) == known(forest, SEQUENCE, ((at, B),)) == (8, 8)
    longer = array([*SEQUENCE.tolist(), 9, 10])
    assert known(forest, longer, ((8, A),)) == (8, 8)


def test_insertion_cuts_a_known_edge_where_a_salt_begins() -> None:
    forest = Forest(page_size=4)
    lower = file(forest, SEQUENCE)
    checkpoint = lower.data[Kind.STATE]
    inserted = forest.tree.insert(forest.root, SEQUENCE, 8, ((3, A),))
    [split] = inserted.splits
    assert (split.lower, split.upper.end) == (lower, 3)
    assert inserted.created == (inserted.node,)
    assert inserted.node.parent is split.upper
    assert (inserted.node.salt, lower.salt, split.upper.salt) == (A, None, None)
    assert split.upper.children == {4: lower, (A, 4): inserted.node}
    assert lower.data[Kind.STATE] is checkpoint


def test_split_of_a_salted_edge_leaves_the_salt_to_its_upper_part() -> None:
    forest = Forest()
    lower = file(forest, SEQUENCE, ((2, A),))
    upper = file(forest, SEQUENCE[:5], ((2, A),))
    assert lower.parent is upper
    assert (upper.salt, lower.salt) == (A, None)
    assert (upper.key, lower.key) == ((A, 3), 6)
    check_tree(forest.tree)
    assert known(forest, SEQUENCE, ((2, A),)) == (8, 8)
    assert known(forest, SEQUENCE)[0] == 2


def test_salted_leaf_leaves_from_under_its_own_key() -> None:
    forest = Forest()
    plain, salted = file(forest, SEQUENCE), file(forest, SEQUENCE, ((3, A),))
    forest.tree.remove_leaf(salted, now=1.0)
    check_tree(forest.tree)
    assert known(forest, SEQUENCE) == (8, 8)
    assert known(forest, SEQUENCE, ((3, A),)) == (3, 0)
    forest.tree.remove_leaf(plain, now=2.0)
    assert list(forest.tree.nodes()) == []


Salted = tuple[list[int], list[tuple[int, bytes]]]
SALTS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([A, B])), max_size=3, unique_by=lambda s: s[0]
).map(sorted)
SEQUENCES = st.lists(st.tuples(tokens(max_size=10), SALTS), max_size=8)


def entries(salted: Salted) -> list[tuple[int, bytes | None]]:
    """Each token with the digest that begins there."""
    begins = dict(salted[1])
    return [(token, begins.get(at)) for at, token in enumerate(salted[0])]


@given(SEQUENCES, st.tuples(tokens(max_size=12), SALTS))
def test_match_agrees_with_a_dictionary_of_tokens_and_digests(
    filed: list[Salted], query: Salted
) -> None:
    forest = Forest(3)
    prefixes: dict[tuple[tuple[int, bytes | None], ...], bool] = {}
    for number, salted in enumerate(filed):
        file(forest, array(salted[0]), tuple(salted[1]), state=number % 3 > 0)
        whole = entries(salted)
        for length in range(1, len(whole) + 1):
            prefixes.setdefault(tuple(whole[:length]), False)
        prefixes[tuple(whole)] |= number % 3 > 0
    wanted = entries(query)
    present = [length for length in range(len(wanted) + 1) if tuple(wanted[:length]) in prefixes]
    match = forest.tree.match(forest.root, array(query[0]), len(wanted), tuple(query[1]))
    assert match.known_len == max(present, default=0)
    resumable = [length for length in present if prefixes[tuple(wanted[:length])]]
    assert match.boundary == match.node.end == max(resumable, default=0)
    for start in forest.tree.path(match.known_node):
        if start.end <= match.known_len:
            assert match == forest.tree.match(start, array(query[0]), len(wanted), tuple(query[1]))


@given(SEQUENCES)
def test_no_edge_crosses_a_salt_and_every_sequence_is_a_path(filed: list[Salted]) -> None:
    forest = Forest(3)
    ends: dict[tuple[tuple[int, bytes | None], ...], Node] = {}
    for salted in filed:
        node = file(forest, array(salted[0]), tuple(salted[1]))
        assert ends.setdefault(tuple(entries(salted)), node) is node
        check_tree(forest.tree)
    for whole, node in ends.items():
        path = forest.tree.path(node)
        found = [
            (token, part.salt if at == 0 else None)
            for part in path
            for at, token in enumerate(part.tokens.tolist())
        ]
        assert tuple(found) == whole
    total = {whole[:length] for whole in ends for length in range(1, len(whole) + 1)}
    assert sum(len(node.tokens) for node in forest.tree.nodes()) == len(total)
