"""Traces of block hashes: equal blocks are equal tokens, and answers go on in the next turn."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from agentcache.errors import TraceFormatError
from agentcache.simulate.read import read_traces

FIXTURES = Path(__file__).parents[1] / "fixtures" / "traces"


def common_len(a, b):
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def mooncake(tmp_path, *rows):
    """Rows of (seconds, prompt length, answer length, hashes)."""
    path = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    [trace] = read_traces(path)
    return trace


def claude_code(tmp_path, requests, **changes):
    head = {"id": "s", "block_size": 4, "tool_tokens": 5, "system_tokens": 4}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**head, "requests": requests, **changes}))
    [trace] = read_traces(path)
    return trace


def turn(t, length, answer, hashes, model="big"):
    return {"t": t, "type": "n", "model": model, "in": length, "out": answer, "hash_ids": hashes}


def test_mooncake_has_times_in_milliseconds_and_no_sessions(tmp_path):
    trace = mooncake(tmp_path, (1000, 600, 10, [1, 2]), (3500, 512, 0, [1]))

    assert trace.format == "mooncake"
    assert [request.at for request in trace.requests] == [0.0, 2.5]
    assert [request.prompt_len for request in trace.requests] == [600, 512]
    assert [len(request.ids) for request in trace.requests] == [610, 512]
    assert {(request.session, request.closes) for request in trace.requests} == {(None, False)}


def test_equal_hashes_are_equal_tokens_and_others_are_not(tmp_path):
    first, second = mooncake(tmp_path, (0, 1100, 20, [1, 2, 3]), (1, 1100, 20, [1, 2, 4])).requests

    assert common_len(first.ids, second.ids) == 1024
    assert first.ids.dtype == np.int32
    assert first.ids.min() >= 0
    assert len(np.unique(first.ids)) == len(first.ids)


def test_the_same_file_gives_the_same_tokens(tmp_path):
    rows = [(0, 700, 20, [5, 6]), (1, 2000, 20, [5, 7, 8, 9])]
    before, again = mooncake(tmp_path, *rows), mooncake(tmp_path, *rows)

    for one, other in zip(before.requests, again.requests, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)


def test_a_partial_block_has_the_tokens_of_its_hash(tmp_path):
    first, second = mooncake(tmp_path, (0, 700, 9, [1, 2]), (1, 600, 9, [1, 2])).requests

    assert common_len(first.ids[:700], second.ids[:600]) == 600


def test_an_answer_has_the_tokens_of_the_turn_that_holds_all_full_blocks(tmp_path):
    first, second, third = mooncake(
        tmp_path,
        (0, 1100, 100, [1, 2, 3]),
        (1, 1300, 300, [1, 2, 4]),
        (2, 1700, 50, [1, 2, 4, 5]),
    ).requests

    assert common_len(first.ids, second.ids) == 1200
    assert common_len(second.ids, third.ids) == 1600


@pytest.mark.parametrize(
    "later",
    [
        pytest.param((1, 1150, 10, [1, 2, 4]), id="too short for prompt and answer"),
        pytest.param((1, 2000, 10, [1, 9, 4, 5]), id="another second block"),
    ],
)
def test_a_request_that_is_no_next_turn_shares_its_blocks_alone(tmp_path, later):
    first, second = mooncake(tmp_path, (0, 1100, 100, [1, 2, 3]), later).requests

    assert common_len(first.ids, second.ids) in (512, 1024)


def test_one_shared_block_makes_no_next_turn(tmp_path):
    first, second = mooncake(tmp_path, (0, 600, 100, [1, 2]), (1, 2000, 9, [1, 3, 4, 5])).requests

    assert common_len(first.ids, second.ids) == 512


def test_only_the_first_that_goes_on_is_the_next_turn(tmp_path):
    first, second, retry = mooncake(
        tmp_path,
        (0, 1100, 100, [1, 2, 3]),
        (1, 1500, 9, [1, 2, 4]),
        (2, 1500, 9, [1, 2, 5]),
    ).requests

    assert common_len(first.ids, second.ids) == 1200
    assert common_len(first.ids, retry.ids) == 1024


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ((5, 600, 1, [1]), "hash_ids", "has 1 blocks"),
        ((5, 600, 1, [1, 2, 3]), "hash_ids", "has 3 blocks"),
        ((5, 600, 1, [1, -2]), "hash_ids[1]", "is -2"),
        ((5, 600, 1, [1, True]), "hash_ids[1]", "is a boolean"),
        ((5, 600, 1, [1, 2**63]), "hash_ids[1]", "is 9223372036854775808"),
        ((5, 600, 1, None), "hash_ids", "is missing or null"),
        ((5, 0, 1, []), "input_length", "is 0"),
        ((5, -600, 1, [1, 2]), "input_length", "is -600"),
        ((5, 600, -1, [1, 2]), "output_length", "is -1"),
        ((5, 600, 2**24 + 1, [1, 2]), "output_length", "is 16777217"),
        ((5, 600.0, 1, [1, 2]), "input_length", "is a number"),
        ((float("nan"), 600, 1, [1, 2]), "timestamp", "is nan"),
        ((4, 600, 1, [1, 2]), "timestamp", "goes back from 5.0 to 4.0"),
    ],
)
def test_a_bad_mooncake_row_is_named_and_costs_only_itself(tmp_path, row, field, problem):
    good = (5, 100, 1, [1])
    trace = mooncake(tmp_path, good, row, good)

    [error] = trace.problems
    assert isinstance(error, TraceFormatError)
    assert (error.line, len(trace.requests)) == (2, 2)
    assert error.problem.startswith(f"{field} {problem}")


def test_published_mooncake_rows_are_read_whole():
    [trace] = read_traces(FIXTURES / "mooncake.jsonl")
    by_length = {request.prompt_len: request for request in trace.requests}

    rows = [json.loads(line) for line in (FIXTURES / "mooncake.jsonl").read_text().splitlines()]
    assert len(trace.requests) == len(rows)
    assert not trace.problems
    row, later = next(
        (a, b)
        for a in rows
        for b in rows
        if b["hash_ids"][: a["input_length"] // 512] == a["hash_ids"][: a["input_length"] // 512]
        and b["input_length"] > a["input_length"] + a["output_length"]
        and a["input_length"] >= 1024
    )
    request, turn_after = by_length[row["input_length"]], by_length[later["input_length"]]
    assert common_len(request.ids, turn_after.ids) == len(request.ids)


def test_a_claude_code_session_closes_and_marks_tools_and_system(tmp_path):
    trace = claude_code(tmp_path, [turn(0.0, 13, 3, [1, 2, 3]), turn(9.0, 22, 5, [1, 2, 3, 4, 5])])

    first, second = trace.requests
    assert trace.format == "claude-code-kv"
    assert {request.session for request in trace.requests} == {"s"}
    assert [request.closes for request in trace.requests] == [False, True]
    assert [request.at for request in trace.requests] == [0.0, 9.0]
    assert first.marks == second.marks == (5, 9)
    assert common_len(first.ids, second.ids) == 16


def test_a_prompt_goes_on_where_its_answer_was_shortened(tmp_path):
    trace = claude_code(tmp_path, [turn(0.0, 15, 20, [1, 2, 3]), turn(9.0, 22, 5, [1, 2, 3, 4, 5])])

    first, second = trace.requests
    assert common_len(first.ids, second.ids) == 15


def test_a_prompt_without_the_head_has_no_marks(tmp_path):
    trace = claude_code(tmp_path, [turn(0.0, 13, 3, [1, 2, 3]), turn(9.0, 13, 5, [8, 2, 3])])

    assert trace.requests[1].marks == ()


def test_another_model_is_another_session_and_shares_nothing(tmp_path):
    trace = claude_code(
        tmp_path,
        [
            turn(0.0, 13, 3, [1, 2, 3]),
            turn(1.0, 13, 3, [1, 2, 3], model="small"),
            turn(2.0, 13, 3, [1, 2, 3]),
        ],
    )

    big, small, again = trace.requests
    assert [request.session for request in trace.requests] == ["s", "s+small", "s"]
    assert [request.closes for request in trace.requests] == [False, True, True]
    assert common_len(big.ids, small.ids) == 0
    assert common_len(big.ids, again.ids) >= 12


def test_subagents_are_sessions_with_times_of_their_own_beginning(tmp_path):
    below = {
        "t": 10.0,
        "type": "subagent",
        "agent_id": "a1",
        "tool_tokens": 4,
        "system_tokens": 2,
        "requests": [turn(0.0, 9, 2, [7, 8]), turn(4.0, 13, 2, [7, 8, 9])],
    }
    trace = claude_code(
        tmp_path, [turn(3.0, 13, 3, [1, 2, 3]), below, turn(12.0, 13, 3, [1, 2, 3])]
    )

    seen = [
        (request.session, request.at, request.parent, request.closes, request.marks)
        for request in trace.requests
    ]
    assert seen == [
        ("s", 0.0, None, False, (5, 9)),
        ("s/a1", 7.0, "s", False, (4, 6)),
        ("s", 9.0, None, True, (5, 9)),
        ("s/a1", 11.0, "s", True, (4, 6)),
    ]


def test_a_session_that_a_limit_cuts_off_does_not_close(tmp_path):
    path = tmp_path / "trace.json"
    requests = [turn(float(n), 13, 3, [1, 2, 3]) for n in range(3)]
    path.write_text(json.dumps({"block_size": 4, "requests": requests}))
    [trace] = read_traces(path, limit=2)

    assert [request.closes for request in trace.requests] == [False, False]


def test_two_documents_of_one_file_share_nothing(tmp_path):
    path = tmp_path / "trace.jsonl"
    document = {"id": "s", "block_size": 4, "requests": [turn(0.0, 13, 3, [1, 2, 3])]}
    path.write_text(f"{json.dumps(document)}\n{json.dumps(document)}\n")
    first, second = read_traces(path)[0].requests

    assert (first.session, second.session) == ("s", "s#2")
    assert common_len(first.ids, second.ids) == 0


def test_published_claude_code_traces_are_read_whole():
    [agents] = read_traces(FIXTURES / "claude-code-kv.subagents.json.gz")
    [models] = read_traces(FIXTURES / "claude-code-kv.models.json.gz")

    assert not agents.problems
    assert {(request.session, request.parent) for request in agents.requests} == {
        ("trace_0291", None),
        ("trace_0291/agent_001", "trace_0291"),
        ("trace_0291/agent_002", "trace_0291"),
    }
    with gzip.open(FIXTURES / "claude-code-kv.models.json.gz") as file:
        used = [request["model"] for request in json.load(file)["requests"]]
    assert len({request.session for request in models.requests}) == len(set(used)) == 2
    assert all(
        mark <= request.prompt_len
        for trace in (agents, models)
        for request in trace.requests
        for mark in request.marks
    )


@pytest.mark.parametrize(
    ("bad", "field", "problem"),
    [
        (turn(5.0, 13, 3, [1, 2]), "hash_ids", "has 2 blocks"),
        (turn(5.0, 13, 3, [1, 2, 3, 4, 5]), "hash_ids", "has 5 blocks"),
        (turn(-1.0, 13, 3, [1, 2, 3]), "t", "goes back from 0.0 to -1.0"),
        (turn(float("nan"), 13, 3, [1, 2, 3]), "t", "is nan"),
        (turn(5.0, -13, 3, [1, 2, 3]), "in", "is -13"),
        (turn(5.0, 13, None, [1, 2, 3]), "out", "is missing or null"),
        (turn(5.0, 13, 3, [1, 2, 3], model=None), "model", "is missing or null"),
        ({"t": 5.0, "type": "subagent"}, "agent_id", "is missing or null"),
    ],
)
def test_a_bad_claude_code_request_is_named_by_its_place(tmp_path, bad, field, problem):
    good = turn(0.0, 13, 3, [1, 2, 3])
    trace = claude_code(tmp_path, [good, bad, good])

    [error] = trace.problems
    assert error.problem.startswith(f"requests[1].{field} {problem}")
    assert len(trace.requests) == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 2**16 + 1}, "block_size is 65537"),
        ({"block_size": True}, "block_size is a boolean"),
        ({"requests": {}}, "requests is an object"),
        ({"tool_tokens": -1}, "tool_tokens is -1"),
        ({"requests": []}, "holds no request"),
    ],
)
def test_a_claude_code_file_that_cannot_be_used_raises(tmp_path, changes, problem):
    with pytest.raises(TraceFormatError, match=problem):
        claude_code(tmp_path, **{"requests": [turn(0.0, 13, 3, [1, 2, 3])], **changes})
