"""`agentcache simulate`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re

import pytest
from testkit.command import agentcache

from agentcache.simulate.generate import MAKERS, agents, trace_a, trace_b, write_trace
from agentcache.simulate.read import read_traces
from agentcache.simulate.results import Setup
from agentcache.simulate.runs import Budget, Grid, parse_budget


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "agents.jsonl"
    write_trace(agents(seed=1, num_sessions=4, num_turns=4), path)
    return str(path)


def rows(*arguments: str) -> list[dict]:
    done = agentcache("simulate", *arguments, "--json", "-")
    assert done.status == 0, done.stderr
    return json.loads(done.stdout)


def test_json_has_a_row_per_trace_policy_admission_and_budget(path):
    found = rows(
        *(path, path, "--policy=lru,auto", "--admission=structural,marconi"),
        *("--budget=10%,0.2,1GB",),
    )

    assert len(found) == 2 * 2 * 2 * 3
    assert {row["trace"] for row in found} == {"agents", "agents#2"}
    assert {row["budget_share"] for row in found} == {0.1, 0.2, None}
    assert {row["budget_bytes"] for row in found if row["budget_share"] is None} == {10**9}
    assert all(0 <= row["hit_rate"] < 1 for row in found)
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in found)


def test_bounds_are_policies_and_come_once_for_all_admissions(path):
    found = rows(
        *(path, "--policy=lru,clairvoyant-evict,clairvoyant,bound,unlimited"),
        *("--admission=structural,marconi", "--budget=10%"),
    )

    names = [row["policy"] for row in found]
    assert sorted(names) == sorted(
        2 * ["lru", "clairvoyant-evict", "unlimited"] + ["clairvoyant", "bound"]
    )
    rate = {row["policy"]: row["hit_rate"] for row in found}
    assert rate["lru"] <= rate["clairvoyant"] <= rate["bound"] <= 1
    assert next(r for r in found if r["policy"] == "unlimited")["budget_bytes"] is None


def test_the_table_fits_a_narrow_terminal_and_names_what_was_left_out(path, tmp_path):
    bad = tmp_path / "bad.jsonl"
    with open(path) as good:
        bad.write_text(good.read() + '{"session_id": 1, "ts": -5}\n')

    done = agentcache("simulate", str(bad), "--policy=lru,bound", "--budget=10%")

    assert done.status == 1  # something was left out
    assert re.search(r"left out:.*bad\.jsonl, line \d+", done.stdout)
    assert re.search(r"10 %\s+lru\s+[\d.]+ %", done.stdout)
    assert re.search(r"bound\s+≤ [\d.]+ %", done.stdout)
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "lru" in line)


def test_without_hints_and_with_smaller_limits(path):
    hinted, unhinted = (
        rows(path, "--policy=session-lru", "--budget=20%", flag)[0]
        for flag in ("--hints", "--no-hints")
    )

    assert hinted["hints"]
    assert not unhinted["hints"]
    assert hinted["cached_tokens"] != unhinted["cached_tokens"]
    assert rows(path, "--limit=3", "--policy=lru", "--budget=none")[0]["requests"] == 3


def test_other_shapes_give_other_needs(path):
    def budget(*more: str) -> int:
        return rows(path, "--policy=lru", "--budget=10%", *more)[0]["budget_bytes"]

    assert budget("--shape=n16") < budget("--shape=n128") == budget()
    assert budget("--shape=tiny-hybrid") < budget("--shape=n16")


def test_recorded_runs_are_a_trace_too():
    from agentcache.cli import SAMPLE

    [row] = rows(str(SAMPLE), "--policy=auto", "--budget=50%", "--limit=6")

    assert row["requests"] == 6
    assert row["prompt_tokens"] > 1000


def test_the_report_is_one_page_with_bounds_and_ablations(path, tmp_path):
    page = tmp_path / "report.html"

    found = rows(path, path, "--policy=lru,auto", "--budget=10%,20%", "--report", str(page))

    text = page.read_text()
    assert len(found) == 8  # only what was asked for
    for shown in ("clairvoyant", "bound", "Hit rate against budget", "Admission", "Hints"):
        assert shown in text
    assert text.count("<svg") == 6
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--policy=best"], "unknown policy 'best'"),
        (["--policy=,"], "policy is empty"),
        (["--admission=all"], "unknown admission"),
        (["--budget=-3%"], "is no share"),
        (["--budget=much"], "is no size in bytes"),
        (["--budget=0"], "is nothing"),
        (["--shape=small"], "unknown shape 'small'"),
        (["--limit=0"], "limit is 0"),
        (["--page-size=0"], "page_size is 0"),
        (["--json=/nowhere/x.json", "--policy=lru", "--limit=1"], "cannot write"),
        (["--report=/nowhere/x.html", "--policy=lru", "--limit=1"], "cannot write the report"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_two(path, arguments, problem):
    done = agentcache("simulate", path, *arguments)

    assert done.status == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_path_without_a_trace_is_status_two(tmp_path):
    done = agentcache("simulate", str(tmp_path / "none.jsonl"))

    assert (done.status, done.stderr.count("\n")) == (2, 1)


def test_budgets_are_bytes_or_shares():
    assert parse_budget("5%") == parse_budget(" .05") == Budget(share=0.05)
    assert parse_budget("2GB") == Budget(2 * 10**9)
    assert parse_budget("none") == Budget()
    assert Budget(share=0.1).of(1000) == Budget(100, 0.1)


def test_a_grid_has_each_run_once():
    grid = Grid(["lru", "clairvoyant"], ["structural", "marconi"], [Budget(5), Budget(7)], Setup())

    setups = list(grid.setups(100))

    assert len(setups) == len(set(setups)) == 2 * 2 + 2


def test_generated_traces_are_equal_by_seed_and_read_back_as_written(tmp_path):
    for name, make in MAKERS.items():
        small = {"scale": 0.05} if name != "agents" else {}
        made, again, other = (make(seed, **small) for seed in (1, 1, 2))
        path = tmp_path / f"{name}.jsonl"
        write_trace(made, path)
        [read] = read_traces(path)
        assert [each.ids.tolist() for each in made.requests] == [
            each.ids.tolist() for each in again.requests
        ]
        assert made.prompt_tokens != other.prompt_tokens
        assert [
            (each.ids.tolist(), each.prompt_len, each.at, each.closes, each.marks)
            for each in read.requests
        ] == [
            (each.ids.tolist(), each.prompt_len, each.at, each.closes, each.marks)
            for each in made.requests
        ]


def test_the_long_prefixes_of_trace_a_come_back_and_those_of_trace_b_hardly():
    def uses(trace) -> list[int]:
        heads: dict[bytes, int] = {}
        for request in trace.requests:
            head = request.ids[: request.marks[0]]
            if len(head) >= 4000:
                heads[head.tobytes()] = heads.get(head.tobytes(), 0) + 1
        return list(heads.values())

    assert len(uses(trace_a())) == 15
    assert set(uses(trace_a())) <= {18, 19, 20, 21, 22}
    assert len(uses(trace_b())) == 150
    assert set(uses(trace_b())) <= {1, 2}
