"""A process that ends while its engine computes ends as any other."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
import threading, time
from agentcache import Runtime
runtime = Runtime.load("tiny-hybrid")
session = runtime.session("a")
call = session.generate(list(range(5, 90)), max_new_tokens=5_000, stream=True)
threading.Thread(target=lambda: list(call), daemon=True).start()
while not runtime.stats()["running"]:
    time.sleep(0.01)
"""


def test_a_runtime_that_nobody_closed_does_not_abort_the_process() -> None:
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        assert ended.returncode == 0, ended.stderr
        assert "terminate called" not in ended.stderr
