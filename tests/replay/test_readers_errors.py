"""Input that cannot be used: a typed error that names file, line or offset, field and remedy."""

import json
import os
import sys

import pytest

from agentcache.errors import TraceDecodeError, TraceError, TraceFormatError, TraceNotFound
from agentcache.replay.trace import read_file, read_paths

USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}


def write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_call(path, **changes):
    row = {"messages": [USER], "answer": ANSWER, **changes}
    return write(path, {key: value for key, value in row.items() if value is not ...})


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"messages": "text"}, "messages", "is a string"),
        ({"messages": 3}, "messages", "is a number"),
        ({"messages": []}, "messages", "is empty"),
        ({"messages": [3]}, "messages[0]", "is a number"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": 7, "content": "x"}]}, "messages[0].role", "is a number"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "is 'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"role": "user", "content": 1.5}]}, "messages[0].content", "is a number"),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content[0].type",
            "is 'image_url'",
        ),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": None}]}]},
            "messages[1].content[0].text",
            "is missing",
        ),
        (
            {"answer": {**ANSWER, "tool_calls": [{"function": {"name": "f"}}]}},
            "answer.tool_calls[0].function.arguments",
            "is missing",
        ),
        ({"answer": {**ANSWER, "tool_calls": {"id": 1}}}, "answer.tool_calls", "is an object"),
        ({"answer": {**ANSWER, "function_call": {"name": "f"}}}, "function_call", "is the form"),
        ({"answer": "text"}, "answer", "is a string"),
        ({"answer": USER}, "answer.role", "is 'user'"),
        ({"response": {"choices": []}, "answer": ...}, "response.choices", "is empty"),
        ({"tools": [{"name": "f"}]}, "tools[0].function", "is missing"),
        ({"answer_ids": "1, 2"}, "answer_ids", "is a string"),
        ({"answer_ids": [1, 2.0]}, "answer_ids[1]", "is a number"),
        ({"answer_ids": [True]}, "answer_ids[0]", "is a boolean"),
        ({"answer_ids": [1, None]}, "answer_ids[1]", "is missing or null"),
        ({"answer_ids": [1, -1]}, "answer_ids[1]", "is -1"),
        ({"answer_ids": [2**31]}, "answer_ids[0]", "is 2147483648"),
        ({"answer_ids": [10**999]}, "answer_ids[0]", "is a number"),
        ({"fingerprint": 7}, "fingerprint", "is a number"),
        ({"at": "noon"}, "at", "is a string"),
        ({"at": True}, "at", "is a boolean"),
        ({"at": float("inf")}, "at", "is inf"),
        ({"exact": 1}, "exact", "is a number"),
        ({"trajectory": 5}, "trajectory", "is a number"),
        ({"notes": "n"}, "notes", "is a string"),
    ],
)
def test_wrong_type_is_named_with_its_field(tmp_path, changes, field, problem):
    path = write_call(tmp_path / "x.calls.jsonl", **changes)

    with pytest.raises(TraceFormatError) as caught:
        read_file(path)

    assert str(path) in str(caught.value)
    assert field in caught.value.problem
    assert problem in caught.value.problem
    assert caught.value.remedy
    assert caught.value.line == 1


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"messages": {"0": USER}, "info": {}}, "messages"),
        ({"messages": [{**ANSWER, "extra": {"response": {"created": "x"}}}]}, "created"),
        ({"history": 4, "trajectory": []}, "history"),
        ({"history": [USER], "trajectory": [1]}, "trajectory[0]"),
        ({"history": [{**USER, "agent": 3}]}, "history[0].agent"),
        ({"history": [USER], "trajectory": [], "replay_config": "{"}, "replay_config"),
        ({"history": [USER], "trajectory": [], "replay_config": {"agent": []}}, "agent"),
        ({"history": [USER], "trajectory": [{"query": 1}]}, "trajectory[0].query"),
        ([{"task_id": 0, "traj": [{"role": "user", "content": 1}]}], "[0].traj[0].content"),
        ([{"task_id": [], "traj": []}], "[0].task_id"),
        ({"instance_id": "i", "metadata": {}, "history": [3]}, "history[0]"),
        (
            {"instance_id": "i", "metadata": {}, "history": [{"tool_call_metadata": {}}]},
            "tool_call_metadata.model_response",
        ),
        (
            {
                "instance_id": "i",
                "metadata": {},
                "history": [{"action": "message", "args": {"content": "x", "image_urls": ["u"]}}],
            },
            "args.image_urls",
        ),
        ({"messages": [USER], "response": {"choices": 1}}, "response.choices"),
        ({"messages": [USER], "response": {"choices": []}, "timestamp": "x"}, "choices"),
        ({"type": "user", "uuid": 3, "message": {}}, "uuid"),
        ({"type": "user", "uuid": "u", "message": {"content": 4}}, "message.content"),
        ({"type": "assistant", "uuid": "u", "message": {"content": [{}]}}, "content[0].type"),
    ],
)
def test_wrong_type_in_any_format_is_named_with_its_field(tmp_path, value, field):
    path = write(tmp_path / "x.json", value)

    with pytest.raises(TraceFormatError) as caught:
        read_file(path)

    assert field in caught.value.problem


