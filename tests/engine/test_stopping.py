"""Stop strings in a stream: nothing of them comes out, however the text is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.engine.stopping import StopStrings
from agentcache.errors import InvalidRequest


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """What comes out of the stream, and the stop string that ended it."""
    finder = StopStrings(stops)
    out = ""
    for piece in pieces:
        safe, stopped = finder.push(piece)
        out += safe
        if stopped:
            return out, finder.matched
    return out + finder.flush(), None


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The plain rule, tried at every length of the text."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_text_before_a_stop_string_comes_out_and_the_rest_does_not():
    assert run(["STOP"], ["hello ST", "OP world"]) == ("hello ", "STOP")


def test_text_that_only_begins_a_stop_string_comes_out_at_the_end():
    finder = StopStrings(["</done>"])
    assert finder.push("so </do") == ("so ", False)
    assert finder.flush() == "</do"


def test_text_is_held_back_no_longer_than_needed():
    finder = StopStrings(["aab"])
    assert finder.push("aa") == ("", False)
    assert finder.push("a") == ("a", False)
    assert finder.push("c") == ("aac", False)


def test_nothing_comes_out_after_a_match():
    finder = StopStrings(["x"])
    assert finder.push("axb") == ("a", True)
    assert finder.push("more") == ("", True)
    assert finder.flush() == ""


def test_the_match_that_is_complete_first_wins():
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")


def test_of_matches_complete_at_once_the_longest_wins():
    assert run(["bc", "abc"], ["abc"]) == ("", "abc")


def test_without_stop_strings_all_text_passes_at_once():
    assert StopStrings([]).push("abc") == ("abc", False)


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], "ab"])
def test_stop_strings_that_cannot_be_looked_for_are_refused(stops):
    with pytest.raises(InvalidRequest):
        StopStrings(stops)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_outcome_does_not_depend_on_how_the_text_is_cut(stops, pieces):
    assert run(stops, pieces) == reference(stops, "".join(pieces))
