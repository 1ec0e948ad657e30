"""The command line as a user meets it: tables, JSON, a page, exit status, and no stack trace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from testkit.command import agentcache

ODD = Path(__file__).parent / "fixtures" / "odd"


def test_it_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "agentcache", "replay", "--limit=1", "--max-turns=1"],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "hit rate" in done.stdout
    assert "Traceback" not in done.stderr


def test_replay_of_the_bundled_sample_reports_hits_and_equal_answers(tmp_path: Path) -> None:
    out, page = tmp_path / "replay.json", tmp_path / "replay.html"
    done = agentcache(
        "replay",
        "--limit=2",
        "--max-turns=4",
        "--verify=2",
        "--cold=2",
        "--concurrency=2",
        f"--json={out}",
        f"--report={page}",
    )
    assert done.status == 0, done.stderr
    assert "hit rate" in done.stdout
    assert "ok: 0 differing ids" in done.stdout
    result = json.loads(out.read_text())
    assert result["totals"]["calls"] == 8
    assert result["totals"]["hit_rate"] >= 0.99 * result["totals"]["ideal_hit_rate"] > 0
    assert (
        result["totals"]["cached_tokens"] + result["totals"]["computed_tokens"]
        == (result["totals"]["prompt_tokens"])
    )
    assert result["verify"]["calls"] == 2
    assert result["verify"]["different_ids"] == 0
    assert result["verify"]["max_logit_error"] <= 1e-4
    assert result["verify"]["max_state_error"] <= 1e-4
    assert result["totals"]["cold_ttft_p50_s"] > 0
    order = [(call["trajectory"], call["call"]) for call in result["calls"]]
    assert order != sorted(order), "two runs are interleaved"
    assert "<html" in page.read_text()


def test_stepwise_replay_gives_the_same_hits(tmp_path: Path) -> None:
    results = []
    for flags in ([], ["--stepwise"]):
        out = tmp_path / f"{len(flags)}.json"
        done = agentcache(
            "replay", "--limit=1", "--max-turns=2", "--verify=1", f"--json={out}", *flags
        )
        assert done.status == 0, done.stderr
        results.append(json.loads(out.read_text()))
    whole, steps = results
    # Stepwise leaves the last id of each answer to the next prompt, as sampling does.
    assert steps["totals"]["computed_tokens"] - whole["totals"]["computed_tokens"] == 1
    assert steps["verify"]["different_ids"] == 0


def test_json_on_standard_output_is_alone_there() -> None:
    done = agentcache("replay", "--limit=1", "--max-turns=1", "--json=-")
    assert done.status == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["calls"] == 1


def test_batch_goes_on_past_bad_files_and_counts_them(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    files = [
        ODD / name
        for name in (
            "truncated.traj.json",
            "empty_messages.traj.json",
            "latin1_byte.traj.json",
            "interleaved_subagent.jsonl",
        )
    ]
    done = agentcache("replay", *map(str, files), str(tmp_path / "missing.json"), f"--json={out}")
    assert done.status == 1
    counts = json.loads(out.read_text())["files"]
    assert (counts["loaded"], counts["skipped"], counts["rejected"]) == (1, 1, 3)
    for name in ("truncated.traj.json", "latin1_byte.traj.json", "missing.json"):
        assert name in done.stdout
    assert "offset" in done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "bom_crlf.traj.json",
        "consecutive_assistant.traj.json",
        "tool_call_without_result.json",
        "cache_control_moving.calls.jsonl",
        "last_3_observations.calls.jsonl",
        "special_tokens_in_text.traj.json",
        "interleaved_subagent.jsonl",
    ],
)
def test_unusual_runs_replay_with_equal_answers(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = agentcache("replay", str(ODD / name), "--max-turns=6", "--verify=2", f"--json={out}")
    assert done.status == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    expected = json.loads((ODD / "expected.json").read_text())[name]
    if "calls" in expected:
        assert result["totals"]["calls"] == min(6, expected["calls"])
    assert result["verify"]["calls"] == 2
    assert result["verify"]["different_ids"] == 0
    left = [
        call["call"] for call in result["calls"] if (call["miss"] or {}).get("reason") == "diverged"
    ]
    if "non_append_calls" in expected:
        assert left == [number for number in expected["non_append_calls"] if number < 6]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--budget=lots"], 2, '"512MiB"'),
        (["--budget=0"], 2, "positive"),
        (["--budget=-5%"], 2, "share"),
        (["--budget=1KiB"], 2, "smallest workable budget"),
        (
            ["--policy=magic"],
            2,
            "known policies: auto, gdsf, lfu, lru, marconi, priority, session-lru, slru",
        ),
        (["--model=no/such-model"], 2, "tiny-hybrid"),
        (["--concurrency=0"], 2, "at least 1"),
        (["--limit=0"], 2, "at least 1"),
        (["--max-turns=0"], 2, "at least 1"),
        (["--verify=-1"], 2, "at least 0"),
        (["--no-such-flag"], 2, "no-such-flag"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[str], status: int, said: str) -> None:
    done = agentcache("replay", *arguments)
    assert done.status == status, done.stdout + done.stderr
    assert said in (done.stdout + done.stderr).replace("\n", " ")


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["/no/such/path"], "error: nothing to replay: /no/such/path: does not exist"),
        (["empty"], "error: nothing to replay: there is no recorded run in "),
        (["none.jsonl"], "holds no model call"),
        (["none.jsonl", "other"], "nothing to replay for 2 reasons, the first: "),
        (["text.json"], "is not JSON"),
    ],
)
def test_where_nothing_can_be_replayed_one_line_says_why_and_nothing_is_written(
    paths: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "none.jsonl").write_text("")
    (tmp_path / "text.json").write_text("no JSON")
    given, page = [str(tmp_path / path) for path in paths], tmp_path / "page.html"
    for to_json in ([], ["--json=-"]):
        done = agentcache("replay", *given, f"--report={page}", *to_json)
        assert (done.status, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert said in done.stderr
    assert not page.exists()


def test_calls_that_do_not_fit_the_budget_are_named_and_the_others_go_on(tmp_path: Path) -> None:
    small = tmp_path / "runs.calls.jsonl"
    rows = [
        {
            "trajectory": "long",
            "messages": [{"role": "user", "content": "word " * 6000}],
            "response": {"role": "assistant", "content": "ok"},
        },
        {
            "trajectory": "short",
            "messages": [{"role": "user", "content": "hello"}],
            "response": {"role": "assistant", "content": "ok"},
        },
    ]
    small.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.json"
    done = agentcache("replay", str(small), "--budget=4MiB", f"--json={out}")
    assert done.status == 1
    result = json.loads(out.read_text())
    assert [call["trajectory"] for call in result["calls"]] == ["short"]
    assert "raise the budget" in done.stdout.replace("\n", " ")
