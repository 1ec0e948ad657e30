"""What an unlimited cache would hold: distinct tokens, ends of turns, places where paths part."""

from __future__ import annotations

from testkit.helpers import ids

from agentcache.replay.need import NeedCounter


def counted(*calls: tuple[list[int], int]) -> NeedCounter:
    counter = NeedCounter()
    for tokens, prompt_len in calls:
        counter.add(ids(*tokens), prompt_len)
    return counter


def test_each_call_leaves_its_end_and_each_parting_of_prompts_a_branch_point() -> None:
    counter = counted(([1, 2, 3, 4], 3), ([1, 2, 5, 6], 3))
    assert counter.num_checkpoints == 3
    assert counter.num_tokens == 6


def test_answers_that_part_make_a_branch_point_one_before_the_end_of_their_prompt() -> None:
    """At least one token of a prompt is computed, so nobody can go on from its end."""
    counter = counted(([1, 2, 3, 4], 3), ([1, 2, 3, 9], 3), ([1, 2, 3, 8], 3))
    assert counter.num_checkpoints == 4
    assert counter.ideal_cached == 2 + 2


def test_a_call_that_is_repeated_word_for_word_adds_nothing() -> None:
    counter = counted(([1, 2, 3, 4], 3), ([1, 2, 3, 4], 3))
    assert (counter.num_checkpoints, counter.num_tokens) == (1, 4)


def test_a_trajectory_that_only_appends_has_no_branch_points() -> None:
    counter = counted(([1, 2, 3], 2), ([1, 2, 3, 4, 5], 4), ([1, 2, 3, 4, 5, 6, 7], 6))
    assert counter.num_checkpoints == 3
    assert counter.ideal_cached == 3 + 5
