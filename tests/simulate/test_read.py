"""Files and folders of traces: layouts, compression, names, and what cannot be read."""

import gzip
import json
import os
import re

import pytest

from agentcache.errors import ConfigError, TraceDecodeError, TraceFormatError, TraceNotFound
from agentcache.replay.readers.base import Source
from agentcache.simulate.read import read_traces
from agentcache.simulate.readers.stream import rows

ROW = {"session_id": 1, "ts": 0.0, "input_tokens": [1, 2], "output_tokens": [3]}
LINE = json.dumps(ROW) + "\n"


def write(path, content=LINE):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("name", ["t.jsonl.gz", "t.jsonl", "t", "t.json", "t.txt"])
def test_compression_and_form_are_told_by_the_content(tmp_path, name):
    [plain] = read_traces(write(tmp_path / name, LINE * 2))
    [packed] = read_traces(write(tmp_path / name, gzip.compress((LINE * 2).encode())))

    assert plain.name == packed.name == name.removesuffix(".gz").split(".json")[0]
    assert [r.ids.tolist() for r in plain.requests] == [[1, 2, 3], [1, 2, 3]]
    assert [r.ids.tolist() for r in packed.requests] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(json.dumps([ROW, ROW]), id="list on one line"),
        pytest.param(json.dumps([ROW, ROW], indent=2), id="list on many lines"),
        pytest.param(f"\n [ {LINE} , {LINE} ] \n\n", id="list with space around"),
        pytest.param("\ufeff" + LINE + LINE, id="lines after a byte order mark"),
        pytest.param("\ufeff" + json.dumps([ROW, ROW]), id="list after a byte order mark"),
        pytest.param(f"\n{LINE}\n\n{LINE.strip()}", id="lines with blank ones between"),
        pytest.param(LINE.replace("\n", "\r\n") * 2, id="lines that end in CRLF"),
    ],
)
def test_every_layout_of_rows_is_read(tmp_path, content):
    [trace] = read_traces(write(tmp_path / "t.json", content))

    assert len(trace.requests) == 2
    assert not trace.problems


def test_a_document_over_several_lines_is_one_row(tmp_path):
    path = write(tmp_path / "t.jsonl", json.dumps(ROW, indent=2))

    assert len(read_traces(path)[0].requests) == 1


def test_rows_of_a_list_are_named_by_the_line_they_begin_on(tmp_path):
    values = [ROW, {**ROW, "ts": None}, ROW, {**ROW, "marks": [7]}]
    path = write(tmp_path / "t.json", json.dumps(values, indent=1))
    [trace] = read_traces(path)

    lines = path.read_text().splitlines()
    begins = [number for number, line in enumerate(lines, 1) if line == " {"]
    assert [error.line for error in trace.problems] == [begins[1], begins[3]]


def test_long_lists_are_read_as_they_come(tmp_path):
    text = 'é\n\\"[{' * 40_000  # an element beyond the size of one read
    values = [{"n": 1}, {"text": text}, *({"n": n} for n in range(60_000))]
    path = write(tmp_path / "t.json", json.dumps(values, ensure_ascii=False, indent=0))

    assert [row.data for row in rows(Source(path))] == values


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("", "is cut off"),
        (",", "Expecting value"),
        (f",\n{LINE[:30]}", "Unterminated string|Expecting"),
        ("] 5", "more follows the end of the list"),
        ('\n{"a": 1}]', "expected ',' or ']'"),
        (",]", "Expecting value"),
    ],
)
def test_a_damaged_list_keeps_what_stands_before_the_damage(tmp_path, end, problem):
    [trace] = read_traces(write(tmp_path / "t.json", f"[{LINE},{LINE}{end}"))

    [error] = trace.problems
    assert isinstance(error, TraceDecodeError)
    assert error.line >= 3
    assert re.search(problem, error.problem)
    assert len(trace.requests) == 2


def test_a_damaged_list_is_not_read_to_its_end_for_the_damage(tmp_path):
    path = write(tmp_path / "t.json", f"[{LINE},{{]" + " 1," * 1_000_000)
    source = Source(path)
    stream = rows(source)
    next(stream)

    with pytest.raises(TraceDecodeError, match="line 2"):
        next(stream)


def test_a_byte_in_a_list_that_is_not_utf8_is_named_by_its_line(tmp_path):
    content = f"[\n{LINE},{LINE},".encode() + b'\n{"session_id": "\xff"}]'
    [trace] = read_traces(write(tmp_path / "t.json", content))

    [error] = trace.problems
    assert isinstance(error, TraceDecodeError)
    assert (error.line, len(trace.requests)) == (5, 2)
    assert error.problem.startswith("byte 0xff is not UTF-8")


