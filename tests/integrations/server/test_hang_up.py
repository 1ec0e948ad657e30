"""A client that hangs up frees its place within a step, whatever it asked for."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from testkit.waiting import until

from agentcache import Session

BODIES = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Go on and on."}],
        "max_tokens": 100_000,
    },
    "/v1/completions": {"prompt": "Go on and on.", "max_tokens": 100_000},
    "/v1/responses": {"input": "Go on and on.", "max_output_tokens": 100_000},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Go on and on."}],
        "max_tokens": 100_000,
    },
}


def send(
    url: str, path: str, body: dict[str, object] | None = None, **fields: object
) -> socket.socket:
    """A raw request, so that hanging up is nothing but the connection's end."""
    parts = urlsplit(url)
    given = {"model": "tiny-hybrid", **BODIES[path], **fields} if body is None else body
    raw = json.dumps(given).encode()
    connection = socket.create_connection((parts.hostname, parts.port), timeout=20)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    connection.sendall(head.encode() + raw)
    return connection


def running(served_here) -> int:
    return served_here.runtime.stats()["running"]["requests"]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_ends_with_its_reader(served_here, path):
    connection = send(served_here.url, path, stream=True)
    received = b""
    while b"data: " not in received:
        received += connection.recv(4096)
    assert until(lambda: running(served_here) == 1)

    connection.close()

    assert until(served_here.idle)


@pytest.mark.parametrize("path", BODIES)
def test_a_plain_call_ends_with_its_caller(served_here, path):
    connection = send(served_here.url, path)
    assert until(lambda: running(served_here) == 1)

    connection.close()

    assert until(served_here.idle)


def test_a_call_that_waits_for_its_turn_ends_with_its_caller(served_here):
    path = "/v1/chat/completions"
    before = [send(served_here.url, path, stream=True) for _ in range(6)]
    assert until(lambda: served_here.server.admission.num_calls == 6)

    for connection in reversed(before):
        connection.close()

    assert until(served_here.idle)


def test_a_call_that_had_not_begun_never_does(served_here, busy, monkeypatch):
    begun, complete = [], Session.complete

    def noted(*args, **options):
        begun.append(args)
        return complete(*args, **options)

    monkeypatch.setattr(Session, "complete", noted)
    with busy(served_here.server.threads):
        connection = send(served_here.url, "/v1/chat/completions")
        assert until(lambda: served_here.server.admission.num_calls == 1)
        connection.close()
        assert until(lambda: served_here.server.admission.num_calls == 0)
    served_here.post("/tokenize", {"prompt": "x"})  # after it in the queue

    assert until(served_here.idle)
    assert begun == []


def test_a_fork_whose_caller_has_gone_is_closed(served_here, monkeypatch):
    runtime, seen = served_here.runtime, []
    served_here.chat(session_id="trunk")
    monkeypatch.setattr(
        served_here.server.metrics, "note_request", lambda path, status, _: seen.append(status)
    )
    gate = threading.Event()

    def is_open() -> bool:
        return "leaf" in [record.id for record in runtime.registry]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(runtime.on_engine, lambda: gate.wait(20))
        connection = send(served_here.url, "/v1/sessions/trunk/fork", {"id": "leaf"})
        assert until(is_open)
        connection.close()
        assert until(lambda: seen == [499])
        gate.set()

    assert until(lambda: not is_open())
    assert served_here.get("/v1/sessions/leaf").status_code == 404


def test_twenty_in_a_row_leave_nothing_behind(served_here):
    served_here.chat()
    sessions = served_here.runtime.stats()["sessions"]["open"]
    for number in range(20):
        connection = send(served_here.url, "/v1/chat/completions", stream=bool(number % 2))
        assert until(lambda: served_here.server.admission.num_calls == 1)
        connection.close()
        assert until(served_here.idle)

    assert until(lambda: served_here.runtime.stats()["sessions"]["open"] == sessions)
    assert served_here.runtime.stats()["bytes"]["running"]["used"] == 0
    assert served_here.chat().status_code == 200
