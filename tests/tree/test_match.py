"""Matching finds the one boundary all components accept, how far tokens are known, and why not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import Forest, ids
from testkit.strategies import array, tokens

from agentcache.tree.node import Residency
from agentcache.types import Kind


def test_match_inside_an_edge_knows_the_tokens_but_finds_no_boundary() -> None:
    forest = Forest()
    node = forest.add(ids(1, 2, 3, 4, 5))
    match = forest.tree.match(forest.root, ids(1, 2, 3, 9), 3)
    assert match.known_node is node
    assert match.known_len == 3
    assert match.node is forest.root
    assert match.boundary == 0
    assert match.lens == {Kind.FULL: 3, Kind.STATE: 0}
    assert match.vetoed_by is Kind.STATE


def test_nothing_known_is_no_veto() -> None:
    forest = Forest()
    forest.add(ids(1, 2, 3))
    match = forest.tree.match(forest.root, ids(7, 8), 2)
    assert (match.boundary, match.known_len) == (0, 0)
    assert match.known_node is forest.root
    assert match.vetoed_by is None


def test_boundary_stays_within_the_limit_while_tokens_are_known_beyond_it() -> None:
    forest = Forest()
    forest.add(ids(1, 2, 3))
    forest.add(ids(1, 2, 3, 4, 5, 6))
    match = forest.tree.match(forest.root, ids(1, 2, 3, 4, 5, 6), 5)
    assert match.boundary == 3
    assert match.known_len == 6
    assert match.lens == {Kind.FULL: 5, Kind.STATE: 3}
    assert forest.tree.match(forest.root, ids(1, 2, 3, 4, 5, 6), 6).boundary == 6
    assert forest.tree.match(forest.root, ids(1, 2, 3, 4, 5, 6), 2).boundary == 0


def test_veto_on_the_way_does_not_end_the_walk() -> None:
    forest = Forest()
    forest.add(ids(1, 2), state=False)
    forest.add(ids(1, 2, 3, 4))
    match = forest.tree.match(forest.root, ids(1, 2, 3, 4, 5), 4)
    assert match.boundary == 4
    assert match.vetoed_by is None


@pytest.mark.parametrize("kind", [Kind.FULL, Kind.STATE])
def test_data_on_a_lower_tier_is_no_boundary(kind: Kind) -> None:
    forest = Forest()
    node = forest.add(ids(1, 2, 3))
    assert forest.tree.is_boundary(node)
    node.data[kind] = Residency(node.data[kind].slots, node.data[kind].start, tier=2)
    assert not forest.tree.is_boundary(node)
    match = forest.tree.match(forest.root, ids(1, 2, 3, 4), 3)
    assert match.boundary == 0
    assert match.lens[kind] == 0
    assert match.vetoed_by is kind
    inside = forest.tree.match(forest.root, ids(1, 2, 9), 3)
    assert inside.known_len == 2
    assert inside.lens[Kind.FULL] == (0 if kind is Kind.FULL else 2)


def test_namespaces_share_nothing() -> None:
    forest = Forest()
    forest.add(ids(1, 2, 3))
    other = forest.tree.root(b"other")
    assert other is not forest.root
    assert forest.tree.root(b"other") is other
    match = forest.tree.match(other, ids(1, 2, 3, 4), 3)
    assert (match.boundary, match.known_len) == (0, 0)


sequences = st.lists(st.tuples(tokens(max_size=12), st.booleans()), max_size=8)


def grown(known: list[tuple[list[int], bool]], page_size: int) -> Forest:
    forest = Forest(page_size)
    for sequence, state in known:
        forest.add(array(sequence), state=state)
    return forest


def common(a: list[int], b: list[int]) -> int:
    return next(
        (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(sequences, tokens(max_size=14), st.integers(0, 14), st.sampled_from([1, 3]))
def test_match_agrees_with_a_list_of_sequences_and_changes_nothing(
    known: list[tuple[list[int], bool]], query: list[int], limit: int, page_size: int
) -> None:
    forest = grown(known, page_size)
    before = forest.snapshot()
    match = forest.tree.match(forest.root, array(query), limit)
    assert forest.snapshot() == before
    resumable = [len(s) for s, state in known if state and query[: len(s)] == s and len(s) <= limit]
    known_len = max((common(s, query) for s, _ in known), default=0)
    assert match.known_len == known_len
    assert match.known_node.start <= known_len <= match.known_node.end
    assert match.boundary == match.node.end == max(resumable, default=0)
    assert match.lens[Kind.STATE] == match.boundary
    assert match.lens[Kind.FULL] == min(known_len, limit)


@given(sequences, tokens(max_size=14), st.integers(0, 14))
def test_match_from_any_place_on_the_path_is_the_match_from_the_root(
    known: list[tuple[list[int], bool]], query: list[int], limit: int
) -> None:
    forest = grown(known, 3)
    reference = forest.tree.match(forest.root, array(query), limit)
    for start in forest.tree.path(reference.known_node):
        if start.end <= reference.known_len:
            assert forest.tree.match(start, array(query), limit) == reference


def test_match_from_a_place_beyond_the_limit_or_without_a_checkpoint_looks_above_it() -> None:
    forest = Forest()
    top = forest.add(ids(1, 2))
    start = forest.add(ids(1, 2, 3, 4), state=False)
    for limit, full in ((4, 4), (3, 3), (2, 2)):
        match = forest.tree.match(start, ids(1, 2, 3, 4), limit)
        assert match.node is top
        assert match.lens == {Kind.FULL: full, Kind.STATE: 2}
    assert forest.tree.match(start, ids(1, 2, 3, 4), 1).lens == {Kind.FULL: 1, Kind.STATE: 0}
