"""`/v1/sessions`: what is open, where it stands, and why a turn missed."""

from __future__ import annotations

from itertools import pairwise
from urllib.parse import quote

import pytest
from testkit.waiting import until

MODEL = "tiny-hybrid"


def path(id: str, action: str = "") -> str:
    return f"/v1/sessions/{quote(id, safe='')}" + (f"/{action}" if action else "")


def converse(served_here, id: str, *texts: str) -> list[dict]:
    """A conversation of one turn per text; its messages."""
    messages: list[dict] = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, "session_id": id}
        answer = served_here.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
    return messages


@pytest.mark.parametrize(
    "id", ["thread 1|node:2", "réunion №3", "a/b", "50% off?", "#1&x=y", "a..b", "x" * 256]
)
def test_ids_are_plain_names_whatever_they_hold(served_here, id):
    converse(served_here, id, "Hello")

    shown = served_here.get(path(id)).json()
    assert shown["id"] == id
    assert (shown["turns"], len(shown["tips"])) == (1, 1)
    assert served_here.post(path(id, "close")).json() == {
        "id": id,
        "object": "session",
        "closed": True,
    }
    assert served_here.get(path(id)).status_code == 404


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"session_id": "S", "prompt_cache_key": "other"}, {"x-session-id": "other"}),
        ({"prompt_cache_key": "S"}, {"x-session-id": "other"}),
        ({}, {"x-session-id": "S"}),
    ],
    ids=["session_id", "prompt_cache_key", "header"],
)
def test_the_first_of_three_names_counts(served_here, fields, headers):
    served_here.chat(**fields, headers=headers)

    listed = served_here.get("/v1/sessions", params={"limit": 1}).json()
    assert [session["id"] for session in listed["data"]] == ["S"]
    served_here.post(path("S", "close"))


def test_a_session_hits_its_own_replies_and_counts_them(served_here):
    converse(served_here, "counted", "First", "Second", "Third")

    shown = served_here.get(path("counted")).json()
    assert shown["calls"] == shown["turns"] == 3
    turns = shown["turns_kept"]
    for before, after in pairwise(turns):
        reply_end = before["prompt_tokens"] + before["output_tokens"]
        assert after["cached_tokens"] >= reply_end - 1
        assert after["prompt_tokens"] == after["cached_tokens"] + after["computed_tokens"]


def test_a_fork_goes_its_own_way(served_here):
    messages = converse(served_here, "trunk", "First", "Second")
    forked = served_here.post(path("trunk", "fork"), {"id": "branch"}).json()
    converse(served_here, "trunk", "Third")

    assert (forked["id"], forked["parent"], forked["turns"]) == ("branch", "trunk", 2)
    messages.append({"role": "user", "content": "Elsewhere"})
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "session_id": "branch"}
    served_here.post("/v1/chat/completions", body)
    assert served_here.get(path("branch")).json()["turns"] == 3


def test_a_fork_that_is_given_no_id_gets_one(served_here):
    converse(served_here, "nameless", "First")
    forked = served_here.post(path("nameless", "fork"), {}).json()

    assert forked["id"] != "nameless"
    assert served_here.get(path(forked["id"])).json()["parent"] == "nameless"


def test_a_fork_to_an_open_id_is_a_conflict(served_here):
    converse(served_here, "one", "First")
    refused = served_here.post(path("one", "fork"), {"id": "one"})

    assert refused.status_code == 409
    assert "already open" in refused.json()["error"]["message"]


def test_rewinding_stands_at_the_end_of_an_earlier_turn(served_here):
    converse(served_here, "back", "First", "Second")
    rewound = served_here.post(path("back", "rewind"), {"to_turn": 1})

    assert rewound.json()["turns"] == 1
    assert served_here.post(path("back", "rewind"), {"to_turn": 0}).json()["tips"] == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "to_turn"),
        ({"to_turn": -1}, 400, "to_turn"),
        ({"to_turn": "1"}, 400, "to_turn"),
        ({"to_turn": 9}, 404, "tip"),
        ({"to_turn": 1, "tip": 99}, 404, "tip"),
    ],
)
def test_a_turn_that_never_was_is_no_place(served_here, body, status, param):
    converse(served_here, "short", "First")
    refused = served_here.post(path("short", "rewind"), body)

    assert refused.status_code == status
    assert refused.json()["error"]["param"] == param
    served_here.post(path("short", "close"))


def test_a_turn_that_left_the_history_is_explained_in_words(served_here):
    messages = converse(served_here, "edited", "It is twelve o'clock", "Second")
    messages[0] = {"role": "user", "content": "It is one o'clock"}
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "session_id": "edited"}
    served_here.post("/v1/chat/completions", body)

    def last() -> dict:
        return served_here.get(path("edited", "explain")).json()["data"][-1]

    assert until(lambda: last()["miss"] is not None)
    assert "leaves the session's history" in last()["miss"]
    assert "message 0 (user)" in last()["miss"]
    assert last()["report"]["reason"] == "diverged"


def test_a_closed_id_opened_again_starts_empty_but_hits_by_content(served_here):
    converse(served_here, "phoenix", "A long first message " * 10)
    served_here.post(path("phoenix", "close"))
    converse(served_here, "phoenix", "A long first message " * 10)

    shown = served_here.get(path("phoenix")).json()
    assert shown["calls"] == 1
    assert shown["turns_kept"][0]["cached_tokens"] > 0


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "1" * 50])
def test_a_limit_out_of_range_is_named(served_here, limit):
    refused = served_here.get("/v1/sessions", params={"limit": limit})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "limit"


def test_a_long_list_says_that_there_is_more(served_here):
    for name in ("l1", "l2"):
        converse(served_here, name, "Hello")
    listed = served_here.get("/v1/sessions", params={"limit": 1}).json()

    assert [session["id"] for session in listed["data"]] == ["l2"]
    assert listed["has_more"] is True
