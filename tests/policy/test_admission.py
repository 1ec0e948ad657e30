"""Which checkpoints a prompt is worth: what its structure shows, and where it leaves the known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import Forest

from agentcache.errors import ConfigError
from agentcache.policy.admission import Structural, make_admission
from agentcache.tree.radix_tree import Match
from agentcache.types import Kind

ROOT = Forest().root


def match(boundary: int, known_len: int) -> Match:
    lens = {Kind.FULL: known_len, Kind.STATE: boundary}
    return Match(ROOT, boundary, ROOT, known_len, lens, ROOT, boundary)


def test_unknown_prompt_gets_its_structural_boundaries_in_order() -> None:
    assert Structural().plan(match(0, 0), (9, 4), 12) == (4, 9)
    assert Structural().plan(match(0, 0), (), 12) == ()


def test_branch_point_is_where_known_tokens_end() -> None:
    assert Structural().plan(match(2, 7), (), 12) == (7,)
    assert Structural().plan(match(2, 7), (7, 9), 12) == (7, 9)


def test_branch_point_has_to_save_enough() -> None:
    assert Structural().plan(match(2, 7), (), 12, min_gain=5) == (7,)
    assert Structural().plan(match(2, 7), (), 12, min_gain=6) == ()
    assert Structural().plan(match(2, 7), (4, 7), 12, min_gain=6) == (4, 7)


def test_known_path_that_ends_at_the_boundary_is_no_branch_point() -> None:
    assert Structural().plan(match(7, 7), (), 12) == ()


def test_exact_repeat_plans_as_far_as_reuse_goes() -> None:
    assert Structural().plan(match(2, 12), (12,), 12) == (11,)


def test_what_is_reused_is_not_planned_again() -> None:
    assert Structural().plan(match(5, 5), (3, 5, 6), 12) == (6,)


@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.lists(st.integers(-3, 20), max_size=8),
    st.integers(1, 14),
    st.sampled_from(["structural", "marconi", "every-block:3"]),
)
def test_plan_is_ascending_unique_and_inside_what_is_computed(
    boundary: int, more: int, declared: list[int], prompt_len: int, name: str
) -> None:
    known_len = boundary + more
    plan = make_admission(name).plan(match(boundary, known_len), declared, prompt_len)
    wanted = {
        "structural": {*declared, min(known_len, prompt_len - 1)},
        "marconi": {min(known_len, prompt_len - 1)},
        "every-block:3": set(range(0, 30, 3)),
    }[name]
    assert list(plan) == sorted({at for at in wanted if boundary < at < prompt_len})


def test_marconi_takes_the_branch_point_and_heeds_nobody() -> None:
    marconi = make_admission("marconi")
    assert marconi.plan(match(2, 7), (4, 9), 12) == (7,)
    assert marconi.plan(match(2, 7), (4, 9), 12, min_gain=6) == ()
    assert marconi.plan(match(2, 12), (), 12) == (11,), "known whole, it ends inside an edge"
    assert not marconi.heeds_callers
    assert marconi.files_end
    assert marconi.decoded(12, 90) == ()


def test_every_block_takes_full_blocks_of_prompt_and_answer_and_not_the_end() -> None:
    blocks = make_admission("every-block:4")
    assert blocks.plan(match(5, 7), (6,), 16) == (8, 12)
    assert list(blocks.decoded(16, 24)) == [16, 20]
    assert list(blocks.decoded(17, 20)) == []
    assert not blocks.files_end


def test_blocks_have_16_tokens_unless_the_name_says_otherwise() -> None:
    assert list(make_admission("every-block").decoded(1, 40)) == [16, 32]
    assert list(make_admission("every-block:32").decoded(1, 70)) == [32, 64]


@pytest.mark.parametrize(
    "name",
    ["", "blocks", "every-block:", "every-block:0", "every-block:-4", "every-block:x", "marconi:3"],
)
def test_unknown_admission_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="known: structural, marconi, every-block"):
        make_admission(name)
