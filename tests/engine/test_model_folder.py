"""Generated folders: where they lie, and what happens when several writers meet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentcache.engine._model_folder import MARKER_NAME, cache_home, ensure_folder
from agentcache.errors import ModelError


def write(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"a" * 4096)
    (folder / "b.bin").write_bytes(b"b")


def contents(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files.pop(MARKER_NAME)
    return files


WHOLE = {"a.bin": b"a" * 4096, "b.bin": b"b"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"AGENTCACHE_HOME": "/own", "XDG_CACHE_HOME": "/xdg"}, Path("/own")),
        ({"AGENTCACHE_HOME": "~/own"}, Path.home() / "own"),
        ({"AGENTCACHE_HOME": "", "XDG_CACHE_HOME": "/xdg"}, Path("/xdg/agentcache")),
        ({"XDG_CACHE_HOME": "not/absolute"}, Path.home() / ".cache" / "agentcache"),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache" / "agentcache"),
        ({}, Path.home() / ".cache" / "agentcache"),
    ],
)
def test_cache_home_follows_the_environment(environ: dict[str, str], expected: Path) -> None:
    assert cache_home(environ) == expected


def test_intact_folder_is_not_written_again(tmp_path: Path) -> None:
    folder = ensure_folder(tmp_path / "deep" / "model", write)
    assert contents(folder) == WHOLE
    ensure_folder(folder, lambda fresh: pytest.fail("written a second time"))


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "a.bin").write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ensure_folder(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_writer_that_comes_second_takes_the_first_ones_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def write_while_another_finishes(fresh: Path) -> None:
        ensure_folder(folder, write)
        (fresh / "a.bin").write_bytes(b"late")

    ensure_folder(folder, write_while_another_finishes)
    assert contents(folder) == WHOLE
    assert list(tmp_path.iterdir()) == [folder]


def test_repair_replaces_files_rather_than_writing_into_them(tmp_path: Path) -> None:
    """A process that has the old file mapped into its memory keeps it whole."""
    folder = ensure_folder(tmp_path / "model", write)
    (folder / "b.bin").unlink()
    with (folder / "a.bin").open("rb") as held:
        ensure_folder(folder, write)
        assert not os.path.samestat(os.fstat(held.fileno()), (folder / "a.bin").stat())
    assert contents(folder) == WHOLE


def test_folder_without_a_marker_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.bin").write_bytes(b"left by hand")
    assert contents(ensure_folder(tmp_path / "model", write)) == WHOLE


@pytest.mark.parametrize(
    "marker", ["", "[]", '{"sha256": 3}', '{"sha256": {}}', '{"sha256": {"a.bin": "0"}}']
)
def test_marker_that_makes_no_sense_means_damage(tmp_path: Path, marker: str) -> None:
    folder = ensure_folder(tmp_path / "model", write)
    (folder / MARKER_NAME).write_text(marker)
    (folder / "a.bin").write_bytes(b"other")
    assert contents(ensure_folder(folder, write)) == WHOLE


def test_file_in_the_folders_place_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("in the way")
    with pytest.raises(ModelError, match="cannot write the model folder"):
        ensure_folder(tmp_path / "model", write)
    assert (tmp_path / "model").read_text() == "in the way"


def test_processes_at_once_all_get_the_whole_folder(tmp_path: Path) -> None:
    """Each waits for the others before it writes, then checks what it was given."""
    script = """
import sys, time
from pathlib import Path
from agentcache.engine._model_folder import ensure_folder
home, me, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def write(folder):
    (home / f"ready-{me}").touch()
    while len(list(home.glob("ready-*"))) < count:
        time.sleep(0.001)
    (folder / "a.bin").write_bytes(b"a" * 4096)
    (folder / "b.bin").write_bytes(b"b")

folder = ensure_folder(home / "model", write)
assert (folder / "a.bin").read_bytes() == b"a" * 4096
assert (folder / "b.bin").read_bytes() == b"b"
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(me), "4"], env=environ)
        for me in range(4)
    ]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert contents(tmp_path / "model") == WHOLE
