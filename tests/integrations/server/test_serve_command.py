"""`agentcache serve` as a user starts it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import httpx
import pytest
from testkit.command import agentcache


def test_it_listens_answers_and_ends_when_told():
    command = [sys.executable, "-P", "-m", "agentcache", "serve"]
    options = ["--port=0", "--budget=64MiB", "--name=my-model", "--api-key=k", "--json=-"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            told = json.loads(process.stdout.readline())
            headers = {"Authorization": "Bearer k"}
            body = {"model": "my-model", "prompt": "Hello", "max_tokens": 2}
            url = f"{told['url']}/v1/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=60)
            refused = httpx.post(url, json=body, timeout=60)
            process.send_signal(signal.SIGTERM)
            status = process.wait(timeout=60)
        finally:
            process.kill()
        errors = process.stderr.read()

    assert told["model"] == "my-model"
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert refused.status_code == 401
    assert status == 0
    assert "serving my-model on http://127.0.0.1:" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--host=0.0.0.0"], "give an API key"),
        (["--port=99999"], "port is 99999"),
        (["--max-queue=-1"], "max_queue is -1"),
        (["--request-timeout=0"], "request_timeout_s is 0"),
        (["--api-key==x"], "KEY=TENANT"),
        (["--api-keys=nowhere.json"], "nowhere.json"),
        (["--budget=much"], "much"),
        (["--budget=1KiB"], "smallest workable budget"),
        (["--model=no/such-model"], "no/such-model"),
    ],
)
def test_what_cannot_work_is_wrong_usage(options, problem):
    done = agentcache("serve", "--port=0", *options)

    assert done.status == 2
    assert problem in done.stderr


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    done = agentcache("serve")

    assert done.status == 2
    assert "pip install 'agentcache[server]'" in done.stderr
