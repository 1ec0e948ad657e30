"""Traces of tokens, one request a line: what is read, and which rows are refused and why."""

import json

import numpy as np
import pytest

from agentcache.errors import TraceDecodeError, TraceFormatError
from agentcache.simulate.read import read_traces

ROW = {
    "session_id": 7,
    "turn_id": 0,
    "ts": 100.0,
    "num_input_tokens": 3,
    "num_output_tokens": 2,
    "input_tokens": [1, 2, 3],
    "output_tokens": [4, 5],
}


def lines_of(*rows):
    return "".join(
        (row if isinstance(row, str) else json.dumps({**ROW, **row})) + "\n" for row in rows
    )


def read(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text(lines_of(*rows), encoding="utf-8")
    [trace] = read_traces(path)
    return trace


def test_tokens_lengths_and_times_are_those_of_the_rows(tmp_path):
    trace = read(tmp_path, {}, {"turn_id": 1, "ts": 102.5, "input_tokens": [9, 8, 7]})

    first, second = trace.requests
    assert trace.format == "marconi"
    assert trace.prompt_tokens == 6
    assert first.ids.tolist() == [1, 2, 3, 4, 5]
    assert first.ids.dtype == np.int32
    assert (first.prompt_len, first.at, second.at) == (3, 0.0, 2.5)
    assert first.session == second.session == "7"
    assert (first.parent, first.closes, first.marks, first.expect_s) == (None, False, (), None)


def test_what_a_framework_knows_is_read_and_what_the_scorer_knows_is_not(tmp_path):
    known = {
        "session_id": "child",
        "parent_session": 7,
        "closed": True,
        "marks": [3, 1],
        "expect": 2.5,
        "priority": -1,
        "last": True,
    }
    trace = read(tmp_path, {"parent_session": -1, "last": True}, known)

    first, second = trace.requests
    assert (first.parent, first.closes) == (None, False)
    assert (second.session, second.parent, second.closes) == ("child", "7", True)
    assert (second.marks, second.expect_s, second.priority) == ((1, 3), 2.5, -1)


def test_a_request_may_have_no_session_and_no_answer(tmp_path):
    empty = {"session_id": None, "num_output_tokens": 0, "output_tokens": []}
    [request] = read(tmp_path, empty).requests

    assert request.session is None
    assert request.ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"input_tokens": [1, -2, 3]}, "input_tokens[1]", "is -2"),
        ({"input_tokens": [1, 2, 2**31]}, "input_tokens[2]", "is 2147483648"),
        ({"input_tokens": [1, 2, 10**300]}, "input_tokens[2]", "is a number of 997 bits"),
        ({"input_tokens": [1, True, 3]}, "input_tokens[1]", "is a boolean"),
        ({"input_tokens": [1, 2.0, 3]}, "input_tokens[1]", "is a number"),
        ({"input_tokens": [1, "2", 3]}, "input_tokens[1]", "is a string"),
        ({"input_tokens": "123"}, "input_tokens", "is a string"),
        ({"input_tokens": [], "num_input_tokens": 0}, "input_tokens", "is empty"),
        ({"output_tokens": None}, "output_tokens", "is missing or null"),
        ({"num_input_tokens": 4}, "num_input_tokens", "is 4"),
        ({"num_input_tokens": -3}, "num_input_tokens", "is -3"),
        ({"num_output_tokens": 1}, "num_output_tokens", "is 1"),
        ({"num_output_tokens": True}, "num_output_tokens", "is a boolean"),
        ({"turn_id": -1}, "turn_id", "is -1"),
        ({"session_id": True}, "session_id", "is a boolean"),
        ({"session_id": 1.5}, "session_id", "is a number"),
        ({"session_id": -4}, "session_id", "is -4"),
        ({"ts": None}, "ts", "is missing or null"),
        ({"ts": float("nan")}, "ts", "is nan"),
        ({"ts": float("inf")}, "ts", "is inf"),
        ({"ts": False}, "ts", "is a boolean"),
        ({"ts": 99.0}, "ts", "goes back from 100.0 to 99.0"),
        ({"marks": [0]}, "marks[0]", "is 0"),
        ({"marks": [1, 4]}, "marks[1]", "is 4"),
        ({"marks": 3}, "marks", "is a number"),
        ({"parent_session": 12}, "parent_session", "is 12, which has no request before"),
        ({"parent_session": 7}, "parent_session", "is 7"),
        ({"parent_session": True}, "parent_session", "is a boolean"),
        ({"session_id": None, "parent_session": 7}, "parent_session", "is 7"),
        ({"closed": 1}, "closed", "is a number"),
        ({"expect": -1}, "expect", "is -1.0"),
        ({"expect": float("nan")}, "expect", "is nan"),
        ({"priority": 0.5}, "priority", "is a number"),
        ({"priority": 2**40}, "priority", "is 1099511627776"),
    ],
)
def test_a_bad_row_is_named_by_line_and_field_and_costs_only_itself(
    tmp_path, changes, field, problem
):
    trace = read(tmp_path, {}, changes, {"turn_id": 1})

    [error] = trace.problems
    assert isinstance(error, TraceFormatError)
    assert error.line == 2
    assert error.problem.startswith(f"{field} {problem}")
    assert len(trace.requests) == 2


