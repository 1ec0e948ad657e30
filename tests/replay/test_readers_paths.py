"""Files and folders: what is read, in which order, and how it is counted."""

import json
import os
from pathlib import Path

import pytest

from agentcache.errors import TraceFormatError, TraceNotFound
from agentcache.replay.trace import read_file, read_paths

FIXTURES = Path(__file__).parents[1] / "fixtures"
CALL = {
    "messages": [{"role": "user", "content": "u"}],
    "answer": {"role": "assistant", "content": "a"},
}


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def ids(result):
    return [run.id for run in result.trajectories]


def test_folder_of_odd_files_is_counted_to_the_end():
    result = read_paths(FIXTURES / "odd")

    assert (result.loaded, result.partial, result.skipped) == (7, 0, 1)
    assert [Path(path).name for path, _ in result.rejected] == [
        "latin1_byte.traj.json",
        "truncated.traj.json",
    ]
    assert [Path(path).name for path in result.unknown] == ["expected.json"]
    assert any("empty_messages.traj.json" in warning for warning in result.warnings)


def test_run_without_calls_is_read_from_its_file_but_not_from_a_batch():
    path = FIXTURES / "odd" / "empty_messages.traj.json"

    [run] = read_file(path)
    assert run.calls == ()
    assert read_paths(path).trajectories == ()


def test_files_below_folders_are_sorted_and_unknown_ones_named(tmp_path):
    for name in ("b.json", "a.JSONL", "sub/c.traj", "sub/deep/d.traj.json"):
        write(tmp_path / name, CALL)
    (tmp_path / "notes.md").write_text("n", encoding="utf-8")
    (tmp_path / "sub" / "picture.png").write_bytes(b"\x89")
    write(tmp_path / "package.json", {"name": "no run"})

    result = read_paths([tmp_path])

    assert ids(result) == ["a.JSONL", "b", "c", "d"]
    assert result.loaded == 4
    assert sorted(Path(path).name for path in result.unknown) == [
        "notes.md",
        "package.json",
        "picture.png",
    ]
    for name in ("notes.md", "package.json", "picture.png"):
        assert any(name in warning for warning in result.warnings)
    assert result.rejected == ()


def test_named_file_that_is_no_run_is_rejected(tmp_path):
    path = write(tmp_path / "package.json", {"name": "no run"})

    result = read_paths(path)

    [(rejected, error)] = result.rejected
    assert rejected == str(path)
    assert isinstance(error, TraceFormatError)
    assert result.unknown == ()


def test_named_file_is_read_whatever_its_suffix(tmp_path):
    assert ids(read_paths(write(tmp_path / "run.txt", CALL))) == ["run.txt"]


def test_files_are_read_in_the_order_given(tmp_path):
    second, first = write(tmp_path / "a.json", CALL), write(tmp_path / "b.json", CALL)

    assert ids(read_paths([first, second])) == ["b", "a"]


def test_file_given_twice_is_read_once_with_a_warning(tmp_path):
    path = write(tmp_path / "a.json", CALL)
    (tmp_path / "link.json").symlink_to(path)

    result = read_paths([path, tmp_path, str(path)])

    assert (result.loaded, len(result.trajectories)) == (1, 1)
    assert sum("given twice" in warning for warning in result.warnings) == 3


def test_equal_ids_of_different_files_are_told_apart_the_same_way_each_time(tmp_path):
    for folder in ("x", "y", "z"):
        write(tmp_path / folder / "run.json", CALL)

    assert ids(read_paths(tmp_path)) == ["run", "run#2", "run#3"]
    assert ids(read_paths(tmp_path)) == ["run", "run#2", "run#3"]


def test_parent_follows_its_trajectory_to_a_new_id(tmp_path):
    row = json.dumps({**CALL, "trajectory": "main"}) + "\n"
    row += json.dumps({**CALL, "trajectory": "side", "parent": "main"})
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(row, encoding="utf-8")

    result = read_paths(tmp_path)

    assert [(run.id, run.parent) for run in result.trajectories] == [
        ("main", None),
        ("side", "main"),
        ("main#2", None),
        ("side#2", "main#2"),
    ]


def test_folder_that_links_back_into_itself_is_a_typed_error(tmp_path):
    write(tmp_path / "runs" / "a.json", CALL)
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs", target_is_directory=True)

    result = read_paths(tmp_path)

    assert ids(result) == ["a"]
    [(path, error)] = result.rejected
    assert path == str(tmp_path / "runs" / "again")
    assert isinstance(error, TraceNotFound)
    assert "leads back" in str(error)


def test_link_to_itself_is_a_typed_error(tmp_path):
    (tmp_path / "a.json").symlink_to(tmp_path / "a.json")

    [(_, error)] = read_paths(tmp_path / "a.json").rejected
    assert isinstance(error, TraceNotFound)
    [(_, error)] = read_paths(tmp_path).rejected
    assert isinstance(error, TraceNotFound)


@pytest.fixture
def deep_folder(tmp_path):
    """A folder of 1,200 levels. Nobody else can take it away: shutil and pytest recurse."""
    here = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(1200):
            os.mkdir("d", dir_fd=here)
            deeper = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = deeper
    finally:
        os.close(here)
    yield tmp_path
    top, inner = tmp_path / "d", tmp_path / "inner"
    while (top / "d").exists():
        (top / "d").rename(inner)
        top.rmdir()
        inner.rename(top)
    top.rmdir()


def test_folder_deeper_than_python_calls_go_is_walked(deep_folder):
    write(deep_folder / "a.json", CALL)

    result = read_paths(deep_folder)

    assert ids(result) == ["a"]


def test_bad_file_does_not_stop_the_others(tmp_path):
    write(tmp_path / "a.json", CALL)
    (tmp_path / "b.json").write_text("{", encoding="utf-8")
    write(tmp_path / "c.json", CALL)

    result = read_paths([tmp_path, tmp_path / "gone.json"])

    assert ids(result) == ["a", "c"]
    assert [Path(path).name for path, _ in result.rejected] == ["b.json", "gone.json"]


def test_file_of_bad_records_only_is_rejected_once(tmp_path):
    path = write(tmp_path / "a.jsonl", {**CALL, "at": "x"}, {**CALL, "at": "y"})

    result = read_paths(path)

    assert [error.line for _, error in result.rejected] == [1]
    assert (result.loaded, result.partial, result.skipped) == (0, 0, 0)
    assert len(result.warnings) == 1


def test_empty_file_of_lines_is_skipped_and_empty_document_rejected(tmp_path):
    lines, document = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.touch()
    document.touch()

    result = read_paths(tmp_path)

    assert (result.skipped, [path for path, _ in result.rejected]) == (1, [str(document)])


def test_file_whose_name_is_not_text_can_be_reported(tmp_path):
    raw = os.fsencode(tmp_path) + b"/\xff.json"
    try:
        Path(os.fsdecode(raw)).write_text(json.dumps(CALL), encoding="utf-8")
    except OSError:
        pytest.skip("this file system takes only names that are text")

    [run] = read_paths(tmp_path).trajectories

    assert run.id == "\ufffd"
    run.path.encode()
