"""How a server begins and ends: gracefully, and with everything given back."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from testkit.waiting import until

from agentcache import ConfigError
from agentcache.integrations.server import ServerConfig, serving

MODEL = "tiny-hybrid"


def body(max_tokens: int, *, stream: bool) -> dict:
    messages = [{"role": "user", "content": "Go on and on."}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "stream": stream}


class Call(threading.Thread):
    """A request under way."""

    def __init__(self, url: str, fields: dict) -> None:
        super().__init__()
        self._args = (f"{url}/v1/chat/completions", fields)
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        url, fields = self._args
        self.answer = httpx.post(url, json=fields, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_running_calls_finish_in_the_time_of_grace(start, stream):
    with start(grace_s=60.0) as server:
        call = Call(server.url, body(30, stream=stream))
        assert until(lambda: server.server.admission.num_calls == 1)
    call.join()

    assert call.answer.status_code == 200
    if stream:
        assert call.answer.text.endswith("data: [DONE]\n\n")
    else:
        assert call.answer.json()["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("stream", [False, True])
def test_after_it_they_are_ended_and_told(start, runtime, stream):
    with start(grace_s=0.1) as server:
        call = Call(server.url, body(100_000, stream=stream))
        assert until(lambda: runtime.stats()["running"]["requests"] == 1)
    call.join()

    if stream:
        assert call.answer.status_code == 200
        last = [event for event in call.answer.text.split("\n\n") if event][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert call.answer.status_code == 503
        error = call.answer.json()["error"]
    assert "shutting down" in error["message"]
    assert until(lambda: runtime.stats()["leases"] == 0)


def test_while_it_ends_nothing_new_is_taken(start):
    with start() as server, httpx.Client(timeout=60) as client:
        assert client.get(f"{server.url}/health").status_code == 200
        server.server.admission.draining = True
        refused = client.post(f"{server.url}/v1/chat/completions", json=body(1, stream=False))
        health = client.get(f"{server.url}/health")

    assert refused.status_code == 503
    assert refused.headers["Retry-After"]
    assert (health.status_code, health.json()) == (503, {"status": "draining"})


def test_the_runtime_outlives_its_server(runtime):
    with serving(runtime, ServerConfig(port=0, model=MODEL)) as url:
        assert httpx.get(f"{url}/health").status_code == 200
    with runtime.session() as session:
        assert session.chat([{"role": "user", "content": "Hi"}], max_new_tokens=1).ids.size == 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_port_that_is_taken_is_an_error_that_says_so(served_here, runtime):
    port = int(served_here.url.rpartition(":")[2])

    with (
        pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"),
        serving(runtime, ServerConfig(port=port, model=MODEL)),
    ):
        pass


@pytest.mark.parametrize(
    "setting",
    [
        {"port": 70000},
        {"max_queue": -1},
        {"max_body_bytes": 0},
        {"request_timeout_s": 0},
        {"grace_s": -1},
        {"max_sessions": 0},
        {"max_tokens": 0},
        {"ping_s": float("nan")},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        ServerConfig(**setting)
