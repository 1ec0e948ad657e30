"""Miss reports as a reader meets them: one correct sentence per reason, with its numbers."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.helpers import NAMESPACE, ids, make_cache
from testkit.tiers import make_tiered, mixed, serve

from agentcache.session.miss import explain_miss
from agentcache.session.prompts import Prompt
from agentcache.session.turn import MissReason, MissReport

if TYPE_CHECKING:
    from agentcache.cache import Match
    from agentcache.runtime import Runtime

SYSTEM = {"role": "system", "content": "You repair programs. " * 6}
REPORT = MissReport(1234, (2, "tool"), "new", None, 1234, 1234, "was", "now")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def words(**changes: Any) -> str:
    """A report in words, on one line."""
    report = replace(REPORT, **changes)
    assert report.summary.split() == str(report).split()
    assert "\n" not in report.summary
    return report.summary


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("new", "All that is known ends at token 1,234, in message 2 (tool)."),
        (
            "diverged",
            "The prompt leaves the session's history at token 1,234, in message 2 (tool): "
            '"was" was there, "now" is now.',
        ),
        (
            "no_checkpoint",
            "The tokens are known up to token 1,234, in message 2 (tool), but no checkpoint "
            "stands there.",
        ),
        (
            "window_gap",
            "The tokens are known up to token 1,234, in message 2 (tool), but no window is whole "
            "there.",
        ),
        (
            "evicted",
            "The prompt goes on from token 1,234, in message 2 (tool), but what was kept there "
            "was evicted.",
        ),
        (
            "adapter",
            "The tokens are known up to token 1,234, in message 2 (tool), but under another "
            "adapter.",
        ),
        (
            "fingerprint",
            "The tokens are known up to token 1,234, in message 2 (tool), but under another model.",
        ),
    ],
)
def test_every_reason_is_a_sentence(reason: str, said: str) -> None:
    assert words(reason=reason) == said


def test_no_reason_lacks_words() -> None:
    said = {words(reason=reason) for reason in get_args(MissReason)}
    assert len(said) == len(get_args(MissReason)) == 7


def test_numbers_that_say_something_are_said() -> None:
    assert words(message=None) == "All that is known ends at token 1,234."
    assert words(at_token=0, message=None, kv_len=0, state_len=0) == "Nothing is known."
    assert words(reason="evicted", evicted_at=12.345).endswith("was evicted at 12.3 s.")
    assert words(reason="evicted", evicted_at=0.0).endswith("was evicted at 0.0 s.")
    assert words(fallback="the template trims text").endswith(
        " The history was rendered as a whole: the template trims text."
    )


@pytest.mark.parametrize(
    ("kv_len", "state_len", "window_len", "vetoed_by", "said"),
    [
        (7, 7, 7, None, None),
        (7, 7, 0, None, None),
        (7, 4, 0, "state", "The recurrent state is known up to token 4, the KV up to token 7."),
        (7, 0, 0, "state", "The recurrent state is known up to token 0, the KV up to token 7."),
        (7, 0, 0, None, None),
        (0, 7, 0, None, None),
        (7, 0, 3, "swa", "The window is known up to token 3, the KV up to token 7."),
        (7, 0, 0, "swa", "The window is known up to token 0, the KV up to token 7."),
        (
            4000,
            3000,
            2000,
            "swa",
            "The recurrent state is known up to token 3,000, the window up to token 2,000, the KV "
            "up to token 4,000.",
        ),
    ],
)
def test_lengths_are_told_apart_where_they_differ_and_the_model_has_them(
    kv_len: int, state_len: int, window_len: int, vetoed_by: str | None, said: str | None
) -> None:
    text = words(kv_len=kv_len, state_len=state_len, window_len=window_len, vetoed_by=vetoed_by)
    first = "All that is known ends at token 1,234, in message 2 (tool)."
    assert text == (first if said is None else f"{first} {said}")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "nothing"),
        ('a "b" \\', '"a \\"b\\" \\\\"'),
        ("a\nb\t", '"a\\nb\\t"'),
        ("für 测试 \N{PARTY POPPER}", '"für 测试 \N{PARTY POPPER}"'),
        ("\x1b[31m\x9b", '"\\u001b[31m\\u009b"'),
        ("\ud800", '"\\ud800"'),
    ],
)
def test_texts_stay_on_one_line_and_do_nothing_to_a_terminal(text: str, shown: str) -> None:
    said = words(reason="diverged", expected=text, got="now")
    assert f": {shown} was there, " in said
    said.encode()


def test_lines_are_short_and_texts_are_not_torn() -> None:
    text = str(replace(REPORT, reason="diverged", expected="wo-rd " * 12, got="x" * 130))
    assert "x" * 130 in text
    assert max(len(line) for line in text.splitlines() if "xxx" not in line) <= 88
    assert "wo-\n" not in text


TEXTS = st.text(max_size=9)
REPORTS = st.builds(
    MissReport,
    at_token=st.integers(0, 10**6),
    message=st.none() | st.tuples(st.integers(0, 99), TEXTS),
    reason=st.sampled_from(get_args(MissReason)),
    vetoed_by=st.none() | st.sampled_from(["full", "swa", "state"]),
    kv_len=st.integers(0, 10**6),
    state_len=st.integers(0, 10**6),
    expected=TEXTS,
    got=TEXTS,
    evicted_at=st.none() | st.floats(0, 1e9),
    fallback=st.none() | TEXTS,
    window_len=st.integers(0, 10**6),
    line=st.none() | st.tuples(st.integers(1, 99), TEXTS),
)


@given(REPORTS)
def test_report_comes_back_from_json_and_says_the_same(report: MissReport) -> None:
    again = MissReport.from_json(json.loads(json.dumps(report.to_json())))
    assert again == report
    assert str(again) == str(report)
    assert str(report).endswith(".") or report.fallback
    assert str(report)[0].isupper()


def test_json_has_every_field_and_older_ones_may_lack_later_ones() -> None:
    values = REPORT.to_json()
    assert set(values) == {field.name for field in fields(MissReport)}
    assert values["message"] == [2, "tool"]
    del values["window_len"], values["line"]
    assert MissReport.from_json(values).window_len == 0
    assert MissReport.from_json(values).line is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"reason": "magic"}, "reason is 'magic'"),
        ({"reason": None}, "reason is None"),
        ({"at_token": "7"}, "at_token is '7'"),
        ({"kv_len": 1.5}, "kv_len is 1.5"),
        ({"window_len": None}, "window_len is None"),
        ({"message": "user"}, "message is 'user'"),
        ({"message": [3]}, "message is"),
        ({"message": ["3", "user"]}, "message is"),
        ({"line": ["2", "x"]}, "line is"),
        ({"line": 2}, "line is 2"),
        ({"evicted_at": "now"}, "evicted_at is 'now'"),
        ({"expected": None}, "expected is None"),
        ({"more": 1}, "more"),
    ],
)
def test_values_that_are_no_report_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(TypeError, match=named):
        MissReport.from_json({**REPORT.to_json(), **change})
    missing = REPORT.to_json()
    del missing["reason"]
    for values in (missing, [], "text", 3, None):
        with pytest.raises(TypeError):
            MissReport.from_json(values)  # type: ignore[arg-type]


def explained(runtime: Runtime, match: Match, tokens: Any) -> MissReport:
    """The report on a match of a prompt in ids, of a session without a history."""
    report = explain_miss(
        Prompt(tokens, None, 0, (), ()), match, runtime.prompts, runtime.tokenizer
    )
    assert report is not None
    return report


def test_gap_in_the_window_is_reported_with_how_far_it_is_whole(runtime: Runtime) -> None:
    cache = make_tiered(window=5, lower_pages=0)
    serve(cache, ids(*range(10, 50)))
    serve(cache, ids(*range(10, 15)))
    tokens = mixed(range(10, 40), range(100, 120))
    match = cache.tree.match(cache.tree.root(NAMESPACE), tokens, len(tokens) - 1)
    assert match.boundary == 5
    report = explained(runtime, match, tokens)
    assert (report.reason, report.vetoed_by) == ("window_gap", "swa")
    assert (report.at_token, report.kv_len, report.window_len, report.state_len) == (30, 30, 5, 0)
    said = str(report).replace("\n", " ")
    assert "no window is whole there. The window is known up to token 5, the KV up" in said


def test_missing_checkpoint_is_reported_without_a_window(runtime: Runtime) -> None:
    cache = make_cache(shadow=True, state_pages=1)
    serve(cache, ids(*range(10, 50)))
    tokens = mixed(range(10, 40), range(100, 120))
    report = explained(
        runtime, cache.tree.match(cache.tree.root(NAMESPACE), tokens, len(tokens) - 1), tokens
    )
    assert (report.reason, report.vetoed_by, report.window_len) == ("no_checkpoint", "state", 0)
    said = str(report).replace("\n", " ")
    assert said == (
        "The tokens are known up to token 30, but no checkpoint stands there. "
        "The recurrent state is known up to token 0, the KV up to token 30."
    )


def test_turns_of_a_session_say_what_happened(runtime: Runtime) -> None:
    session = runtime.session()
    first = session.chat([SYSTEM, user("Run the tests at 12:01.")], max_new_tokens=4)
    assert str(first.miss) == "Nothing is known."
    edited = session.complete([SYSTEM, user("Run the tests at 12:02.")], max_new_tokens=4)
    said = str(edited.miss).replace("\n", " ")
    assert said.startswith("The prompt leaves the session's history at token ")
    assert "in message 1 (user): " in said
    assert "The recurrent state is known up to token" in said
    runtime.clear()
    lost = session.chat([user("Go on with that, please, until it is done.")], max_new_tokens=2)
    said = str(lost.miss).replace("\n", " ")
    assert "but what was kept there was evicted at " in said
    assert said.startswith("The prompt goes on from token ")
    for turn in (first, edited, lost):
        assert turn.miss is not None
        assert MissReport.from_json(json.loads(json.dumps(turn.miss.to_json()))) == turn.miss
