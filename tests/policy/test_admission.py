"""Which checkpoints a prompt is worth: what its structure shows, and where it leaves the known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import Forest

from agentcache.policy.admission import plan_checkpoints
from agentcache.tree.radix_tree import Match
from agentcache.types import Kind

ROOT = Forest().root


def match(boundary: int, known_len: int) -> Match:
    lens = {Kind.FULL: known_len, Kind.STATE: boundary}
    return Match(ROOT, boundary, ROOT, known_len, lens, ROOT, boundary)


def test_unknown_prompt_gets_its_structural_boundaries_in_order() -> None:
    assert plan_checkpoints(match(0, 0), (9, 4), 12) == (4, 9)
    assert plan_checkpoints(match(0, 0), (), 12) == ()


def test_branch_point_is_where_known_tokens_end() -> None:
    assert plan_checkpoints(match(2, 7), (), 12) == (7,)
    assert plan_checkpoints(match(2, 7), (7, 9), 12) == (7, 9)


def test_branch_point_has_to_save_enough() -> None:
    assert plan_checkpoints(match(2, 7), (), 12, min_gain=5) == (7,)
    assert plan_checkpoints(match(2, 7), (), 12, min_gain=6) == ()
    assert plan_checkpoints(match(2, 7), (4, 7), 12, min_gain=6) == (4, 7)


def test_known_path_that_ends_at_the_boundary_is_no_branch_point() -> None:
    assert plan_checkpoints(match(7, 7), (), 12) == ()


def test_exact_repeat_plans_nothing_at_its_end() -> None:
    assert plan_checkpoints(match(2, 12), (12,), 12) == ()


def test_what_is_reused_is_not_planned_again() -> None:
    assert plan_checkpoints(match(5, 5), (3, 5, 6), 12) == (6,)


@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.lists(st.integers(-3, 20), max_size=8),
    st.integers(1, 14),
)
def test_plan_is_ascending_unique_and_inside_what_is_computed(
    boundary: int, more: int, structural: list[int], prompt_len: int
) -> None:
    known_len = boundary + more
    plan = plan_checkpoints(match(boundary, known_len), structural, prompt_len)
    wanted = {*structural, known_len}
    assert list(plan) == sorted({at for at in wanted if boundary < at < prompt_len})
