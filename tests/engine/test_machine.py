"""What the machine grants, read from made-up kernel files, and how many threads follow from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from testkit.command import agentcache
from testkit.models import micro_model, tokenizer

from agentcache.config import CacheConfig
from agentcache.engine import machine, threads
from agentcache.engine.machine import available_bytes, core_count, mapped_bytes, own_cpus
from agentcache.engine.threads import use_threads
from agentcache.errors import ConfigError
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GIB = 2**30


def kernel(root: Path, files: dict[str, str]) -> Path:
    """A root folder with these files below it."""
    meminfo = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\nHugePages: 0\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_the_kernel_calls_available_is_available(tmp_path: Path) -> None:
    assert available_bytes(kernel(tmp_path, {})) == 8 * GIB


def test_where_the_kernel_does_not_tell_all_memory_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_memory_bytes", lambda: 3 * GIB)
    assert available_bytes(tmp_path) == 3 * GIB
    assert mapped_bytes(tmp_path) == 0


def test_a_lower_limit_of_a_cgroup_counts_and_cached_files_give_way(tmp_path: Path) -> None:
    limited = {
        "proc/self/cgroup": "0::/slice/job\n",
        "sys/fs/cgroup/slice/job/memory.max": "max\n",
        "sys/fs/cgroup/slice/job/memory.current": str(GIB),
        "sys/fs/cgroup/slice/memory.max": str(4 * GIB),
        "sys/fs/cgroup/slice/memory.current": str(3 * GIB),
        "sys/fs/cgroup/slice/memory.stat": f"anon 5\nactive_file {GIB}\ninactive_file {GIB // 2}\n",
    }
    assert available_bytes(kernel(tmp_path, limited)) == 2.5 * GIB


def test_a_full_cgroup_leaves_nothing(tmp_path: Path) -> None:
    full = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(GIB),
        "sys/fs/cgroup/memory.current": str(GIB + 4096),
    }
    assert available_bytes(kernel(tmp_path, full)) == 0


def test_a_limit_of_version_one_counts_also_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    limited = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.stat": f"active_file 1\ntotal_active_file {GIB // 2}\n",
    }
    assert available_bytes(kernel(tmp_path, limited)) == 1.5 * GIB


def test_this_machine_has_memory_and_cores() -> None:
    assert 0 < available_bytes() < 2**60
    assert mapped_bytes() >= 0
    assert 1 <= core_count(own_cpus()) <= len(own_cpus())


def hyperthreads(root: Path, files: dict[str, str] | None = None) -> Path:
    """Eight logical CPUs on four cores."""
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    pairs = {topology.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}
    return kernel(root, {**pairs, **(files or {})})


@pytest.mark.parametrize(
    ("cpus", "cores"), [(range(8), 4), ((0, 4), 1), ((0, 1, 4), 2), ((6,), 1), ((), 1)]
)
def test_of_two_hyperthreads_one_counts(tmp_path: Path, cpus: range, cores: int) -> None:
    assert core_count(cpus, hyperthreads(tmp_path)) == cores


def test_where_the_topology_is_unknown_every_cpu_counts(tmp_path: Path) -> None:
    assert core_count(range(6), tmp_path) == 6


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ({"sys/fs/cgroup/a/cpu.max": "250000 100000"}, 3),
        ({"sys/fs/cgroup/a/cpu.max": "max 100000"}, 4),
        ({"sys/fs/cgroup/a/cpu.max": "max 100000", "sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/a/cpu.max": "900000 100000"}, 4),
    ],
)
def test_no_more_cores_than_the_quota_grants(
    tmp_path: Path, quota: dict[str, str], cores: int
) -> None:
    root = hyperthreads(tmp_path, {"proc/self/cgroup": "0::/a\n", **quota})
    assert core_count(range(8), root) == cores
    assert core_count(range(8), root, quota=False) == 4


def test_a_quota_of_version_one_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "200000",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert core_count(range(8), hyperthreads(tmp_path, files)) == 2


# threads


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Puts torch's number back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def eight_cpus(torch_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight logical CPUs, four cores, of which a quota grants three."""
    monkeypatch.setattr(threads, "own_cpus", lambda: frozenset(range(8)))
    monkeypatch.setattr(threads, "core_count", lambda cpus, quota=True: 3 if quota else 4)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 16)


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize("default", [4, 8, 16])
def test_what_torch_takes_by_itself_becomes_one_thread_per_core(default: int) -> None:
    torch.set_num_threads(default)
    assert use_threads(environ={}) == torch.get_num_threads() == 3


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize("chosen", [1, 2, 5, 7])
def test_a_number_the_process_has_set_stays(chosen: int) -> None:
    torch.set_num_threads(chosen)
    assert use_threads(environ={}) == torch.get_num_threads() == chosen


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_from_the_environment_stays(name: str) -> None:
    torch.set_num_threads(8)
    assert use_threads(environ={name: "8"}) == torch.get_num_threads() == 8


@pytest.mark.usefixtures("eight_cpus")
def test_a_number_that_is_asked_for_is_taken_whatever_was_set() -> None:
    torch.set_num_threads(2)
    assert use_threads(5, {"OMP_NUM_THREADS": "2"}) == torch.get_num_threads() == 5


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_a_number_of_threads_that_is_none_is_refused(number: object) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match=rf"threads is {number!r}; give a whole number"):
        use_threads(number)  # type: ignore[arg-type]
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("torch_threads")
def test_loading_sets_threads_and_taking_a_model_over_does_not() -> None:
    torch.set_num_threads(2)
    with Runtime(micro_model(), tokenizer(), cache=CacheConfig(budget="4MiB")):
        assert torch.get_num_threads() == 2
    with Runtime.load("tiny-hybrid", threads=1, cache=CacheConfig(budget="16MiB")):
        assert torch.get_num_threads() == 1
    with pytest.raises(ConfigError, match="threads is 0"):
        Runtime.load("tiny-hybrid", threads=0)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    "command", [("replay", "--limit=1", "--max-turns=1"), ("doctor", "--family=llama")]
)
def test_commands_that_load_a_model_take_a_number_of_threads(command: tuple[str, ...]) -> None:
    torch.set_num_threads(2)
    done = agentcache(*command, "--threads=1")
    assert done.status == 0, done.stderr
    assert torch.get_num_threads() == 1
    done = agentcache(*command, "--threads=0")
    assert (done.status, torch.get_num_threads()) == (2, 1)
    assert "threads is 0" in done.stderr
