"""Marconi's alpha by replay: the factor under which a log of requests would have saved most work.

    python -m agentcache.simulate.tuner

reads a pickled job from standard input and prints the factor: a runtime searches in a process of
its own, since threads of one would take turns with the engine's.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from agentcache.policy.base import Costs
from agentcache.policy.marconi import Marconi
from agentcache.policy.tuning import ALPHAS
from agentcache.simulate.trace import SimRequest, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.policy.base import Served
    from agentcache.simulate.results import Setup
    from agentcache.types import ModelShape

__all__ = ["ReplayTuner", "best_alpha", "log_trace"]

_log = logging.getLogger("agentcache")


def best_alpha(log: Sequence[Served], shape: ModelShape, setup: Setup) -> float:
    """The factor whose replay of the log, from an empty cache, saves most FLOPs; of equals, the
    smallest. Nothing is drawn: the same log gives the same factor."""
    from agentcache.simulate.driver import Simulator  # which has a tuner of its own

    trace, costs = log_trace(log), Costs.of(shape)
    setup = replace(setup, hints=True, charge_running=False)
    best, most = ALPHAS[0], float("-inf")
    for alpha in ALPHAS:
        saved = Simulator(trace, shape, setup, policy=Marconi(costs, alpha)).run().flops_saved
        if saved > most + _EQUAL:
            best, most = alpha, saved
    return best


def log_trace(log: Sequence[Served]) -> Trace:
    """A log as a trace of nobody's requests; namespaces are kept apart by what precedes them."""
    names = sorted({request.namespace for request in log})
    is_mixed = len(names) > 1
    requests = []
    for request in log:
        ids, shift = request.tokens, int(is_mixed)
        if is_mixed:
            head = np.array([-1 - names.index(request.namespace)], dtype=np.int32)
            ids = np.concatenate([head, ids])
        prompt_len = min(request.prompt_len + shift, len(ids))
        marks = tuple(at + shift for at in request.declared)
        at = request.at - log[0].at
        requests.append(SimRequest(None, at, ids, prompt_len, marks=marks))
    return Trace("log", "log", tuple(requests))


@dataclass(frozen=True, slots=True)
class _Job:
    """What another process is asked."""

    log: tuple[Served, ...]
    shape: ModelShape
    setup: Setup


class ReplayTuner:
    """Searches by replay, one log at a time.

    setup: the cache that a log is replayed in. in_background: in another process, while the caller
    goes on; otherwise `start` returns when the factor is known.
    """

    def __init__(self, shape: ModelShape, setup: Setup, *, in_background: bool) -> None:
        self._shape = shape
        self._setup = setup
        self._in_background = in_background
        self._thread: threading.Thread | None = None
        self._found: float | None = None

    def start(self, log: Sequence[Served]) -> None:
        """Begin a search, unless one is running."""
        if self._thread is not None and self._thread.is_alive():
            return
        job = _Job(tuple(log), self._shape, self._setup)
        search = self._search_elsewhere if self._in_background else self._search
        # A thread in either case: what it takes is not on the caller's account.
        self._thread = threading.Thread(target=search, args=(job,), name="tuner", daemon=True)
        self._thread.start()
        if not self._in_background:
            self._thread.join()

    def result(self) -> float | None:
        """What a search has found, once."""
        found, self._found = self._found, None
        return found

    def _search(self, job: _Job) -> None:
        self._found = best_alpha(job.log, job.shape, job.setup)

    def _search_elsewhere(self, job: _Job) -> None:
        command = [sys.executable, "-m", "agentcache.simulate.tuner"]
        try:
            done = subprocess.run(
                command, input=pickle.dumps(job), capture_output=True, check=True, timeout=_PATIENCE
            )
            self._found = float(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            _log.warning("alpha stays as it is, the search for a better one failed: %s", error)


def main() -> None:
    """Answer the job on standard input."""
    os.nice(_NICENESS)
    job: _Job = pickle.load(sys.stdin.buffer)
    print(best_alpha(job.log, job.shape, job.setup))


_PATIENCE = 120.0
"""Seconds after which a search is given up."""

_NICENESS = 10

_EQUAL = 1e-12
"""Shares of FLOPs that differ by less are rounding."""

if __name__ == "__main__":
    main()