def test_bad_line_is_named_and_the_others_are_kept(tmp_path):
    path = tmp_path / "x.calls.jsonl"
    good = json.dumps({"messages": [USER], "answer": ANSWER})
    head = f"{good}\n\n"
    path.write_text(f'{head}{good[:20]}\n{{"messages": 1, "answer": {{}}}}\n{good}\n', "utf-8")

    result = read_paths(path)

    assert (result.loaded, result.partial, len(result.rejected)) == (0, 1, 0)
    assert [len(run.calls) for run in result.trajectories] == [2]
    first, second = result.warnings
    assert f"{path}, line 3, offset" in first
    assert f"{path}, line 4: messages is a number" in second
    with pytest.raises(TraceDecodeError) as caught:
        read_file(path)
    assert caught.value.line == 3
    assert caught.value.offset is not None
    assert len(head) <= caught.value.offset <= len(head) + 20


def test_byte_that_is_not_utf8_costs_only_its_line(tmp_path):
    path = tmp_path / "x.calls.jsonl"
    good = json.dumps({"messages": [USER], "answer": ANSWER}).encode()
    path.write_bytes(good + b"\n" + good.replace(b'"u"', b'"\xe9"') + b"\n")

    result = read_paths(path)

    assert (result.partial, [len(run.calls) for run in result.trajectories]) == (1, [1])
    assert f"line 2, offset {path.read_bytes().index(0xE9)}" in result.warnings[0]


def test_line_of_no_known_format_before_the_first_call_is_not_dropped_in_silence(tmp_path):
    path = tmp_path / "x.calls.jsonl"
    path.write_text(
        '{"written_by": "me"}\n' + json.dumps({"messages": [USER], "answer": ANSWER}), "utf-8"
    )

    result = read_paths(path)

    assert result.partial == 1
    assert "line 1: is no recorded run" in result.warnings[0]


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("depth", [300, 100_000])
def test_deep_nesting_is_a_typed_error_at_its_offset(tmp_path, opening, closing, depth):
    path = tmp_path / "x.json"
    path.write_text(opening * depth + "1" + closing * depth, encoding="utf-8")

    with pytest.raises(TraceDecodeError, match="deeper than the limit of 200") as caught:
        read_file(path)

    assert caught.value.offset == len(opening) * 200


def test_depth_of_brackets_inside_strings_does_not_count(tmp_path):
    path = write_call(tmp_path / "x.json", messages=[{"role": "user", "content": "[{" * 5000}])

    assert len(read_file(path)[0].calls) == 1


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_record_above_the_limit_is_a_typed_error(tmp_path, name):
    path = write_call(tmp_path / name, messages=[{"role": "user", "content": "x" * 5000}])

    with pytest.raises(TraceFormatError, match="longer than the limit of 4000 bytes"):
        read_file(path, max_bytes=4000)


