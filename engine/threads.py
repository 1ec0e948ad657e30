"""How many threads torch computes with, and for whom they are kept."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import torch

from agentcache.engine.machine import core_count, own_cpus
from agentcache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["release_team", "use_threads"]

_CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def use_threads(threads: int | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Set the number of torch's threads in this process, and return it.

    None: one for each physical core the process may use, unless it has chosen: by an environment
    variable, or by any number that torch does not take by itself. Raises ConfigError for a number
    that is none.
    """
    if threads is None:
        now = torch.get_num_threads()
        if any(environ.get(name) for name in _CHOSEN_BY) or now not in _torch_defaults():
            return now
        threads = core_count(own_cpus())
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ConfigError(
            f"threads is {threads!r}; give a whole number of at least 1, or None for one per "
            "physical core"
        )
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads


_SOFT_PAUSE = 1
"""`omp_pause_soft` of OpenMP 5: what was let go may be made anew when it is needed."""


def release_team() -> bool:
    """Let go of the threads that OpenMP keeps for the calling thread; False where it knows no way.

    Each thread that computes has a team of its own, which stays when it is done. As soon as all
    teams together have more threads than there are processors, GNU's OpenMP waits no longer for a
    team's next piece of work but puts its threads to sleep each time: with a model that was loaded
    on one thread and runs on another, every small operation costs a wake-up, and a decode step
    nearly twice its time. The next operation of the calling thread makes it a new team.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):  # no OpenMP, or one that shows nothing
        return False
    return bool(pause(_SOFT_PAUSE) == 0)


def _torch_defaults() -> set[int]:
    """What torch takes by itself: all logical CPUs, or with MKL all cores, whatever the quota."""
    cpus = own_cpus()
    return {os.cpu_count() or 1, len(cpus), core_count(cpus, quota=False)}
