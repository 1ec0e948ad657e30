"""`agentcache sessions`: what a runtime stored, in tables, in JSON, and as input of a replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from testkit.command import agentcache
from testkit.stores import sql, stored_runtime, user

from agentcache import CacheConfig, Runtime, Store
from agentcache.replay.trace import read_file, read_paths

SAMPLE = Path(__file__).parent.parent / "agentcache" / "data" / "sample"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with a session that missed, its fork, one of a tenant, and one of ids."""
    path = tmp_path_factory.mktemp("filled") / "runs.db"
    tools = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
    with stored_runtime(path) as runtime:
        with runtime.session("task-1") as session:
            session.chat([user("Read ünï 漢字 [red]it[/red].")], tools=tools, max_new_tokens=3)
            session.chat([user("Go on.")], max_new_tokens=3)
            fork = session.fork("task-1/fork")
            fork.chat([user("Other.")], max_new_tokens=3)
        runtime.session("named\x1b[31m", tenant="acme").chat([user("Hi.")], max_new_tokens=2)
        runtime.session("ids").generate([1, 2, 3], max_new_tokens=2)
    return path.read_bytes()


@pytest.fixture
def store(filled: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "runs.db"
    path.write_bytes(filled)
    return path


def run(store: Path, *arguments: str, status: int = 0) -> str:
    """What a command wrote to standard output."""
    done = agentcache("sessions", *arguments, f"--store={store}")
    assert done.status == status, done.stderr
    return done.stdout


def test_list_shows_sessions_with_their_turns_and_reuse(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run(store, "list")
    assert "task-1/fork" in shown
    assert "acme" in shown
    assert "\x1b" not in shown
    values = json.loads(run(store, "list", "--json=-"))
    assert [(each["id"], each["turns"]) for each in values] == [
        ("task-1", 2),
        ("task-1/fork", 1),
        ("named\x1b[31m", 1),
        ("ids", 1),
    ]
    assert values[1]["parent"] == "task-1"
    assert values[0]["closed"] is not None
    assert [each["tenant"] for each in json.loads(run(store, "list", "--tenant=acme", "--json=-"))]


def test_an_empty_store_says_so(tmp_path: Path) -> None:
    Store(tmp_path / "runs.db").close()
    assert "No sessions" in run(tmp_path / "runs.db", "list")


def test_show_tells_cached_against_computed_and_misses_in_words(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run(store, "show", "task-1")
    [session] = json.loads(run(store, "show", "task-1", "--json=-"))
    cells = [row.strip("│").split("│") for row in shown.splitlines() if row.startswith("│")]
    rows = {int(row[0]): [cell.strip() for cell in row] for row in cells}
    for turn in session["turns"]:
        usage = turn["usage"]
        counts = [usage[f"{name}_tokens"] for name in ("prompt", "cached", "computed", "output")]
        assert counts[1] + counts[2] == counts[0]
        assert rows[turn["number"]][4:8] == [f"{count:,}" for count in counts]
    assert "Nothing is known." in shown
    assert "All that is known ends at token" in shown


def test_the_store_may_stand_in_the_environment(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTCACHE_STORE", str(store))
    assert agentcache("sessions", "show", "ids").status == 0


def test_exported_sessions_are_read_as_recorded_runs(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "traffic.jsonl"
    done = agentcache("sessions", "export", "--all", f"--out={out}", f"--store={store}")
    assert done.status == 1  # one call had to be left out
    assert "1 calls were made of token ids" in done.stderr
    runs = {each.id: each for each in read_file(out)}
    assert [*runs] == ["task-1", "task-1/fork", "named\x1b[31m"]
    first, second = runs["task-1"].calls
    assert first.messages[0]["content"] == "Read ünï 漢字 [red]it[/red]."
    assert first.tools is not None
    assert second.messages[:2] == (*first.messages, first.answer)
    assert runs["task-1/fork"].parent == "task-1"
    assert first.at is not None
    assert second.at is not None
    assert first.at < second.at


def test_one_session_is_exported_to_standard_output(store: Path) -> None:
    rows = [json.loads(line) for line in run(store, "export", "task-1").splitlines()]
    assert [row["trajectory"] for row in rows] == ["task-1", "task-1"]
    assert len(rows[0]["answer_ids"]) == rows[0]["usage"]["output_tokens"] == 3


def test_an_id_opened_again_is_exported_as_another_run(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    with stored_runtime(store) as runtime:
        for text in ("First.", "Second."):
            with runtime.session("again") as session:
                session.chat([user(text)], max_new_tokens=1)
    rows = [json.loads(line) for line in run(store, "export", "again").splitlines()]
    assert [row["trajectory"] for row in rows] == ["again", "again#2"]


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Recorded runs played through a runtime that stores, and the usage of their calls."""
    store = tmp_path_factory.mktemp("traffic") / "runs.db"
    usages = []
    cache = CacheConfig(budget="256MiB")
    with Runtime.load("tiny-hybrid", cache=cache, store=store) as runtime:
        for recorded in read_paths([SAMPLE]).trajectories[:2]:
            with runtime.session(recorded.id) as session:
                known = 0
                for call in recorded.calls[:4]:
                    turn = session.chat(call.messages[known:], tools=call.tools, replay=call.answer)
                    known = len(call.messages) + 1
                    usages.append(turn.usage)
    return store, usages


def test_a_replay_of_what_was_exported_reuses_what_the_traffic_did(
    traffic: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    store, usages = traffic
    out, result = tmp_path / "traffic.jsonl", tmp_path / "result.json"
    run(store, "export", "--all", f"--out={out}")
    done = agentcache("replay", str(out), "--budget=256MiB", f"--json={result}")
    assert done.status == 0, done.stderr
    replayed = json.loads(result.read_text())
    assert [call["prompt_tokens"] for call in replayed["calls"]] == [
        usage.prompt_tokens for usage in usages
    ]
    assert [call["cached_tokens"] for call in replayed["calls"]] == [
        usage.cached_tokens for usage in usages
    ]
    cached = sum(usage.cached_tokens for usage in usages)
    total = sum(usage.prompt_tokens for usage in usages)
    assert replayed["totals"]["hit_rate"] == pytest.approx(cached / total)
    assert cached > 0


def test_prune_deletes_what_is_closed_or_old(store: Path) -> None:
    assert json.loads(run(store, "prune", "--closed", "--older-than=1d", "--json=-")) == {
        "pruned": 0
    }
    assert "1 sessions deleted" in run(store, "prune", "--closed")
    assert [*json.loads(run(store, "show", "task-1/fork", "--json=-"))]
    sql(store, "UPDATE turns SET created = created - 90000")
    assert "3 sessions deleted" in run(store, "prune", "--older-than=1d")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prune",), "--older-than 30d, --closed, or both"),
        (("prune", "--older-than=soon"), "'soon' is no duration"),
        (("export",), "name a session, or give --all"),
        (("export", "task-1", "--all"), "one of the two"),
        (("export", "task-1", "--out=/no/such/folder/x"), "cannot write"),
        (("show", "nobody"), "no session 'nobody'"),
        (("show", "task-1", "--tenant=acme"), "no session 'task-1'"),
    ],
)
def test_wrong_usage_is_one_line_and_changes_nothing(
    store: Path, filled: bytes, arguments: tuple[str, ...], message: str
) -> None:
    done = agentcache("sessions", *arguments, f"--store={store}")
    assert done.status == 2
    assert message in done.stderr
    assert len(json.loads(run(store, "list", "--json=-"))) == 4


@pytest.mark.parametrize(
    ("url", "status", "message"),
    [
        ("none.db", 1, "there is no database"),
        ("mysql://host/x", 2, "cannot be kept in 'mysql'"),
        ("sqlite://", 2, "in memory"),
    ],
)
def test_a_store_that_cannot_be_read_is_one_line(url: str, status: int, message: str) -> None:
    done = agentcache("sessions", "list", f"--store={url}")
    assert (done.status, done.stdout) == (status, "")
    assert message in done.stderr


def test_a_damaged_store_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs.db").write_text("no database " * 100)
    done = agentcache("sessions", "list", f"--store={tmp_path / 'runs.db'}")
    assert done.status == 1
    assert "damaged or no database" in done.stderr


def test_a_server_refuses_a_store_it_cannot_keep() -> None:
    pytest.importorskip("aiohttp")
    done = agentcache("serve", "--port=0", "--store=mysql://host/x")
    assert done.status == 2
    assert "cannot be kept in 'mysql'" in done.stderr
