"""Votes, and how a split divides what lies at a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import ids

from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.components.swa import SwaComponent
from agentcache.tree.node import EMPTY_TOKENS, Node, Residency
from agentcache.types import Kind, Vote

if TYPE_CHECKING:
    from agentcache.components.base import Component

EACH = pytest.mark.parametrize(
    "component", [FullComponent(4), SwaComponent(3, 4), StateComponent()], ids=lambda c: c.kind
)


def node(start: int, end: int, parent: Node | None = None) -> Node:
    tokens = np.arange(start, end, dtype=np.int32)
    return Node(1, tokens, parent or Node(0, EMPTY_TOKENS, None, start), end)


@EACH
def test_vote_at_the_end_tells_where_the_data_lies(component: Component) -> None:
    at = node(0, 4)
    assert component.vote(at, 4) is Vote.ABSENT
    component.commit(at, ids(3))
    assert component.vote(at, 4) is Vote.RESIDENT
    at.data[component.kind] = Residency(ids(3), at.data[component.kind].start, tier=2)
    assert component.vote(at, 4) is Vote.LOADABLE


@EACH
def test_vote_is_about_the_own_kind_only(component: Component) -> None:
    at = node(0, 4)
    for other in Kind:
        if other is not component.kind:
            at.data[other] = Residency(ids(3), 0)
    assert component.vote(at, 4) is Vote.ABSENT


def test_attention_can_be_cut_at_any_token_and_a_checkpoint_at_its_own_only() -> None:
    at = node(2, 9)
    full, state = FullComponent(4), StateComponent()
    full.commit(at, ids(0, 1, 2))
    state.commit(at, ids(3))
    votes = [(full.vote(at, position), state.vote(at, position)) for position in range(3, 10)]
    assert votes == [(Vote.RESIDENT, Vote.ABSENT)] * 6 + [(Vote.RESIDENT, Vote.RESIDENT)]


@pytest.mark.parametrize(
    ("component", "start"),
    [
        (FullComponent(4), 2),
        (SwaComponent(3, 4), 7),
        (SwaComponent(20, 4), 0),
        (StateComponent(), 9),
    ],
)
def test_data_says_from_which_position_on_it_is_there(component: Component, start: int) -> None:
    at = node(2, 9)
    component.commit(at, ids(3))
    assert at.data[component.kind].start == start


@EACH
def test_data_is_committed_once_and_evicted_once(component: Component) -> None:
    at = node(0, 4)
    component.commit(at, ids(3))
    data = at.data[component.kind]
    assert (data.slots.tolist(), data.tier) == ([3], 1)
    with pytest.raises(AssertionError, match="already holds"):
        component.commit(at, ids(5))
    assert component.evict(at) is data
    assert component.evict(at) is None
    component.commit(at, ids(5))


def split(component: Component, lower: Node, at: int) -> tuple[Node, list[int]]:
    """What the tree does, for one component."""
    upper = node(lower.start, at, lower.parent)
    lower.tokens, lower.parent = lower.tokens[at - lower.start :], upper
    return upper, component.on_split(upper, lower).tolist()


def test_split_at_a_page_border_divides_the_pages() -> None:
    lower = node(0, 12)
    lower.data[Kind.FULL] = Residency(ids(5, 6, 7), 0)
    upper, shared = split(FullComponent(4), lower, 8)
    assert shared == []
    assert upper.data[Kind.FULL].slots.tolist() == [5, 6]
    assert lower.data[Kind.FULL].slots.tolist() == [7]


def test_split_inside_a_page_gives_it_to_both_parts() -> None:
    lower = node(0, 12)
    lower.data[Kind.FULL] = Residency(ids(5, 6, 7), 0)
    upper, shared = split(FullComponent(4), lower, 7)
    assert shared == [6]
    assert upper.data[Kind.FULL].slots.tolist() == [5, 6]
    assert lower.data[Kind.FULL].slots.tolist() == [6, 7]


def test_split_of_an_edge_within_one_page_shares_the_one_page() -> None:
    parent = node(0, 5)
    lower = node(5, 8, parent)
    lower.data[Kind.FULL] = Residency(ids(9), 5)
    upper, shared = split(FullComponent(4), lower, 6)
    assert shared == [9]
    assert upper.data[Kind.FULL].slots.tolist() == lower.data[Kind.FULL].slots.tolist() == [9]


def test_parts_of_a_split_stay_on_their_tier() -> None:
    lower = node(0, 8)
    lower.data[Kind.FULL] = Residency(ids(5, 6), 0, tier=2)
    upper, _ = split(FullComponent(4), lower, 4)
    assert upper.data[Kind.FULL].tier == lower.data[Kind.FULL].tier == 2


def test_split_without_kv_shares_nothing() -> None:
    lower = node(0, 8)
    upper, shared = split(FullComponent(4), lower, 3)
    assert shared == []
    assert upper.data == lower.data == {}


def test_checkpoint_stays_at_the_end_of_the_lower_part() -> None:
    lower = node(0, 8)
    lower.data[Kind.STATE] = Residency(ids(5, 6), 8)
    upper, shared = split(StateComponent(), lower, 3)
    assert shared == []
    assert upper.data == {}
    assert lower.data[Kind.STATE].slots.tolist() == [5, 6]
    assert lower.data[Kind.STATE].start == 8


@given(st.integers(1, 5), st.integers(0, 9), st.integers(2, 12), st.data())
def test_each_part_of_a_split_holds_the_pages_of_its_positions(
    page_size: int, start: int, length: int, data: st.DataObject
) -> None:
    end = start + length
    at = data.draw(st.integers(start + 1, end - 1))
    first, last = start // page_size, -(-end // page_size)
    pages = {idx: 100 + idx for idx in range(first, last)}
    lower = node(start, end, node(0, start) if start else None)
    lower.data[Kind.FULL] = Residency(ids(*pages.values()), start)
    upper, shared = split(FullComponent(page_size), lower, at)

    def of(low: int, high: int) -> list[int]:
        return [pages[idx] for idx in range(low // page_size, -(-high // page_size))]

    assert upper.data[Kind.FULL].slots.tolist() == of(start, at)
    assert lower.data[Kind.FULL].slots.tolist() == of(at, end)
    assert (upper.data[Kind.FULL].start, lower.data[Kind.FULL].start) == (start, at)
    assert shared == sorted(set(of(start, at)) & set(of(at, end)))
