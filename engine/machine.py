"""What this process may use of its machine: memory and cores, within the limits of its cgroups."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import re
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

__all__ = [
    "available_bytes",
    "core_count",
    "drop_file_pages",
    "mapped_bytes",
    "own_cpus",
    "processor",
    "release_memory",
]

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int:
    """Bytes that can be allocated without pushing anything out: the kernel's estimate, or what a
    cgroup leaves if that is less. Where the kernel gives none, the size of memory.

    root: where `proc` and `sys` lie.
    """
    found = _fields(root / "proc/meminfo").get("MemAvailable")
    free = _memory_bytes() if found is None else found
    return max(0, min([free, *_cgroup_free(root)]))


def mapped_bytes(root: Path = _ROOT) -> int:
    """Bytes of files that are mapped into this process and resident; the kernel counts them as
    available. 0 where it does not tell."""
    return _fields(root / "proc/self/status").get("RssFile", 0)


def release_memory() -> None:
    """Give memory that was freed back to the system, where the C library keeps it: loading a model
    leaves it what was needed for a moment."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries need no telling
        ctypes.CDLL(None).malloc_trim(0)


def drop_file_pages(addresses: Iterable[int], root: Path = _ROOT) -> int:
    """Let go of what this process has read of the files that are mapped where these addresses are;
    returns how many bytes. They are read again where they are needed. A mapping that was written to
    stays. By address, since a file has any name: one of the Hub's cache has that of its digest.
    """
    places = sorted(addresses)
    dropped = 0
    for mapping in _mappings(root):
        at = bisect_left(places, mapping.start)
        is_meant = at < len(places) and places[at] < mapping.start + mapping.size
        if is_meant and mapping.is_clean:
            with suppress(AttributeError, OSError, TypeError):
                address, size = ctypes.c_void_p(mapping.start), ctypes.c_size_t(mapping.size)
                if ctypes.CDLL(None).madvise(address, size, mmap.MADV_DONTNEED) == 0:
                    dropped += mapping.resident
    return dropped


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A piece of this process's memory. is_clean: nothing of it differs from its file."""

    start: int
    size: int
    resident: int
    is_clean: bool


def _mappings(root: Path) -> Iterator[_Mapping]:
    """All that have a file, by the kernel's list; none where it gives none."""
    given = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", _read(root / "proc/self/smaps"), flags=re.M)
    for text in given:
        head, _, rest = text.partition("\n")
        words = head.split(maxsplit=5)
        if len(words) < 6 or not words[5].startswith("/"):
            continue
        start, stop = (int(number, 16) for number in words[0].split("-"))
        sizes = {
            name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): +(\d+) kB", rest, re.M)
        }
        # What was written may have been swapped out since; what lacks the lines may be either.
        is_clean = sizes.get("Anonymous", 1) == sizes.get("Swap", 0) == 0
        yield _Mapping(start, stop - start, sizes.get("Rss", 0), is_clean)


def processor(root: Path = _ROOT) -> str:
    """What processor this is and what instructions it has, as far as the system tells."""
    first, _, _ = _read(root / "proc/cpuinfo").partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    told = [fields.get(name, "") for name in ("model name", "CPU part", "flags", "Features")]
    return "\n".join([platform.machine(), platform.processor(), *told])


def own_cpus() -> frozenset[int]:
    """The logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_count(cpus: Collection[int], root: Path = _ROOT, *, quota: bool = True) -> int:
    """Physical cores among these CPUs, of two hyperthreads one; at least 1.

    quota: no more of them than a cgroup grants time for.
    """
    topology = root / "sys/devices/system/cpu"
    cores = {
        _read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus
    }
    limits = list(_cgroup_cores(root)) if quota else []
    return max(1, min([len(cores), *limits]))


def _memory_bytes() -> int:
    size: int = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return size


def _read(path: Path) -> str:
    """The text of a file of the kernel's; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.lstrip("-").isdigit() else None  # "max" is no limit


def _fields(path: Path) -> dict[str, int]:
    """Lines such as `MemAvailable:  123 kB`, in bytes."""
    pairs = (line.split() for line in _read(path).splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * 1024
        for words in pairs
        if len(words) == 3 and words[2] == "kB"
    }


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of those it lies in, for version 1 and 2.

    Inside a container the path may be the host's, of which only the mount itself is visible.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controllers and controller)
        inner = mount / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount))


def _cgroup_free(root: Path) -> Iterator[int]:
    """Per limited cgroup what may still be allocated; cached files give way."""
    for folder in _folders(root, "memory"):
        for limit_name, usage_name, prefix in _MEMORY_FILES:
            limit, used = _number(folder / limit_name), _number(folder / usage_name)
            if limit is None or used is None:
                continue
            pairs = map(str.split, _read(folder / "memory.stat").splitlines())
            stat = {name: int(value) for name, value in pairs}
            cached = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
            yield limit - max(0, used - cached)


_MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def _cgroup_cores(root: Path) -> Iterator[int]:
    """Per cgroup with a quota of CPU time, that many cores, rounded up."""
    for folder in _folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        quota = quota or _read(folder / "cpu.cfs_quota_us")
        period = period or _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            yield max(1, math.ceil(int(quota) / int(period)))
