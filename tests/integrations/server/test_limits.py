"""Back-pressure, sizes, times: what is too much is refused, and the rest is not disturbed."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import aiohttp
import httpx
import pytest
from testkit.waiting import until

from agentcache.integrations._openai import read_call

pytest.importorskip("aiohttp")
from agentcache.integrations.server import openai_chat

MODEL = "tiny-hybrid"
LONG = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Go on and on."}],
    "max_tokens": 100_000,
    "stream": True,
}

COUNTING = ["/tokenize", "/v1/messages/count_tokens"]


@pytest.fixture(scope="module")
def small(start):
    """A server with five places in all, where the runtime computes four at once."""
    with start(max_queue=1, max_body_bytes=100_000, max_sessions=3) as server:
        yield server


def test_more_than_the_queue_holds_is_told_when_to_come_back(small):
    with httpx.Client(timeout=60) as client:
        path = f"{small.url}/v1/chat/completions"
        streams = [client.stream("POST", path, json=LONG) for _ in range(5)]
        for stream in streams:
            assert stream.__enter__().status_code == 200

        refused = small.chat()

        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 60
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        for stream in streams:
            stream.__exit__(None, None, None)
    assert until(small.idle)
    assert small.chat().status_code == 200


def test_counting_tokens_takes_a_place_too(small):
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    with httpx.Client(timeout=60) as client:
        path = f"{small.url}/v1/chat/completions"
        streams = [client.stream("POST", path, json=LONG) for _ in range(5)]
        for stream in streams:
            assert stream.__enter__().status_code == 200

        refused = [small.post(path, ask) for path in COUNTING]

        assert [answer.status_code for answer in refused] == [429, 429]
        for stream in streams:
            stream.__exit__(None, None, None)
    assert until(small.idle)
    assert [small.post(path, ask).status_code for path in COUNTING] == [200, 200]


def test_a_body_over_the_limit_is_refused_unread(small):
    refused = small.chat("x" * 100_000)

    assert refused.status_code == 413
    assert "100000 bytes" in refused.json()["error"]["message"]
    assert small.chat().status_code == 200


def test_a_body_over_the_limit_without_a_length_is_refused(small):
    def pieces():
        yield b'{"model": "'
        for _ in range(30):
            yield b"x" * 10_000

    refused = httpx.post(
        f"{small.url}/v1/chat/completions",
        content=pieces(),
        headers={"content-type": "application/json"},
        timeout=60,
    )

    assert refused.status_code == 413
    assert small.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_over_the_time_limit_is_ended_and_told(start, stream):
    with start(request_timeout_s=0.3) as server:
        answer = server.post("/v1/chat/completions", {**LONG, "stream": stream})
        if stream:
            events = [event for event in answer.text.split("\n\n") if event]
            assert answer.status_code == 200
            assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        else:
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "timeout"
            assert answer.headers["x-should-retry"] == "false"
        assert until(server.idle)


def test_a_body_that_does_not_come_is_not_waited_for(start):
    async def slowly(url: str) -> tuple[int, str | None]:
        async def pieces():
            yield b"{"
            await asyncio.sleep(30)

        async with aiohttp.ClientSession() as client:
            headers = {"content-type": "application/json"}
            path = f"{url}/v1/chat/completions"
            async with client.post(path, data=pieces(), headers=headers) as answer:
                return answer.status, answer.headers.get("Connection")

    with start(request_timeout_s=0.3) as server:
        assert asyncio.run(slowly(server.url)) == (408, "close")


def test_a_silent_stream_is_kept_alive(start):
    with start(ping_s=0.02) as server:
        words = "word " * 2000  # a prefill of some tenths of a second
        body = {**LONG, "max_tokens": 1, "messages": [{"role": "user", "content": words}]}
        answer = server.post("/v1/chat/completions", body)

    assert ": waiting\n\n" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_session_unused_for_longest_is_closed_for_a_new_one(small):
    for name in ("a", "b", "c", "a", "d"):
        assert small.chat(session_id=name).status_code == 200

    open_now = [session["id"] for session in small.get("/v1/sessions").json()["data"]]
    assert open_now == ["d", "a", "c"]
    assert small.chat(session_id="b").status_code == 200


def test_a_session_that_was_closed_for_another_can_be_opened_at_once(start, busy):
    with start(max_sessions=1) as server, ThreadPoolExecutor(2) as pool:
        assert server.chat(session_id="a").status_code == 200
        with busy(server.server.threads):
            answers = []
            for number, name in enumerate("ba", start=1):
                answers.append(pool.submit(server.chat, session_id=name))
                assert until(lambda number=number: server.server.admission.num_calls == number)
        assert [answer.result().status_code for answer in answers] == [200, 200]


def test_a_session_is_closed_also_while_all_threads_are_busy(start, busy):
    with start() as server:
        server.chat(session_id="a")
        with busy(server.server.threads):
            assert server.post("/v1/sessions/a/close").status_code == 200
        assert server.chat(session_id="a").status_code == 200
        assert server.get("/v1/sessions/a").json()["calls"] == 1


@pytest.mark.parametrize("is_large", [False, True])
def test_large_bodies_are_read_off_the_event_loop(start, monkeypatch, is_large):
    threads: list[str] = []

    def reading(*args, **options):
        threads.append(threading.current_thread().name)
        return read_call(*args, **options)

    monkeypatch.setattr(openai_chat, "read_call", reading)
    with start() as server:
        padding = {"metadata": {"note": "x" * 2**19}} if is_large else {}
        assert server.chat(**padding).status_code == 200

    assert threads[0].startswith("agentcache-server_") is is_large


def test_sessions_in_use_are_not_closed_for_others(start):
    with start(max_sessions=1) as server, ThreadPoolExecutor(3) as pool:
        ask = partial(server.chat, max_tokens=30)
        answers = list(pool.map(lambda name: ask(session_id=name), "abc"))

        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert server.chat(session_id="d").status_code == 200
        forked = server.post("/v1/sessions/d/fork", {"id": "e"})
        assert forked.status_code == 200
        listed = server.get("/v1/sessions").json()["data"]
        assert [session["id"] for session in listed] == ["e"]


def test_sessions_without_a_name_end_with_their_call(small):
    before = small.runtime.stats()["sessions"]["open"]
    for _ in range(3):
        small.chat()

    assert until(lambda: small.runtime.stats()["sessions"]["open"] == before)