def test_the_parent_of_a_session_stays_the_same(tmp_path):
    trace = read(
        tmp_path,
        {},
        {"session_id": 8, "parent_session": 7},
        {"session_id": 8},
        {"session_id": 8, "parent_session": 7},
    )

    [error] = trace.problems
    assert error.line == 3
    assert "is none, but was 7" in error.problem
    assert [request.parent for request in trace.requests] == [None, "7", "7"]


def test_a_rejected_row_still_makes_its_session_known_to_its_children(tmp_path):
    trace = read(tmp_path, {}, {"session_id": 8, "ts": 0}, {"session_id": 9, "parent_session": 8})

    assert [error.line for error in trace.problems] == [2]
    assert trace.requests[1].parent == "8"


def test_a_rejected_row_does_not_set_the_time_for_those_after_it(tmp_path):
    trace = read(tmp_path, {}, {"ts": 900.0, "marks": [99]}, {"ts": 101.0})

    assert [request.at for request in trace.requests] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"session_id": 7, "input_tokens": [1, 2', "is not JSON"),
        ("[" * 100_000, "nests lists and objects too deep"),
        (f'{{"ts": {"9" * 5000}}}', "cannot be read"),
        ("7", "the record is a number"),
        ("[]", "the record is a list"),
    ],
)
def test_a_line_that_is_no_row_is_named_and_passed_over(tmp_path, line, problem):
    trace = read(tmp_path, {}, line, "", {})

    [error] = trace.problems
    assert error.line == 2
    assert error.problem.startswith(problem)
    assert len(trace.requests) == 2


def test_a_byte_that_is_not_utf8_is_named_with_its_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    good = lines_of({}).encode()
    path.write_bytes(good + b'{"session_id": "\xe9"}\n' + good)
    [trace] = read_traces(path)

    [error] = trace.problems
    assert isinstance(error, TraceDecodeError)
    assert (error.line, len(trace.requests)) == (2, 2)
    assert "byte 0xe9 is not UTF-8" in error.problem


def test_a_bad_first_line_does_not_cost_the_rest(tmp_path):
    trace = read(tmp_path, '{"session_id": 7, "inp', {}, {})

    assert [error.line for error in trace.problems] == [1]
    assert len(trace.requests) == 2


def test_a_trace_without_any_usable_row_raises_its_first_problem(tmp_path):
    with pytest.raises(TraceFormatError, match=r"line 1: ts is missing or null"):
        read(tmp_path, {"ts": None}, {"marks": [9]})


def test_a_limit_counts_usable_rows_and_reads_no_further(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(lines_of({"ts": None}, {}, {}, "{broken"), encoding="utf-8")
    [trace] = read_traces(path, limit=2)

    assert len(trace.requests) == 2
    assert [error.line for error in trace.problems] == [1]
