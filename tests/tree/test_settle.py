"""Where a match settles, from the known end upwards: on the device, on lower tiers, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import NAMESPACE, ids, rules_of
from testkit.strategies import array, tokens

from agentcache.components.base import WindowComponent
from agentcache.tree.check import check_tree
from agentcache.tree.node import Residency
from agentcache.tree.radix_tree import Match, RadixTree
from agentcache.types import Kind, Vote

if TYPE_CHECKING:
    from agentcache.components.base import Component
    from agentcache.tree.node import Node
    from agentcache.types import IntArray


class ChunkWindow(WindowComponent):
    """Attention within blocks of four positions: a window that does not slide token by token."""

    kind = "chunk"

    def reach(self, at: int) -> int:
        return at // 4 * 4


class Grove:
    """A tree of any components, whose ends get the data of the kinds that are named."""

    def __init__(self, rules: list[Component]) -> None:
        self.tree = RadixTree(rules)
        self.root = self.tree.root(NAMESPACE)

    def add(self, sequence: IntArray, *kinds: str) -> Node:
        """File a sequence; without kinds, with everything that makes its end a boundary."""
        inserted = self.tree.insert(self.root, sequence, len(sequence))
        for node in inserted.created:
            self._commit(node, Kind.FULL, node.start)
        node = inserted.node
        for rule in self.tree.rules:
            if rule.kind in kinds or not kinds:
                first = rule.reach(node.end) if isinstance(rule, WindowComponent) else node.end - 1
                self._commit(node, rule.kind, first)
        return node

    def _commit(self, node: Node, kind: str, start: int) -> None:
        if self.tree.has(kind) and kind not in node.data:
            rule = next(rule for rule in self.tree.rules if rule.kind == kind)
            size = getattr(rule, "page_size", 1)
            num = -(-node.end // size) - start // size
            self.tree.commit(node, kind, np.arange(num, dtype=np.int32))

    def demote(self, node: Node, kind: str) -> None:
        """Say that a kind's data lies on the next tier."""
        data = node.data[kind]
        node.data[kind] = Residency(data.slots, data.start, tier=2)

    def match(self, sequence: IntArray, limit: int | None = None) -> Match:
        limit = len(sequence) if limit is None else limit
        return self.tree.match(self.root, sequence, limit)


def span(stop: int) -> IntArray:
    return np.arange(stop, dtype=np.int32)


def off(known: int) -> IntArray:
    """The first `known` tokens of every sequence here, and then another one."""
    return np.append(span(known), 99).astype(np.int32)


def test_boundary_of_attention_alone_lies_anywhere_inside_an_edge() -> None:
    grove = Grove(rules_of(4, state=False))
    node = grove.add(span(10))
    for known in range(1, 11):
        match = grove.match(off(known))
        assert (match.node, match.boundary, match.known_len) == (node, known, known)
        assert match.vetoed_by is None
    assert grove.match(span(10), limit=7).boundary == 7


def test_boundary_lies_inside_an_edge_while_the_window_reaches_the_first_token() -> None:
    grove = Grove(rules_of(4, window=8, state=False))
    node = grove.add(span(7))
    for known in range(1, 8):
        match = grove.match(off(known))
        assert (match.node, match.boundary) == (node, known)


def test_boundary_lies_at_an_end_once_the_window_has_left_the_first_token() -> None:
    grove = Grove(rules_of(4, window=8, state=False))
    node = grove.add(span(12))
    match = grove.match(off(11))
    assert (match.node, match.boundary) == (grove.root, 0)
    assert match.lens == {Kind.FULL: 11, Kind.SWA: 0}
    assert match.vetoed_by is Kind.SWA
    whole = grove.match(off(12))
    assert (whole.node, whole.boundary) == (node, 12)


def test_boundary_inside_an_edge_is_left_for_a_place_that_the_window_accepts() -> None:
    grove = Grove(rules_of(4, window=8, state=False))
    upper = grove.add(span(6))
    grove.add(span(12))
    match = grove.match(off(10))
    assert (match.node, match.boundary) == (upper, 6)
    assert match.lens == {Kind.FULL: 10, Kind.SWA: 6}
    assert grove.match(off(4)).boundary == 4


