"""Threads that OpenMP keeps: a runtime leaves none with whoever made it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import os
import torch
from agentcache.engine.threads import release_team

torch.set_num_threads(2)
before = len(os.listdir("/proc/self/task"))
torch.ones(1 << 22).mul_(2)
with_team = len(os.listdir("/proc/self/task"))
released = release_team()
import time
for _ in range(200):
    after = len(os.listdir("/proc/self/task"))
    if after < with_team:
        break
    time.sleep(0.01)
print(before, with_team, after, released)
print(torch.ones(1 << 22).mul_(2).sum().item())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_a_team_is_let_go_and_made_anew() -> None:
    command = [sys.executable, "-c", _SCRIPT]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    counts, total = ran.stdout.strip().splitlines()
    before, with_team, after, released = counts.split()
    assert int(with_team) == int(before) + 1
    assert released == "True"
    assert int(after) == int(before)
    assert float(total) == 2 * (1 << 22)
