"""The canonical calls JSONL: written from any format, read back the same."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.errors import TraceNotFound
from agentcache.replay.trace import Call, Trajectory, read_file, read_paths, write_calls_jsonl

REPOSITORY = Path(__file__).parents[2]
RUNS = REPOSITORY / "tests" / "fixtures" / "trajectories"

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TOOL_CALLS = st.lists(
    st.builds(
        lambda name, arguments: {
            "id": "c",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        TEXT,
        TEXT,
    ),
    min_size=1,
    max_size=2,
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT},
    optional={"tool_calls": TOOL_CALLS, "reasoning_content": TEXT.filter(bool)},
)
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXT}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXT, "tool_call_id": TEXT}),
    ANSWERS,
)
TOOLS = st.lists(
    st.builds(
        lambda name, about: {
            "type": "function",
            "function": {"name": name, "description": about, "parameters": {"type": "object"}},
        },
        TEXT,
        TEXT,
    ),
    min_size=1,
    max_size=2,
).map(tuple)
CALLS = st.builds(
    Call,
    st.lists(MESSAGES, min_size=1, max_size=4).map(tuple),
    st.none() | TOOLS,
    ANSWERS,
    st.none() | st.floats(0, 2e9),
    st.booleans(),
    st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    st.none() | TEXT,
)
TRAJECTORIES = st.lists(
    st.builds(
        Trajectory,
        id=TEXT,
        path=st.just("x"),
        format=st.just("calls-jsonl"),
        calls=st.lists(CALLS, min_size=1, max_size=3).map(tuple),
        parent=st.none() | TEXT,
        notes=st.lists(TEXT, max_size=2, unique=True).map(tuple),
    ),
    max_size=3,
    unique_by=lambda run: run.id,
)


def content(run):
    return run.id, run.calls, run.parent, run.notes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drawn")


@given(TRAJECTORIES)
def test_written_calls_read_back_the_same(folder, trajectories):
    path = folder / "all.calls.jsonl"
    num_lines = write_calls_jsonl(trajectories, path)

    assert num_lines == sum(len(run.calls) for run in trajectories)
    assert [content(run) for run in read_file(path)] == [content(run) for run in trajectories]


def test_runs_of_every_format_survive_the_canonical_form(tmp_path):
    read = read_paths([RUNS, REPOSITORY / "agentcache" / "data" / "sample"])
    path = tmp_path / "all.calls.jsonl"
    write_calls_jsonl(read.trajectories, path)

    assert len({run.format for run in read.trajectories}) == 6
    assert [content(run) for run in read_file(path)] == [content(run) for run in read.trajectories]


def test_rows_of_interleaved_trajectories_are_sorted_out(tmp_path):
    def row(name, text):
        return {
            "trajectory": name,
            "messages": [{"role": "user", "content": text}],
            "response": {"role": "assistant", "content": "ok"},
        }

    path = tmp_path / "x.jsonl"
    rows = [row("a", "1"), row("b", "2"), row("a", "3")]
    path.write_text("\n".join(json.dumps(each) for each in rows), encoding="utf-8")

    assert [
        (run.id, [call.messages[0]["content"] for call in run.calls]) for run in read_file(path)
    ] == [("a", ["1", "3"]), ("b", ["2"])]


def test_text_parts_are_joined_and_marks_left_out(tmp_path):
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}, **mark}, **mark}
    row = {
        "messages": [
            {
                "role": "developer",
                "content": [{"type": "text", "text": "a", **mark}, {"type": "text", "text": "b"}],
                **mark,
            }
        ],
        "tools": [tool],
        "answer": {"role": "assistant", "content": None},
    }
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    [call] = read_file(path)[0].calls

    assert call.messages == ({"role": "system", "content": "ab"},)
    assert call.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    assert call.answer == {"role": "assistant", "content": ""}


def test_arguments_given_as_an_object_become_json_text(tmp_path):
    called = {"id": "c", "function": {"name": "f", "arguments": {"k": "ü"}}}
    row = {
        "messages": [{"role": "user", "content": "u"}],
        "answer": {"role": "assistant", "tool_calls": [called]},
    }
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")

    [made] = read_file(path)[0].calls[0].answer["tool_calls"]
    assert made["function"]["arguments"] == '{"k": "ü"}'


def test_equal_messages_of_successive_calls_are_one_object(tmp_path):
    [run] = read_file(REPOSITORY / "tests/fixtures/odd/cache_control_moving.calls.jsonl")

    for before, call in zip(run.calls, run.calls[1:], strict=False):
        assert all(new is old for new, old in zip(call.messages, before.messages, strict=False))


def test_path_that_cannot_be_written_is_a_typed_error(tmp_path):
    with pytest.raises(TraceNotFound, match="cannot be written"):
        write_calls_jsonl([], tmp_path / "gone" / "x.jsonl")
