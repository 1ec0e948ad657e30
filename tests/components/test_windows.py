"""Windows: which positions a trailing window lets a request resume at, and what a split shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import ids

from agentcache.components.base import WindowComponent
from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.components.swa import SwaComponent
from agentcache.tree.node import EMPTY_TOKENS, Node, Residency
from agentcache.types import Kind, Vote

if TYPE_CHECKING:
    from agentcache.components.base import Component

HERE, GONE, LOWER = Vote.RESIDENT, Vote.ABSENT, Vote.LOADABLE


class ChunkWindow(WindowComponent):
    """Attention within blocks of `chunk` positions."""

    kind = "chunk"

    def __init__(self, chunk: int, page_size: int) -> None:
        super().__init__(page_size)
        self.chunk = chunk

    def reach(self, at: int) -> int:
        return at // self.chunk * self.chunk


def node(start: int, end: int) -> Node:
    tokens = np.arange(start, end, dtype=np.int32)
    return Node(1, tokens, Node(0, EMPTY_TOKENS, None, start), end)


def filed(component: Component, start: int, end: int) -> Node:
    """A node whose pages are numbered like the parts of the sequence that they hold."""
    made = node(start, end)
    if isinstance(component, StateComponent):
        component.commit(made, ids(7))
        return made
    first = component.reach(end) if isinstance(component, WindowComponent) else start
    component.commit(made, pages_of(component, first, end))
    return made


def pages_of(component: Component, start: int, end: int) -> np.ndarray:
    size = component.page_size  # type: ignore[attr-defined]
    return np.arange(start // size, -(-end // size), dtype=np.int32)


def split(component: Component, lower: Node, at: int) -> tuple[Node, list[int]]:
    """What the tree does, for one component."""
    upper = Node(2, lower.tokens[: at - lower.start], lower.parent, at)
    lower.tokens, lower.parent = lower.tokens[at - lower.start :], upper
    return upper, component.on_split(upper, lower).tolist()


def move(component: Component, at: Node, tier: int) -> None:
    """Say that the data lies on that tier."""
    data = at.data[component.kind]
    at.data[component.kind] = Residency(data.slots, data.start, tier)


def votes(component: Component, at: Node) -> list[Vote]:
    return [component.vote(at, position) for position in range(at.start + 1, at.end + 1)]


def slots(component: Component, at: Node) -> set[int]:
    return set(at.data[component.kind].slots.tolist()) if component.kind in at.data else set()


@pytest.mark.parametrize(
    ("window", "at", "first"),
    [(4, 0, 0), (4, 3, 0), (4, 4, 1), (4, 10, 7), (1, 10, 10), (99, 10, 0)],
)
def test_window_reaches_back_over_its_own_length_with_the_next_token_in_it(
    window: int, at: int, first: int
) -> None:
    assert SwaComponent(window, 2).reach(at) == first


def test_long_sequence_can_be_resumed_at_its_end_only() -> None:
    component = SwaComponent(4, 2)
    assert votes(component, filed(component, 0, 10)) == [GONE] * 9 + [HERE]
    assert votes(component, filed(component, 6, 10)) == [GONE] * 3 + [HERE]


def test_short_sequence_can_be_resumed_anywhere_while_its_window_reaches_the_first_token() -> None:
    component = SwaComponent(4, 2)
    for end in (1, 2, 3):
        assert votes(component, filed(component, 0, end)) == [HERE] * end
    assert votes(component, filed(component, 0, 4)) == [GONE] * 3 + [HERE]
    assert votes(component, filed(component, 1, 3)) == [HERE, HERE]


def test_window_of_one_position_needs_nothing_that_came_before() -> None:
    component = SwaComponent(1, 2)
    made = node(0, 10)
    component.commit(made, ids())
    assert votes(component, made) == [GONE] * 9 + [HERE]


def test_window_of_blocks_can_be_resumed_anywhere_in_the_last_block() -> None:
    component = ChunkWindow(4, 2)
    assert votes(component, filed(component, 0, 10)) == [GONE] * 7 + [HERE] * 3
    assert votes(component, filed(component, 9, 10)) == [HERE]


def test_window_that_lies_lower_is_loadable_where_it_reaches_and_absent_elsewhere() -> None:
    component = ChunkWindow(4, 2)
    made = filed(component, 0, 10)
    move(component, made, tier=2)
    assert votes(component, made) == [GONE] * 7 + [LOWER] * 3


def test_windows_of_several_lengths_live_side_by_side_under_their_names() -> None:
    short, long = SwaComponent(3, 2), SwaComponent(9, 2, kind="swa-long")
    made = filed(short, 0, 6)
    long.commit(made, pages_of(long, 0, 6))
    assert votes(short, made) == [GONE] * 5 + [HERE]
    assert votes(long, made) == [HERE] * 6
    assert set(made.data) == {Kind.SWA, "swa-long"}


def test_split_of_a_long_sequence_leaves_the_window_to_the_lower_part() -> None:
    component = SwaComponent(4, 2)
    lower = filed(component, 0, 10)
    data = lower.data[Kind.SWA]
    upper, shared = split(component, lower, 8)
    assert shared == []
    assert upper.data == {}
    assert lower.data == {Kind.SWA: data}


def test_split_of_a_short_sequence_gives_the_upper_part_its_share_of_the_window() -> None:
    component = SwaComponent(20, 4)
    lower = filed(component, 0, 11)
    assert lower.data[Kind.SWA].slots.tolist() == [0, 1, 2]
    upper, shared = split(component, lower, 6)
    assert shared == [0, 1]
    assert upper.data[Kind.SWA].slots.tolist() == [0, 1]
    assert upper.data[Kind.SWA].start == 0
    assert lower.data[Kind.SWA].slots.tolist() == [0, 1, 2], "the lower part needs all of it"
    assert not np.shares_memory(upper.data[Kind.SWA].slots, lower.data[Kind.SWA].slots)


def test_upper_part_that_holds_the_window_keeps_it_when_the_lower_one_loses_it() -> None:
    component = SwaComponent(20, 4)
    lower = filed(component, 0, 11)
    upper, _ = split(component, lower, 6)
    component.evict(lower)
    assert votes(component, upper) == [HERE] * 6
    assert votes(component, lower) == [GONE] * 5


def test_split_of_a_block_shares_what_lies_before_the_cut() -> None:
    component = ChunkWindow(8, 2)
    lower = filed(component, 3, 14)
    assert lower.data["chunk"].slots.tolist() == [4, 5, 6]
    upper, shared = split(component, lower, 11)
    assert shared == upper.data["chunk"].slots.tolist() == [4, 5]
    assert upper.data["chunk"].start == 8


def test_shares_of_a_split_stay_on_their_tier() -> None:
    component = SwaComponent(20, 4)
    lower = filed(component, 0, 11)
    move(component, lower, tier=2)
    upper, _ = split(component, lower, 6)
    assert votes(component, upper) == [LOWER] * 6


PAGED = st.one_of(
    st.builds(FullComponent, st.integers(1, 4)),
    st.builds(SwaComponent, st.integers(1, 24), st.integers(1, 4)),
    st.builds(ChunkWindow, st.integers(1, 10), st.integers(1, 4)),
)
COMPONENTS = st.one_of(PAGED, st.builds(StateComponent))


@given(COMPONENTS, st.integers(0, 9), st.integers(2, 14), st.sampled_from([1, 2]), st.data())
def test_votes_at_every_position_are_what_they_were_before_any_splits(
    component: Component, start: int, length: int, tier: int, data: st.DataObject
) -> None:
    end = start + length
    whole = filed(component, start, end)
    move(component, whole, tier)
    before = votes(component, whole)
    parts = [whole]
    cuts = data.draw(st.lists(st.integers(start + 1, end - 1), unique=True, max_size=4))
    for cut in cuts:
        idx = next(idx for idx, part in enumerate(parts) if part.start < cut < part.end)
        upper, shared = split(component, parts[idx], cut)
        assert set(shared) == slots(component, upper) & slots(component, parts[idx])
        parts.insert(idx, upper)
    assert [vote for part in parts for vote in votes(component, part)] == before


@given(PAGED, st.integers(0, 9), st.integers(2, 14), st.data())
def test_part_of_a_split_that_can_be_resumed_at_holds_all_the_pages_it_reads(
    component: Component, start: int, length: int, data: st.DataObject
) -> None:
    end = start + length
    lower = filed(component, start, end)
    upper, _ = split(component, lower, data.draw(st.integers(start + 1, end - 1)))
    for part in (upper, lower):
        for at in range(part.start + 1, part.end + 1):
            if component.vote(part, at) is GONE:
                continue
            held = part.data[component.kind]
            is_window = isinstance(component, WindowComponent)
            first = component.reach(at) if is_window else part.start
            assert held.start <= first
            if is_window:
                pages = component.pages_for(held, at).tolist()
                assert pages == pages_of(component, held.start, at).tolist()
            else:
                assert held.slots.tolist() == pages_of(component, part.start, part.end).tolist()
