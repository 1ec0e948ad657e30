"""Traces of text: dialogues, and recorded runs as replay makes their calls."""

import gzip
import json
import shutil
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from agentcache.engine.chat import ChatFormat
from agentcache.engine.describe import describe
from agentcache.engine.loader import load_model
from agentcache.engine.tokenizer import Tokenizer
from agentcache.errors import ConfigError, TraceDecodeError, TraceFormatError
from agentcache.replay.need import NeedCounter
from agentcache.replay.trace import read_paths
from agentcache.replayer import Replayer, ReplayOptions
from agentcache.simulate.read import ChatEncoder, read_traces

FIXTURES = Path(__file__).parents[1] / "fixtures"
RUNS = FIXTURES / "trajectories"
TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def loaded():
    return load_model("tiny-hybrid")


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return Tokenizer(loaded.tokenizer)


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return ChatEncoder(ChatFormat(tokenizer), end_id=tokenizer.source.eos_token_id)


def text_of(tokenizer, ids):
    return tokenizer.decode(ids.tolist(), skip_special=False)


def by_session(trace):
    found = defaultdict(list)
    for request in trace.requests:
        found[request.session].append(request)
    return dict(found)


def says(role, content):
    return {"role": role, "content": content}


def call(messages, answer, **changes):
    return {"messages": messages, "answer": says("assistant", answer), **changes}


def write_lines(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return path


def extends(before, after):
    """Whether a prompt begins with another request's prompt and answer."""
    return np.array_equal(after.ids[: len(before.ids)], before.ids)


def test_each_answer_of_a_sharegpt_chat_is_a_request(tokenizer, encoder):
    [trace] = read_traces(FIXTURES / "traces" / "sharegpt.json", tokens=encoder)
    chats = json.loads((FIXTURES / "traces" / "sharegpt.json").read_text())

    assert trace.format == "sharegpt"
    sessions = by_session(trace)
    assert set(sessions) == {chat["id"] for chat in chats}
    for chat in chats:
        answers = [said["value"] for said in chat["conversations"] if said["from"] == "gpt"]
        requests = sessions[chat["id"]]
        assert len(requests) == len(answers)
        for request, answer in zip(requests, answers, strict=True):
            assert answer in text_of(tokenizer, request.ids[request.prompt_len :])
            assert answer not in text_of(tokenizer, request.ids[: request.prompt_len])
        assert all(extends(a, b) for a, b in pairwise(requests))
        assert not any(request.closes for request in requests)


def test_mt_bench_dialogues_are_read(encoder):
    [trace] = read_traces(FIXTURES / "traces" / "mt-bench-101.jsonl", tokens=encoder)
    lines = (FIXTURES / "traces" / "mt-bench-101.jsonl").read_text().splitlines()

    assert trace.format == "mt-bench-101"
    turns = {str(chat["id"]): len(chat["history"]) for chat in map(json.loads, lines)}
    assert {name: len(requests) for name, requests in by_session(trace).items()} == turns


@pytest.mark.parametrize("layout", ["lines", "list"])
def test_lmsys_chats_are_read_with_their_system_prompt_marked(tmp_path, encoder, layout):
    messages = [
        says("system", "Answer in rhyme, and never in prose."),
        says("user", "hi"),
        says("assistant", "sky"),
        says("user", "so"),
        says("assistant", "go"),
    ]
    chats = [{"conversation_id": name, "conversation": messages} for name in ("a", "b")]
    path = tmp_path / "chats.json"
    if layout == "lines":
        write_lines(path, *chats)
    else:
        path.write_text(json.dumps(chats, indent=1), encoding="utf-8")
    [trace] = read_traces(path, tokens=encoder)

    assert trace.format == "lmsys-chat"
    first, other = (by_session(trace)[name] for name in ("a", "b"))
    [mark] = first[0].marks
    assert 0 < mark < first[0].prompt_len
    assert first[1].marks == other[0].marks == (mark,)
    assert np.array_equal(first[0].ids, other[0].ids)


def chat_lines(tmp_path, count):
    said = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}] * 3
    return write_lines(
        tmp_path / "chats.jsonl", *({"id": f"c{n}", "conversations": said} for n in range(count))
    )


def test_drawn_times_ascend_overlap_and_repeat(tmp_path, encoder):
    path = chat_lines(tmp_path, 20)
    [trace] = read_traces(path, tokens=encoder)
    [again] = read_traces(path, tokens=encoder)
    [other] = read_traces(path, tokens=encoder, seed=1)

    times = [request.at for request in trace.requests]
    assert times[0] == 0.0
    assert times == sorted(times)
    order = [request.session for request in trace.requests]
    assert order == [request.session for request in again.requests]
    assert times == [request.at for request in again.requests]
    assert times != [request.at for request in other.requests]
    switches = sum(a != b for a, b in pairwise(order))
    assert switches > len(set(order))  # more than one chat after the other would have