def test_line_above_the_limit_costs_only_itself(tmp_path):
    path = tmp_path / "x.calls.jsonl"
    rows = [
        json.dumps({"messages": [{"role": "user", "content": text}], "answer": ANSWER})
        for text in ("short", "x" * 5000, "last")
    ]
    path.write_text("\n".join([*rows, "{"]), encoding="utf-8")

    result = read_paths(path, max_bytes=4000)

    assert [call.messages[0]["content"] for call in result.trajectories[0].calls] == [
        "short",
        "last",
    ]
    too_long, cut_off = result.warnings
    assert "line 2: is longer than the limit" in too_long
    assert f"line 4, offset {path.stat().st_size}:" in cut_off


@pytest.mark.parametrize("step", ["_decode.json.loads", "calls_jsonl.read_messages"])
def test_file_that_does_not_fit_into_memory_is_a_typed_error(tmp_path, monkeypatch, step):
    def exhausted(*_args, **_kwargs):
        raise MemoryError

    monkeypatch.setattr(f"agentcache.replay.readers.{step}", exhausted)
    path = write_call(tmp_path / "x.json")

    with pytest.raises(TraceFormatError, match="does not fit into memory"):
        read_file(path)
    assert [where for where, _ in read_paths(path).rejected] == [str(path)]


def test_number_of_thousands_of_digits_is_no_crash(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"messages": [], "cost": ' + "9" * 5000 + "}", encoding="utf-8")

    assert read_file(path)[0].calls == ()


def test_several_records_in_a_json_file_are_told_to_be_jsonl(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}\n{}\n", encoding="utf-8")

    with pytest.raises(TraceDecodeError, match=r"name a file of one record per line \.jsonl"):
        read_file(path)


def test_unpaired_surrogate_is_replaced_with_a_note(tmp_path):
    path = tmp_path / "x.calls.jsonl"
    row = {"messages": [{"role": "user", "content": "cut \ud83d"}], "answer": ANSWER}
    path.write_text(json.dumps(row), encoding="utf-8")
    [run] = read_file(path)

    assert run.calls[0].messages[0]["content"] == "cut \ufffd"
    assert any("surrogates" in note for note in run.notes)


@pytest.mark.parametrize(
    "name", ["gone.json", "gone/deeper.json", "\x00.json", "\ud800.json", "x" * 300]
)
def test_path_that_is_not_there_is_a_typed_error(tmp_path, name):
    with pytest.raises(TraceNotFound):
        read_file(tmp_path / name)

    [(path, error)] = read_paths(tmp_path / name).rejected
    assert path == str(tmp_path / name.replace("\ud800", "\ufffd"))
    assert isinstance(error, TraceNotFound)


def test_folder_is_no_file(tmp_path):
    with pytest.raises(TraceNotFound, match="cannot be read"):
        read_file(tmp_path)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="a superuser reads every file")
def test_file_without_read_permission_is_a_typed_error(tmp_path):
    path = write_call(tmp_path / "x.json")
    path.chmod(0)

    with pytest.raises(TraceNotFound, match="cannot be read"):
        read_file(path)


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes in the file system")
def test_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.json")

    with pytest.raises(TraceNotFound, match="no regular file"):
        read_file(tmp_path / "x.json")
    [(_, error)] = read_paths(tmp_path).rejected
    assert isinstance(error, TraceNotFound)


@pytest.mark.parametrize("value", [None, 3, "text", {}, {"a": 1}, [1], [[]], [{"a": 1}]])
def test_json_of_no_known_format_is_a_typed_error(tmp_path, value):
    with pytest.raises(TraceFormatError, match="no recorded run of a known format"):
        read_file(write(tmp_path / "x.json", value))


def test_loop_in_the_tree_of_a_session_is_a_typed_error(tmp_path):
    path = tmp_path / "s.jsonl"
    rows = [
        {"type": "user", "uuid": "a", "parentUuid": "b", "message": {"content": "x"}},
        {"type": "assistant", "uuid": "b", "parentUuid": "a", "message": {"content": "y"}},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")

    with pytest.raises(TraceError, match="leads back to the record itself"):
        read_file(path)
