"""Threads and memory that a runtime leaves with whoever made it: none."""

from __future__ import annotations

import platform
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


_RUNTIME = """
import os, time
import torch
from agentcache.config import CacheConfig
from agentcache.runtime import Runtime

def settled():
    counts = [-1]
    while len(counts) < 100 and len({*counts[-10:]}) > 1 or len(counts) < 11:
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return counts[-1]

torch.set_num_threads(2)
torch.ones(1 << 22).mul_(2)
with Runtime.load("tiny-hybrid", cache=CacheConfig(budget="32MiB"), threads=2) as runtime:
    before = settled()
    torch.ones(1 << 22).mul_(2)
    print(before, settled())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_whoever_makes_a_runtime_has_no_team_left() -> None:
    command = [sys.executable, "-c", _RUNTIME]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    before, with_team = map(int, ran.stdout.split())
    assert with_team == before + 1


_FREED = """
import ctypes
from agentcache.engine.machine import release_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident():
    return int(open("/proc/self/statm").read().split()[1])

blocks = [libc.malloc(4096) for _ in range(20_000)]
for block in blocks:
    ctypes.memset(block, 1, 4096)
for block in blocks[:-1]:  # the last one holds what lies below it
    libc.free(block)
before = resident()
release_memory()
print(before, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_goes_back_to_the_system() -> None:
    command = [sys.executable, "-c", _FREED]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = map(int, ran.stdout.split())
    assert before - after > 10_000  # pages


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
