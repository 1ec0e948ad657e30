"""`agentcache explain`: a replay's misses in words, and one readable line for what is no replay."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from testkit.command import agentcache

from agentcache.session.turn import MissReport

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of two runs of the bundled sample, three calls each."""
    out = tmp_path_factory.mktemp("replay") / "result.json"
    done = agentcache("replay", "--limit=2", "--max-turns=3", f"--json={out}")
    assert done.status == 0, done.stderr
    return out


MISS = MissReport(7, (2, "tool"), "diverged", "state", 7, 4, "12:01", "12:02")


def record(trajectory: str, call: int, miss: MissReport | None) -> dict[str, Any]:
    """What `explain` reads of a call."""
    return {
        "trajectory": trajectory,
        "call": call,
        "prompt_tokens": 2000,
        "cached_tokens": 1500,
        "miss": None if miss is None else miss.to_json(),
    }


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A result by hand: of two runs, one call each that missed."""
    path = tmp_path / "result.json"
    calls = [
        record("django-1", 0, None),
        record("django-1", 1, MISS),
        record("[red]flask", 0, MissReport(9, None, "new", None, 9, 9, "", "")),
    ]
    path.write_text(json.dumps({"calls": calls}))
    return path


def test_replay_of_the_sample_is_explained_call_by_call(sample: Path) -> None:
    done = agentcache("explain", str(sample))
    assert done.status == 0, done.stderr
    calls = json.loads(sample.read_text())["calls"]
    missed = [call for call in calls if call["miss"] is not None]
    assert len(missed) >= 2
    at = -1
    for call in missed:
        heading = f"{call['trajectory']}, call {call['call']}: {call['cached_tokens']:,} of "
        assert heading in done.stdout
        at = done.stdout.index(heading, at + 1)
        words = str(MissReport.from_json(call["miss"]))
        assert words in done.stdout[at:]
    assert done.stdout.count("prompt tokens reused (") == len(missed)
    assert "Nothing is known." in done.stdout


def test_one_run_and_one_call_can_be_chosen(sample: Path) -> None:
    calls = json.loads(sample.read_text())["calls"]
    first, second = dict.fromkeys(call["trajectory"] for call in calls)
    done = agentcache("explain", str(sample), "--trajectory", second, "--call=0")
    assert done.status == 0
    assert f"{second}, call 0: " in done.stdout
    assert first not in done.stdout
    assert done.stdout.count("reused (") == 1


def test_part_of_a_runs_name_is_enough(result: Path) -> None:
    done = agentcache("explain", str(result), "--trajectory=jang")
    assert done.status == 0
    assert done.stdout == (
        "django-1, call 1: 1,500 of 2,000 prompt tokens reused (75.0%)\n"
        "The prompt leaves the session's history at token 7, in message 2 (tool): "
        '"12:01" was\n'
        'there, "12:02" is now. The recurrent state is known up to token 4, the KV up to token 7.\n'
    )


def test_names_are_printed_as_they_are(result: Path) -> None:
    done = agentcache("explain", str(result), "--trajectory=flask")
    assert done.stdout.startswith("[red]flask, call 0: ")


def test_call_that_reused_everything_needs_no_words(result: Path) -> None:
    done = agentcache("explain", str(result), "--trajectory=django", "--call=0")
    assert done.status == 0
    assert done.stdout == "Every call reused all of its prompt but the last few tokens.\n"


def test_json_on_standard_output_is_alone_there(sample: Path) -> None:
    done = agentcache("explain", str(sample), "--json", "-")
    assert done.status == 0
    calls = json.loads(sample.read_text())["calls"]
    assert json.loads(done.stdout) == [call for call in calls if call["miss"] is not None]
    assert "Nothing is known." in done.stderr


def test_json_is_of_the_chosen_calls_and_may_go_to_a_file(result: Path, tmp_path: Path) -> None:
    out = tmp_path / "missed.json"
    done = agentcache("explain", str(result), "--call=1", f"--json={out}")
    assert done.status == 0
    assert [call["trajectory"] for call in json.loads(out.read_text())] == ["django-1"]
    assert "12:01" in done.stdout
    empty = agentcache("explain", str(result), "--trajectory=django", "--call=0", "--json=-")
    assert (empty.status, json.loads(empty.stdout)) == (0, [])


def refused(*arguments: str) -> str:
    """What a wrong command says: one line, and status 2."""
    done = agentcache("explain", *arguments)
    assert done.status == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_file_that_is_missing_is_named(tmp_path: Path) -> None:
    line = refused(str(tmp_path / "none.json"))
    assert "cannot read" in line
    assert "none.json" in line
    assert "No such file" in line
    assert "Is a directory" in refused(str(tmp_path))


def test_place_that_cannot_be_written_is_named(result: Path, tmp_path: Path) -> None:
    assert "cannot write" in refused(str(result), f"--json={tmp_path / 'no' / 'out.json'}")


OTHER = record("django-1", 0, MISS)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe\x00",
        b'"\\ud800',
        b"[" * 100_000,
        b"9" * 5000,
        b'{"calls": [{"miss": 7}]}',
        b"null",
        b"3",
        b'"calls"',
        b"[]",
        b"{}",
        b'{"calls": null}',
        b'{"calls": 7}',
        b'{"calls": {}}',
        b'{"calls": {"a": 1}}',
        b'{"calls": "abc"}',
        b'{"calls": [null]}',
        b'{"calls": [[]]}',
        b'{"calls": ["a"]}',
        b'{"calls": [{}]}',
        *(
            json.dumps({"calls": [change]}).encode()
            for change in (
                {**OTHER, "miss": "a"},
                {**OTHER, "miss": []},
                {**OTHER, "miss": {}},
                {**OTHER, "miss": {**MISS.to_json(), "reason": "magic"}},
                {**OTHER, "miss": {**MISS.to_json(), "at_token": "7"}},
                {**OTHER, "miss": {**MISS.to_json(), "message": 3}},
                {**OTHER, "miss": {**MISS.to_json(), "message": [3]}},
                {**OTHER, "miss": {**MISS.to_json(), "more": 3}},
                {**OTHER, "cached_tokens": "many"},
                {**OTHER, "prompt_tokens": None},
                {name: value for name, value in OTHER.items() if name != "cached_tokens"},
                {name: value for name, value in OTHER.items() if name != "trajectory"},
                {name: value for name, value in OTHER.items() if name != "call"},
            )
        ),
    ],
)
@pytest.mark.parametrize("chosen", [[], ["--trajectory=jang"], ["--call=0"]])
def test_file_that_is_no_replay_is_named(tmp_path: Path, content: bytes, chosen: list[str]) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    line = refused(str(path), *chosen)
    assert "some.json is not what `agentcache replay --json` writes: " in line or (
        "no such call in" in line
    )


def test_report_of_another_kind_is_no_replay(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"benchmarks": [{"name": "turns", "calls": 7}], "calls": 3}))
    assert "is not what `agentcache replay --json` writes" in refused(str(path))


@pytest.mark.parametrize("chosen", [["--trajectory=none"], ["--call=9"], ["--call=-1"]])
def test_call_that_is_not_there_says_which_runs_are(result: Path, chosen: list[str]) -> None:
    line = refused(str(result), *chosen)
    assert "no such call in" in line
    assert line.endswith("its runs are: django-1, [red]flask")


def test_replay_without_calls_says_so(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text('{"calls": []}')
    assert "its runs are: none" in refused(str(path))


def test_wrong_usage_is_status_two() -> None:
    assert agentcache("explain").status == 2
    assert agentcache("explain", "some.json", "--call=first").status == 2
    assert agentcache("explain", "some.json", "--no-such-flag").status == 2
