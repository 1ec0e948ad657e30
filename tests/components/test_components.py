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
from agentcache.tree.node import EMPTY_TOKENS, Node, Residency
from agentcache.types import Kind, Vote

if TYPE_CHECKING:
    from agentcache.components.base import Component

BOTH = pytest.mark.parametrize("component", [FullComponent(4), StateComponent()])


def node(start: int, end: int, parent: Node | None = None) -> Node:
    return Node(np.arange(start, end, dtype=np.int32), parent or Node(EMPTY_TOKENS, None, 0), end)


@BOTH
def test_vote_tells_where_the_data_lies(component: Component) -> None:
    at = node(0, 4)
    assert component.vote(at) is Vote.ABSENT
    at.data[component.kind] = Residency(ids(3), tier=2)
    assert component.vote(at) is Vote.LOADABLE
    at.data[component.kind] = Residency(ids(3))
    assert component.vote(at) is Vote.RESIDENT


@BOTH
def test_vote_is_about_the_own_kind_only(component: Component) -> None:
    at = node(0, 4)
    other = Kind.STATE if component.kind is Kind.FULL else Kind.FULL
    at.data[other] = Residency(ids(3))
    assert component.vote(at) is Vote.ABSENT


@BOTH
def test_data_is_committed_once_and_evicted_once(component: Component) -> None:
    at = node(0, 4)
    component.commit(at, ids(3))
    assert at.data[component.kind] == Residency(at.data[component.kind].slots, tier=1)
    with pytest.raises(AssertionError, match="already holds"):
        component.commit(at, ids(5))
    slots = component.evict(at)
    assert slots is not None
    assert slots.tolist() == [3]
    assert component.evict(at) is None
    component.commit(at, ids(5))


def split(component: Component, lower: Node, at: int) -> tuple[Node, list[int]]:
    """What the tree does, for one component."""
    upper = node(lower.start, at, lower.parent)
    lower.tokens = lower.tokens[at - lower.start :]
    return upper, component.on_split(upper, lower).tolist()


def test_split_at_a_page_border_divides_the_pages() -> None:
    lower = node(0, 12)
    lower.data[Kind.FULL] = Residency(ids(5, 6, 7))
    upper, shared = split(FullComponent(4), lower, 8)
    assert shared == []
    assert upper.data[Kind.FULL].slots.tolist() == [5, 6]
    assert lower.data[Kind.FULL].slots.tolist() == [7]


def test_split_inside_a_page_gives_it_to_both_parts() -> None:
    lower = node(0, 12)
    lower.data[Kind.FULL] = Residency(ids(5, 6, 7))
    upper, shared = split(FullComponent(4), lower, 7)
    assert shared == [6]
    assert upper.data[Kind.FULL].slots.tolist() == [5, 6]
    assert lower.data[Kind.FULL].slots.tolist() == [6, 7]


def test_split_of_an_edge_within_one_page_shares_the_one_page() -> None:
    parent = node(0, 5)
    lower = node(5, 8, parent)
    lower.data[Kind.FULL] = Residency(ids(9))
    upper, shared = split(FullComponent(4), lower, 6)
    assert shared == [9]
    assert upper.data[Kind.FULL].slots.tolist() == lower.data[Kind.FULL].slots.tolist() == [9]


def test_parts_of_a_split_stay_on_their_tier() -> None:
    lower = node(0, 8)
    lower.data[Kind.FULL] = Residency(ids(5, 6), tier=2)
    upper, _ = split(FullComponent(4), lower, 4)
    assert upper.data[Kind.FULL].tier == lower.data[Kind.FULL].tier == 2


def test_split_without_kv_shares_nothing() -> None:
    lower = node(0, 8)
    upper, shared = split(FullComponent(4), lower, 3)
    assert shared == []
    assert upper.data == lower.data == {}


def test_checkpoint_stays_at_the_end_of_the_lower_part() -> None:
    lower = node(0, 8)
    lower.data[Kind.STATE] = Residency(ids(5, 6))
    upper, shared = split(StateComponent(), lower, 3)
    assert shared == []
    assert upper.data == {}
    assert lower.data[Kind.STATE].slots.tolist() == [5, 6]


@given(st.integers(1, 5), st.integers(0, 9), st.integers(2, 12), st.data())
def test_each_part_of_a_split_holds_the_pages_of_its_positions(
    page_size: int, start: int, length: int, data: st.DataObject
) -> None:
    end = start + length
    at = data.draw(st.integers(start + 1, end - 1))
    first, last = start // page_size, -(-end // page_size)
    pages = {idx: 100 + idx for idx in range(first, last)}
    lower = node(start, end, node(0, start) if start else None)
    lower.data[Kind.FULL] = Residency(ids(*pages.values()))
    upper, shared = split(FullComponent(page_size), lower, at)

    def of(low: int, high: int) -> list[int]:
        return [pages[idx] for idx in range(low // page_size, -(-high // page_size))]

    assert upper.data[Kind.FULL].slots.tolist() == of(start, at)
    assert lower.data[Kind.FULL].slots.tolist() == of(at, end)
    assert shared == sorted(set(of(start, at)) & set(of(at, end)))
