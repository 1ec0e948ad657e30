"""How far from perfect: caches without limit or with knowledge of the future, and a bound.

They are named like policies, and run as such:

    unlimited          nothing ever leaves
    clairvoyant-evict  the named admission; eviction knows the future
    clairvoyant        admission and eviction know the future
    bound              no run: a figure that no policy can pass (see `relaxed`)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from agentcache.policy.base import Costs
from agentcache.simulate.driver import Simulator
from agentcache.simulate.foresight import Foresight
from agentcache.simulate.future import Future
from agentcache.simulate.relaxed import RelaxedBound
from agentcache.simulate.results import SimResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agentcache.cache import Lease
    from agentcache.simulate.results import Setup
    from agentcache.simulate.trace import SimRequest, Trace
    from agentcache.tree.radix_tree import Match
    from agentcache.types import ModelShape

    Progress = Callable[[int], None]

__all__ = ["BOUNDS", "Bounds"]

_FALLBACK = 0.1

BOUNDS = ("unlimited", "clairvoyant-evict", "clairvoyant", "bound")


class Bounds:
    """The bounds of one trace on one shape. What it knows of the future is found once."""

    def __init__(self, trace: Trace, shape: ModelShape) -> None:
        self._trace = trace
        self._shape = shape
        self._costs = Costs.of(shape)
        self._future: Future | None = None
        self._relaxed: RelaxedBound | None = None

    def run(self, setup: Setup, progress: Progress | None = None) -> SimResult:
        """What `setup.policy`, one of BOUNDS, reaches."""
        if setup.policy == "unlimited" or setup.budget_bytes is None:
            unlimited = replace(setup, budget_bytes=None, budget_share=None)
            result = Simulator(self._trace, self._shape, replace(unlimited, policy="lru"))
            return replace(result.run(progress), setup=replace(unlimited, policy=setup.policy))
        if setup.policy == "bound":
            return self._bound(setup)
        results = (
            _Foreseen(self._trace, self._shape, setup, self.future, foresight).run(progress)
            for foresight in self._foresights()
        )
        return max(results, key=lambda result: result.hit_rate)

    @property
    def future(self) -> Future:
        """All requests of the trace."""
        self._future = self._future or Future(self._trace.requests)
        return self._future

    @property
    def relaxed(self) -> RelaxedBound:
        """What no policy can pass."""
        self._relaxed = self._relaxed or RelaxedBound(self.future, self._shape)
        return self._relaxed

    def _foresights(self) -> Iterable[Foresight]:
        """The orders of which the best counts."""
        future, costs = self.future, self._costs
        seconds = np.array([*(each.at for each in future.requests), future.requests[-1].at])
        yield Foresight(future, costs)
        yield Foresight(future, costs, clock=seconds)
        yield Foresight(future, costs, power=0.5)
        yield Foresight(future, costs, power=np.inf)
        yield Foresight(future, costs, clock=seconds, fallback=_FALLBACK)

    def _bound(self, setup: Setup) -> SimResult:
        assert setup.budget_bytes is not None
        return SimResult(
            trace=self._trace.name,
            setup=setup,
            prompt_tokens=self._trace.prompt_tokens,
            num_requests=len(self._trace.requests),
            most_tokens=self.relaxed.tokens(setup.budget_bytes),
        )


class _Foreseen(Simulator):
    """A run whose eviction, and admission if `setup` asks for it, know the future."""

    def __init__(
        self,
        trace: Trace,
        shape: ModelShape,
        setup: Setup,
        future: Future,
        foresight: Foresight,
    ) -> None:
        admission = _Foreseen._Admission(future, foresight)
        is_given = setup.policy == "clairvoyant-evict"
        super().__init__(
            trace, shape, setup, policy=foresight, admission=None if is_given else admission
        )
        self._foresight = foresight

    def step(self, request: SimRequest) -> int | None:
        self._foresight.now += 1
        return super().step(request)

    def _commit(self, lease: Lease, request: SimRequest, length: int) -> None:
        super()._commit(lease, request, length)
        self._foresight.leads_to(lease.locked)

    class _Admission:
        files_end = True
        heeds_callers = True

        def __init__(self, future: Future, foresight: Foresight) -> None:
            self._future = future
            self._foresight = foresight

        def plan(
            self,
            match: Match,
            declared: Iterable[int],
            prompt_len: int,
            min_gain: int = 1,
        ) -> tuple[int, ...]:
            wanted = self._future.plan(self._foresight.now)
            return tuple(sorted(at for at in wanted if match.boundary < at < prompt_len))

        def decoded(self, start: int, stop: int) -> Sequence[int]:
            wanted = self._future.plan(self._foresight.now)
            return sorted(at for at in wanted if start <= at < stop)