@pytest.mark.parametrize(
    "layout", [LINE * 30_000, f"[{LINE}" + f",{LINE}" * 30_000], ids=["lines", "list"]
)
def test_a_cut_off_gzip_file_keeps_what_could_be_unpacked(tmp_path, layout):
    content = gzip.compress(layout.encode())
    [trace] = read_traces(write(tmp_path / "t.jsonl.gz", content[: len(content) * 2 // 3]))

    assert len(trace.requests) > 10_000
    assert isinstance(trace.problems[-1], TraceDecodeError)
    assert "is no whole gzip file" in trace.problems[-1].problem


@pytest.mark.parametrize(
    ("content", "error", "problem"),
    [
        (b"", TraceFormatError, "is empty"),
        (b" \n\n", TraceFormatError, "is empty"),
        (b"[]", TraceFormatError, "holds no request"),
        (b"{}", TraceFormatError, "is no trace of a known format"),
        (b"[1, 2]", TraceFormatError, "is no trace of a known format"),
        (b"hello", TraceDecodeError, "line 1: is not JSON"),
        (b"\x00\xff\xfe", TraceDecodeError, "line 1: byte 0xff is not UTF-8"),
        (b"\x1f\x8b", TraceDecodeError, "is no whole gzip file"),
        (b"\x1f\x8b\x08\x00garbage garbage garbage", TraceDecodeError, "is no whole gzip file"),
        (b'{\n "requests": [\n  {"t": 1\n', TraceDecodeError, "line 4: is not JSON"),
        (
            b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03,4808,10",
            TraceFormatError,
            "table of request lengths without prefix information",
        ),
    ],
)
def test_a_file_without_any_usable_row_raises(tmp_path, content, error, problem):
    with pytest.raises(error, match=problem):
        read_traces(write(tmp_path / "t.jsonl", content))


def test_paths_that_cannot_be_opened_raise(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, problem in [
        ("missing", "does not exist"),
        ("link", "does not exist"),
        ("pipe", "is no regular file"),
        ("null\0", "cannot be read"),
    ]:
        with pytest.raises(TraceNotFound, match=problem):
            read_traces(tmp_path / name)


def test_an_overlong_row_is_refused_and_the_next_one_read(tmp_path):
    source = Source(write(tmp_path / "t.jsonl", '{"a": 1}\n{"b": "' + "x" * 50 + '"}\n{"c": 3}\n'))

    assert [row.data for row in rows(source, max_bytes=20)] == [{"a": 1}, {"c": 3}]
    assert [error.line for error in source.problems] == [2]
    assert "longer than the limit of 20 bytes" in source.problems[0].problem


def test_a_file_too_long_for_a_document_is_read_by_lines(tmp_path):
    source = Source(write(tmp_path / "t.jsonl", '{"a": \n{"b": 2}\n{"c": 3}\n'))

    assert [row.data for row in rows(source, max_bytes=20)] == [{"b": 2}, {"c": 3}]
    assert [error.line for error in source.problems] == [1]


def test_a_folder_gives_a_trace_for_each_file_its_own_before_those_of_inner_folders(tmp_path):
    write(tmp_path / "b.jsonl")
    write(tmp_path / "a" / "z.json.gz", gzip.compress(LINE.encode()))
    write(tmp_path / "a" / "notes.txt", "not a trace")
    traces = read_traces(tmp_path)

    assert [trace.name for trace in traces] == ["b", "z"]
    assert not any(trace.problems for trace in traces)


def test_a_bad_file_of_a_folder_is_a_problem_and_does_not_stop_the_others(tmp_path):
    write(tmp_path / "a.jsonl", "{broken")
    write(tmp_path / "b.jsonl")
    write(tmp_path / "c.jsonl", "{}")
    [trace] = read_traces(tmp_path)

    assert [error.path for error in trace.problems] == [
        str(tmp_path / "a.jsonl"),
        str(tmp_path / "c.jsonl"),
    ]


@pytest.mark.parametrize("name", [None, "readme.md", "inner/a.txt"])
def test_a_folder_without_traces_raises(tmp_path, name):
    if name is not None:
        write(tmp_path / name)
    with pytest.raises(TraceNotFound, match="holds no trace"):
        read_traces(tmp_path)


def test_a_folder_with_bad_traces_alone_raises_the_first_problem(tmp_path):
    write(tmp_path / "a.jsonl", "{}")
    write(tmp_path / "b.jsonl", "")
    with pytest.raises(TraceFormatError, match=r"a\.jsonl, line 1: is no trace"):
        read_traces(tmp_path)


def test_a_folder_that_links_to_itself_is_read_once(tmp_path):
    write(tmp_path / "a.jsonl")
    (tmp_path / "again").symlink_to(tmp_path)

    assert len(read_traces(tmp_path)) == 1


def test_traces_of_one_name_are_told_apart(tmp_path):
    first, second = write(tmp_path / "x" / "t.jsonl"), write(tmp_path / "y" / "t.jsonl.gz")

    assert [trace.name for trace in read_traces([first, str(second)])] == ["t", "t#2"]


@pytest.mark.parametrize("option", ["limit", "concurrency"])
def test_options_below_their_least_are_refused(tmp_path, option):
    with pytest.raises(ConfigError, match=f"{option} is 0; it has to be at least 1"):
        read_traces(write(tmp_path / "t.jsonl"), **{option: 0})
