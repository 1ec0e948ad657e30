"""The odd inputs: each gives the outcome that `expected.json` beside it asks for."""

import json
from pathlib import Path

import pytest

from agentcache.errors import TraceDecodeError
from agentcache.replay.trace import Call, read_file, read_paths

ODD = Path(__file__).parents[1] / "fixtures" / "odd"
EXPECTED = json.loads((ODD / "expected.json").read_text(encoding="utf-8"))


def common_messages(call: Call, before: Call) -> int:
    pairs = zip(call.messages, before.messages, strict=False)
    return next(
        (idx for idx, (new, old) in enumerate(pairs) if new != old),
        min(len(call.messages), len(before.messages)),
    )


def not_append_only(calls: tuple[Call, ...]) -> list[int]:
    return [
        idx
        for idx in range(1, len(calls))
        if calls[idx].messages[: len(calls[idx - 1].messages) + 1]
        != (*calls[idx - 1].messages, calls[idx - 1].answer)
    ]


def test_every_odd_file_has_an_expectation():
    files = {path.name for path in ODD.iterdir()} - {"expected.json"}

    assert files == set(EXPECTED)
    assert len(files) == 10


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_odd_file_has_the_expected_outcome(name):
    outcome = EXPECTED[name]["outcome"]
    result = read_paths(ODD / name)

    counts = (result.loaded, result.partial, result.skipped, len(result.rejected))
    assert (
        counts
        == {
            "ok": (1, 0, 0, 0),
            "empty": (0, 0, 1, 0),
            "error": (0, 0, 0, 1),
            "error-or-replace": (0, 0, 0, 1),
        }[outcome]
    )


@pytest.mark.parametrize("name", sorted(name for name in EXPECTED if "calls" in EXPECTED[name]))
def test_odd_file_has_the_expected_calls(name):
    expected = EXPECTED[name]
    if expected["outcome"].startswith("error"):
        with pytest.raises(TraceDecodeError):
            read_file(ODD / name)
        return
    [run] = read_file(ODD / name)

    assert run.format == expected["format"]
    assert len(run.calls) == expected["calls"]
    assert not_append_only(run.calls) == expected.get("non_append_calls", [])
    if "lcp_messages" in expected:
        assert [
            common_messages(run.calls[idx], run.calls[idx - 1]) for idx in range(1, len(run.calls))
        ] == expected["lcp_messages"]


def test_byte_order_mark_and_crlf_of_the_file_change_no_call(tmp_path):
    raw = (ODD / "bom_crlf.traj.json").read_bytes()
    assert raw.startswith(b"\xef\xbb\xbf")
    assert b"\r\n" in raw
    plain = tmp_path / "plain.traj.json"
    plain.write_bytes(raw.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n"))

    [odd_run] = read_file(ODD / "bom_crlf.traj.json")
    [plain_run] = read_file(plain)

    assert odd_run.calls == plain_run.calls


def test_carriage_returns_inside_strings_are_content(tmp_path):
    path = tmp_path / "x.calls.jsonl"
    row = {
        "messages": [{"role": "user", "content": "a\r\nb\u2028c"}],
        "answer": {"role": "assistant", "content": "\r"},
    }
    path.write_bytes(json.dumps(row, ensure_ascii=False).encode() + b"\r\n")
    [call] = read_file(path)[0].calls

    assert (call.messages[0]["content"], call.answer["content"]) == ("a\r\nb\u2028c", "\r")


def test_byte_that_is_not_utf8_is_named_with_its_offset():
    name = "latin1_byte.traj.json"
    offset = (ODD / name).read_bytes().index(b"\xe9")

    with pytest.raises(TraceDecodeError, match="0xe9 is not UTF-8") as caught:
        read_file(ODD / name)

    assert caught.value.offset == offset
    assert str(ODD / name) in str(caught.value)


def test_truncated_file_is_named_with_line_and_offset():
    name = "truncated.traj.json"

    with pytest.raises(TraceDecodeError, match="cut off") as caught:
        read_file(ODD / name)

    raw = (ODD / name).read_bytes()
    assert caught.value.line == raw[: caught.value.offset].count(b"\n") + 1
    assert raw[caught.value.offset : caught.value.offset + 1] == b'"'
    assert str(ODD / name) in str(caught.value)


def test_second_of_two_consecutive_answers_has_a_prompt_that_ends_with_the_first():
    [run] = read_file(ODD / "consecutive_assistant.traj.json")

    assert any(
        call.messages == (*before.messages, before.answer)
        for before, call in zip(run.calls, run.calls[1:], strict=False)
    )


def test_missing_tool_result_is_not_invented():
    [recorded] = json.loads((ODD / "tool_call_without_result.json").read_text(encoding="utf-8"))
    [run] = read_file(ODD / "tool_call_without_result.json")

    last = run.calls[-1]
    roles = [row["role"] for row in (*last.messages, last.answer)]
    recorded_roles = [row["role"] for row in recorded["traj"]]
    assert roles == recorded_roles[: len(roles)]
    called = [call["id"] for row in last.messages for call in row.get("tool_calls", ())]
    answered = [row["tool_call_id"] for row in last.messages if row["role"] == "tool"]
    assert len(called) == len(answered) + 1


def test_cache_control_marks_are_no_part_of_a_prompt():
    [run] = read_file(ODD / "cache_control_moving.calls.jsonl")

    assert "cache_control" in (ODD / "cache_control_moving.calls.jsonl").read_text(encoding="utf-8")
    assert all(
        set(row) == {"role", "content"} and isinstance(row["content"], str)
        for call in run.calls
        for row in call.messages
    )


def test_text_that_looks_like_control_tokens_stays_text():
    [recorded] = [json.loads((ODD / "special_tokens_in_text.traj.json").read_text("utf-8"))]
    [run] = read_file(ODD / "special_tokens_in_text.traj.json")

    rows = (*run.calls[-1].messages, run.calls[-1].answer)
    assert [row["content"] for row in rows] == [
        row["content"] for row in recorded["messages"][: len(rows)]
    ]


def test_interleaved_subagent_is_a_trajectory_of_its_own():
    main, side = read_file(ODD / "interleaved_subagent.jsonl")

    assert [side.id.rsplit("/", 1)[1]] == EXPECTED["interleaved_subagent.jsonl"]["agent_ids"]
    assert (main.parent, side.parent) == (None, main.id)
    assert side.calls[0].messages[0] != main.calls[0].messages[0]
    assert not_append_only(main.calls) == not_append_only(side.calls) == []
    times = [call.at for call in (*main.calls[:1], *side.calls, *main.calls[1:])]
    assert times == sorted(times)