def test_what_could_be_loaded_is_told_where_it_is_deeper() -> None:
    grove = Grove(rules_of(4))
    top, middle, end = (grove.add(span(length)) for length in (3, 6, 9))
    grove.demote(middle, Kind.STATE)
    grove.tree.drop(end, Kind.STATE, 0.0)
    match = grove.match(off(9))
    assert (match.node, match.boundary) == (top, 3)
    assert (match.loadable_node, match.loadable) == (middle, 6)
    assert match.lens == {Kind.FULL: 9, Kind.STATE: 3}
    assert match.vetoed_by is Kind.STATE


def test_what_is_on_the_device_is_its_own_loadable_boundary_where_nothing_lies_deeper() -> None:
    grove = Grove(rules_of(4))
    top, end = grove.add(span(3)), grove.add(span(9), Kind.FULL)
    for known, node, boundary in ((9, top, 3), (2, grove.root, 0)):
        match = grove.match(off(known))
        assert (match.node, match.boundary) == (node, boundary)
        assert (match.loadable_node, match.loadable) == (node, boundary)
    assert not grove.tree.is_usable(end)


@pytest.mark.parametrize("kinds", [(Kind.FULL,), (Kind.STATE,), (Kind.FULL, Kind.STATE)])
def test_place_is_loadable_where_some_of_it_or_all_lies_lower(kinds: tuple[Kind, ...]) -> None:
    grove = Grove(rules_of(4))
    top, end = grove.add(span(3)), grove.add(span(9))
    for kind in kinds:
        grove.demote(end, kind)
    match = grove.match(off(9))
    assert (match.boundary, match.loadable_node, match.loadable) == (3, end, 9)
    assert match.node is top
    assert not grove.tree.is_boundary(end)
    assert grove.tree.is_usable(end)


def test_attention_that_lies_lower_is_loadable_inside_its_edge() -> None:
    grove = Grove(rules_of(4, state=False))
    top, end = grove.add(span(3)), grove.add(span(9))
    grove.demote(end, Kind.FULL)
    match = grove.match(off(7))
    assert (match.node, match.boundary) == (top, 3)
    assert (match.loadable_node, match.loadable) == (end, 7)


def test_each_of_three_components_tells_how_far_it_would_go() -> None:
    grove = Grove(rules_of(4, window=3))
    grove.add(span(4))
    grove.add(span(6), Kind.STATE)
    grove.add(span(8), Kind.SWA)
    match = grove.match(off(8))
    assert match.boundary == 4, "none is stitched from two places"
    assert match.lens == {Kind.FULL: 8, Kind.SWA: 8, Kind.STATE: 6}
    assert match.vetoed_by is Kind.STATE


@pytest.mark.parametrize("kind", [Kind.SWA, Kind.STATE])
def test_the_one_of_three_that_lacks_its_data_is_the_veto(kind: Kind) -> None:
    grove = Grove(rules_of(4, window=3))
    grove.add(span(4))
    end = grove.add(span(8))
    assert grove.match(off(8)).vetoed_by is None
    grove.tree.drop(end, kind, 0.0)
    match = grove.match(off(8))
    assert match.boundary == 4
    assert match.lens == {Kind.FULL: 8, Kind.SWA: 8, Kind.STATE: 8} | {kind: 4}
    assert match.vetoed_by is kind


def test_limit_bounds_what_each_component_tells() -> None:
    grove = Grove(rules_of(4, window=3))
    grove.add(span(4))
    grove.add(span(8))
    match = grove.match(span(8), limit=7)
    assert (match.boundary, match.known_len) == (4, 8)
    assert match.lens == {Kind.FULL: 7, Kind.SWA: 4, Kind.STATE: 4}


COMPOSITIONS: dict[str, list[Component]] = {
    "full": rules_of(3, state=False),
    "full-swa": rules_of(3, window=5, state=False),
    "full-state": rules_of(3),
    "full-swa-state": rules_of(3, window=5),
    "swa": rules_of(3, kv=False, window=5, state=False),
    "state": rules_of(3, kv=False),
    "full-chunk": [*rules_of(3, state=False), ChunkWindow(2)],
    "swa-chunk-state": [*rules_of(3, kv=False, window=5), ChunkWindow(2)],
}
NAMES = st.sampled_from(list(COMPOSITIONS))
SEQUENCES = st.lists(st.tuples(tokens(max_size=14), st.integers(0, 15)), min_size=1, max_size=8)
CHANGES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3), st.booleans()), max_size=6)