def test_a_limit_takes_the_first_requests_of_the_whole(tmp_path, encoder):
    path = chat_lines(tmp_path, 20)
    [whole] = read_traces(path, tokens=encoder)
    [short] = read_traces(path, tokens=encoder, limit=7)

    assert [(r.session, r.at) for r in short.requests] == [
        (r.session, r.at) for r in whole.requests[:7]
    ]


def test_chats_of_one_id_are_told_apart(tmp_path, encoder):
    said = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    path = write_lines(
        tmp_path / "chats.jsonl",
        {"id": "c", "conversations": said},
        {"id": "c", "conversations": said},
        {"conversations": said},
        {"id": 123456789, "conversations": said},
    )
    [trace] = read_traces(path, tokens=encoder)

    assert set(by_session(trace)) == {"c", "c#2", "chat3", "123456789"}


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ([{"from": "robot", "value": "x"}], "conversations[0].from is 'robot'"),
        ([{"from": "human", "value": None}], "conversations[0].value is missing or null"),
        ([{"from": "human", "value": "x"}], "the record holds no answer"),
        ([{"from": "gpt", "value": "x"}], "the record holds no answer to a question"),
        ([], "the record holds no answer"),
        (["x"], "conversations[0] is a string"),
    ],
)
def test_a_bad_chat_is_named_and_costs_only_itself(tmp_path, encoder, said, problem):
    good = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    path = write_lines(
        tmp_path / "chats.jsonl",
        {"id": "a", "conversations": good},
        {"id": "b", "conversations": said},
        {"id": "c", "conversations": good},
    )
    [trace] = read_traces(path, tokens=encoder)

    [error] = trace.problems
    assert isinstance(error, TraceFormatError)
    assert error.line == 2
    assert error.problem.startswith(problem)
    assert set(by_session(trace)) == {"a", "c"}


def test_text_without_a_tokenizer_is_refused_and_tokens_need_none(tmp_path):
    def never():
        raise AssertionError("made an encoder for a trace of tokens")

    row = {"session_id": 1, "ts": 0, "input_tokens": [1], "output_tokens": []}
    assert len(read_traces(write_lines(tmp_path / "t.jsonl", row), tokens=never)) == 1
    for path in (FIXTURES / "traces" / "sharegpt.json", RUNS / "tau-bench"):
        with pytest.raises(ConfigError, match="needs a tokenizer and a chat template"):
            read_traces(path)


def test_an_encoder_may_be_made_when_it_is_needed(encoder):
    path = FIXTURES / "traces" / "sharegpt.json"

    assert len(read_traces(path, tokens=lambda: encoder)[0].requests) == len(
        read_traces(path, tokens=encoder)[0].requests
    )


@pytest.mark.parametrize(
    ("folder", "concurrency"), [("claude-code", 1), ("claude-code", 3), ("tau-bench", 2)]
)
def test_runs_are_encoded_and_ordered_as_a_replay_does(loaded, encoder, folder, concurrency):
    path = RUNS / folder
    options = ReplayOptions(concurrency=concurrency)
    replayer = Replayer("tiny-hybrid", read_paths(path), options)
    [trace] = read_traces(path, tokens=encoder, concurrency=concurrency)
    counter = NeedCounter()
    for request in trace.requests:
        counter.add(request.ids, request.prompt_len)

    assert counter.need_bytes(describe(loaded.model).shape) == replayer.need_bytes()
    assert [(request.session, request.closes) for request in trace.requests] == [
        (replayer.trajectories[index].id, last) for index, _, last in replayer.order()
    ]


def test_calls_keep_their_recorded_pace(tmp_path, encoder):
    question = [says("user", "hi")]
    longer = [*question, says("assistant", "a"), says("user", "go on")]
    path = write_lines(
        tmp_path / "runs.calls.jsonl",
        call(question, "a", trajectory="x", at=1000.0),
        call(longer, "b", trajectory="x", at=1007.5),
        call(question, "a", trajectory="y"),
        call(longer, "b", trajectory="y"),
        call(question, "a", trajectory="z"),
    )
    [trace] = read_traces(path, tokens=encoder, concurrency=2)

    assert [(request.session, request.at, request.closes) for request in trace.requests] == [
        ("x", 0.0, False),
        ("y", 0.0, False),
        ("y", 1.0, True),
        ("z", 1.0, True),
        ("x", 7.5, True),
    ]
    assert trace.format == "calls-jsonl"
    x = by_session(trace)["x"]
    assert extends(x[0], x[1])


def test_the_end_of_system_and_tools_is_marked(tmp_path, tokenizer, encoder):
    head = says("system", "You sum numbers for people.")
    path = write_lines(
        tmp_path / "runs.jsonl",
        call([head, says("user", "1 and 1")], "2", trajectory="x", tools=[TOOL]),
        call([head, says("user", "2 and 2")], "4", trajectory="y", tools=[TOOL]),
        call([says("user", "3 and 3")], "6", trajectory="z"),
    )
    [trace] = read_traces(path, tokens=encoder)

    x, y, z = trace.requests
    [mark] = x.marks
    marked = text_of(tokenizer, x.ids[:mark])
    assert "You sum numbers" in marked
    assert '"sum"' in marked
    assert "1 and 1" not in marked
    assert np.array_equal(x.ids[:mark], y.ids[: y.marks[0]])
    assert z.marks == ()


def test_a_mark_moves_where_a_run_changes_its_tools(tmp_path, encoder):
    head, other = says("system", "You sum numbers for people."), says("user", "go")
    path = write_lines(
        tmp_path / "runs.jsonl",
        call([head, other], "2", trajectory="x", tools=[TOOL]),
        call([head, other], "2", trajectory="x", tools=[TOOL, TOOL]),
    )
    [trace] = read_traces(path, tokens=encoder)

    assert trace.requests[0].marks < trace.requests[1].marks


def test_a_parent_is_named_where_it_was_read_too(tmp_path, encoder):
    question = [says("user", "hi")]
    path = write_lines(
        tmp_path / "runs.jsonl",
        call(question, "a", trajectory="above"),
        call(question, "b", trajectory="below", parent="above"),
        call(question, "c", trajectory="lost", parent="elsewhere"),
    )
    [trace] = read_traces(path, tokens=encoder)

    assert {request.session: request.parent for request in trace.requests} == {
        "above": None,
        "below": "above",
        "lost": None,
    }


def test_a_folder_of_runs_is_one_trace_beside_those_of_other_formats(tmp_path, encoder):
    for name in ("one", "two"):
        write_lines(tmp_path / f"{name}.jsonl", call([says("user", "hi")], "a"))
    row = {"session_id": 1, "ts": 0, "input_tokens": [1], "output_tokens": []}
    write_lines(tmp_path / "tokens.jsonl", row)
    traces = read_traces(tmp_path, tokens=encoder)

    assert [(trace.name, trace.format, len(trace.requests)) for trace in traces] == [
        ("tokens", "marconi", 1),
        (tmp_path.name, "calls-jsonl", 2),
    ]


def test_compressed_runs_are_read_like_plain_ones(tmp_path, encoder):
    source = RUNS / "openhands"
    target = tmp_path / "openhands"
    shutil.copytree(source, target)
    for file in [file for file in target.rglob("*") if file.is_file()]:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    [plain] = read_traces(source, tokens=encoder, limit=8)
    [packed] = read_traces(target, tokens=encoder, limit=8)

    assert [r.session for r in packed.requests] == [r.session for r in plain.requests]
    assert all(
        np.array_equal(a.ids, b.ids) for a, b in zip(packed.requests, plain.requests, strict=True)
    )
    assert {error.path for error in packed.problems} == {
        error.path.replace(str(source), str(target)) + ".gz" for error in plain.problems
    }


def test_problems_of_runs_are_errors_with_their_lines(tmp_path, encoder):
    good = call([says("user", "hi")], "a")
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{json.dumps(good)}\n{json.dumps({**good, 'at': True})}\n{{broken\n")
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        [trace] = read_traces(file, tokens=encoder)

        assert [(error.path, error.line) for error in trace.problems] == [
            (str(file), 2),
            (str(file), 3),
        ]
        assert len(trace.requests) == 1


def test_a_call_that_the_template_refuses_costs_only_itself(tmp_path, encoder):
    bad = says("assistant", "x") | {"tool_calls": [{"id": "1", "type": "function"}]}
    good = [says("user", "hi")]
    path = write_lines(tmp_path / "runs.jsonl", call(good, "a"), call([*good, bad], "b"))
    [trace] = read_traces(path, tokens=encoder)

    assert len(trace.requests) == 1
    assert len(trace.problems) == 1


def test_recordings_that_hold_no_calls_raise_with_the_reason(encoder):
    with pytest.raises(TraceFormatError, match="InterCode"):
        read_traces(RUNS / "intercode", tokens=encoder)
    with pytest.raises(TraceDecodeError, match="not UTF-8"):
        read_traces(FIXTURES / "odd" / "latin1_byte.traj.json", tokens=encoder)