def grown(
    rules: list[Component],
    known: list[tuple[list[int], int]],
    changes: list[tuple[int, int, bool]],
) -> Grove:
    """Sequences with some of what a boundary needs, of which some leaves or moves down a tier."""
    grove = Grove(rules)
    for sequence, which in known:
        kinds = [rule.kind for number, rule in enumerate(rules) if which >> number & 1]
        grove.add(array(sequence), "none", *kinds)
    nodes = list(grove.tree.nodes())
    for at, number, demote in changes:
        node, kind = nodes[at % len(nodes)], rules[number % len(rules)].kind
        if demote and kind in node.data:
            grove.demote(node, kind)
        elif not demote and kind != Kind.FULL:
            grove.tree.drop(node, kind, 0.0)
    return grove


def at_every_position(grove: Grove, query: list[int], limit: int) -> dict[str, object]:
    """A match as it follows from asking every component about every known position."""
    node, path = grove.root, []
    for at, token in enumerate(query):
        if at == node.end:
            node = node.children.get(token, node)
        if at >= node.end or node.tokens[at - node.start] != token:
            break
        path.append(node)
    known_len = len(path)
    lens = {rule.kind: 0 for rule in grove.tree.rules}
    boundary = loadable = 0
    for at, over in enumerate(path[:limit], 1):
        votes = {rule.kind: rule.vote(over, at) for rule in grove.tree.rules}
        lens |= {kind: at for kind, vote in votes.items() if vote is Vote.RESIDENT}
        if all(vote is Vote.RESIDENT for vote in votes.values()):
            boundary = at
        if all(vote is not Vote.ABSENT for vote in votes.values()):
            loadable = at
    return {
        "node": path[boundary - 1] if boundary else grove.root,
        "boundary": boundary,
        "known_len": known_len,
        "lens": lens,
        "loadable_node": path[loadable - 1] if loadable else grove.root,
        "loadable": loadable,
    }


@given(NAMES, SEQUENCES, CHANGES, tokens(max_size=16), st.integers(0, 16))
def test_one_question_per_node_finds_what_asking_at_every_position_finds(
    name: str,
    known: list[tuple[list[int], int]],
    changes: list[tuple[int, int, bool]],
    query: list[int],
    limit: int,
) -> None:
    grove = grown(COMPOSITIONS[name], known, changes)
    match = grove.match(array(query), limit)
    wanted = at_every_position(grove, query, limit)
    assert {field: getattr(match, field) for field in wanted} == wanted
    assert match.loadable >= match.boundary


@given(NAMES, SEQUENCES, CHANGES, st.lists(tokens(max_size=14), max_size=4))
def test_no_vote_changes_when_others_split_the_edges(
    name: str,
    known: list[tuple[list[int], int]],
    changes: list[tuple[int, int, bool]],
    more: list[list[int]],
) -> None:
    grove = grown(COMPOSITIONS[name], known, changes)

    def votes() -> dict[tuple[int, ...], list[Vote]]:
        out = {}
        for node in grove.tree.nodes():
            path = [t for part in grove.tree.path(node) for t in part.tokens.tolist()]
            for at in range(node.start + 1, node.end + 1):
                out[tuple(path[:at])] = [rule.vote(node, at) for rule in grove.tree.rules]
        return out

    before = votes()
    for sequence in more:
        grove.add(array(sequence), "none")
    after = votes()
    assert {key: after[key] for key in before} == before
    check_tree_but_for_leaves(grove)


def check_tree_but_for_leaves(grove: Grove) -> None:
    """Integrity; leaves without data are what these tests make."""
    held = [node for node in grove.tree.nodes() if node.is_leaf]
    for node in held:
        grove.tree.lock(node)
    check_tree(grove.tree)


def test_sequence_beyond_what_is_known_is_no_boundary_whatever_its_length() -> None:
    grove = Grove(rules_of(4))
    grove.add(ids(1, 2, 3))
    match = grove.match(ids(1, 2, 3, 4, 5, 6), limit=6)
    assert (match.boundary, match.known_len, match.loadable) == (3, 3, 3)
