"""One trace through the cache itself, over pools that only count."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentcache.cache import ANY_LEN, HybridCache, Lease, OutOfPages
from agentcache.clock import ManualClock
from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.errors import ConfigError
from agentcache.metrics import Metrics
from agentcache.policy.admission import make_admission
from agentcache.policy.base import Costs
from agentcache.policy.cost import FlopsModel
from agentcache.policy.eviction import make_policy
from agentcache.simulate.arena import Arena
from agentcache.simulate.handles import Handles
from agentcache.simulate.results import Setup, SimResult
from agentcache.simulate.reuse import Reuse
from agentcache.simulate.shadows import Shadows
from agentcache.simulate.timed import TimedPolicy
from agentcache.simulate.tuner import ReplayTuner
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import FEW_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentcache.policy.admission import Admission
    from agentcache.policy.base import Policy
    from agentcache.simulate.trace import SimRequest, Trace
    from agentcache.types import ModelShape

    Progress = Callable[[int], None]
    """Told how many requests are done."""

__all__ = ["Simulator"]

_NAMESPACE = b"simulation"


@dataclass(slots=True)
class _Tally:
    """What adds up during a run. cached: tokens reused, per request; None for one refused."""

    cached: list[int | None] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    flops: float = 0.0
    flops_computed: float = 0.0
    peak_pages: int = 0
    cache_s: float = 0.0


class Simulator:
    """Runs one trace, request after request, as a runtime with one session handle each would.

    Tree, components, policy, admission and session references are the runtime's; only nothing is
    computed, and time is the trace's. A request is served in no time and files its prompt and its
    answer, so no two are in flight at once.

    By default the budget bounds what is filed between requests: the arena has room beside it for
    one request, and after each entries leave until the budget holds again. With
    `setup.charge_running` the arena is the budget alone, as it is in a runtime, where running
    requests push out entries and a request that does not fit is refused.
    """

    def __init__(
        self,
        trace: Trace,
        shape: ModelShape,
        setup: Setup,
        *,
        policy: Policy | None = None,
        admission: Admission | None = None,
    ) -> None:
        """policy, admission: instead of those that `setup` names."""
        self._trace = trace
        self.setup = setup
        self._arena = Arena.of(trace, shape, setup)
        self._flops = FlopsModel.of(shape)
        self._head_flops = 2.0 * shape.hidden_dim * shape.vocab_size
        self._clock = ManualClock()
        self._metrics = Metrics()
        tuner = ReplayTuner(shape, setup, in_background=False)
        costs = Costs.of(shape)
        self._shadows = self._make_shadows(costs) if setup.policy == "auto" else None
        chosen = policy or make_policy(setup.policy, costs, tuner, self._shadows)
        self._policy = TimedPolicy(chosen)
        self.cache = HybridCache(
            RadixTree(_components(self._arena, setup.page_size)),
            self._arena.pools,
            self._policy,
            self._clock,
            self._metrics,
            min_gain=FEW_TOKENS,
            admission=admission or make_admission(setup.admission),
        )
        self._handles = Handles(self.cache)
        self._reuse = Reuse()
        self._tally = _Tally()

    def _make_shadows(self, costs: Costs) -> Shadows:
        pools, page_size = self._arena.pools, self.setup.page_size
        return Shadows(
            costs,
            lambda: _components(self._arena, page_size),
            num_pages=pools.pages.num_pages,
            limit_pages=self._arena.limit_pages,
            state_pages=pools.state_pages,
        )

    def run(self, progress: Progress | None = None) -> SimResult:
        """All requests of the trace, once."""
        for index, request in enumerate(self._trace.requests):
            self.step(request)
            if progress is not None:
                progress(index + 1)
        return self._result()

    @property
    def policy_s(self) -> float:
        """Seconds of CPU that the policy has taken so far, without its shadow caches."""
        return self._policy.watch.seconds - self._shadow_s

    @property
    def _shadow_s(self) -> float:
        return self._shadows.seconds if self._shadows is not None else 0.0

    def step(self, request: SimRequest) -> int | None:
        """Serve one request; the tokens of its prompt that were reused, None if it was refused."""
        self._clock.advance(max(0.0, request.at - self._clock.now()))
        begin = time.thread_time()
        cached = self._serve(request)
        self._keep_budget()
        self._tally.cache_s += time.thread_time() - begin
        self._count(request, cached)
        return cached

    def _serve(self, request: SimRequest) -> int | None:
        """Twice, if need be: what a request found is held beside its own copies of the same
        positions, so from nothing it may fit."""
        for is_last in (False, True):
            lease: Lease | None = None
            try:
                lease = self._acquire(request)
                self._absorb(lease, request)
                if self.setup.hints:
                    self._handles.finish(request, lease)
            except OutOfPages:
                if is_last:
                    return None
            else:
                return lease.boundary
            finally:
                if lease is not None:
                    self.cache.release(lease)
                    if self.setup.hints:
                        self._tell(request)
            self.cache.clear()
        return None

    def _tell(self, request: SimRequest) -> None:
        """What a session says when its turn is over."""
        if request.session is None:
            return
        if request.closes:
            self.cache.over(request.session)
        elif request.expect_s is not None:
            self._handles.expects(request.session, request.expect_s)

    def _acquire(self, request: SimRequest) -> Lease:
        prompt = request.ids[: request.prompt_len]
        if not self.setup.hints:
            ends = (request.prompt_len - 1,) if request.passing else ()
            return self.cache.acquire(_NAMESPACE, prompt, passing=ends)
        after, known_len = self._handles.stands(request)
        return self.cache.acquire(
            _NAMESPACE,
            prompt,
            structural=request.marks,
            passing=request.passing,
            after=after,
            known_len=known_len,
            session=request.session,
            priority=request.priority,
        )

    def _absorb(self, lease: Lease, request: SimRequest) -> None:
        """Prompt and answer in chunks, with checkpoints on the way, and one at the end."""
        if lease.boundary:
            self._reuse.read(lease.match.node, lease.boundary)
        admission, end = self.cache.admission, len(request.ids)
        plan = [*lease.plan, *admission.decoded(request.prompt_len, end)]
        for stop in self._chunks(lease.boundary, request.prompt_len, end):
            while len(inside := [at for at in plan if at <= stop]) > self._most_captures:
                first = inside[: self._most_captures]  # a pass ends where no more can be captured
                self._extend(lease, request, first[-1], first)
                plan = plan[len(first) :]
            self._extend(lease, request, stop, inside)
            plan = plan[len(inside) :]
        if admission.files_end:
            self._commit(lease, request, end)

    def _extend(
        self, lease: Lease, request: SimRequest, stop: int, captured: Sequence[int]
    ) -> None:
        """One pass up to `stop`, and the checkpoints that were captured in it."""
        self.cache.reserve(lease, stop)
        for length in captured:
            self._commit(lease, request, length)

    @property
    def _most_captures(self) -> int:
        """Most checkpoints of one pass."""
        return self.setup.captures if self.setup.charge_running else ANY_LEN

    def _chunks(self, start: int, prompt_len: int, stop: int) -> list[int]:
        """Where passes end: a recorded answer is absorbed after the whole prompt."""
        chunk = self.setup.chunk_len if self.setup.charge_running else stop
        ends = [*range(start + chunk, prompt_len, chunk), prompt_len]
        return [*ends, *range(prompt_len + chunk, stop, chunk), stop]

    def _commit(self, lease: Lease, request: SimRequest, length: int) -> None:
        self.cache.commit(lease, request.ids, length, lease.row)
        self._reuse.filed(lease.locked)

    def _keep_budget(self) -> None:
        while self._arena.pools.pages.num_used > self._arena.limit_pages:
            if not self.cache.evict_one():
                return

    def _count(self, request: SimRequest, cached: int | None) -> None:
        tally = self._tally
        computed = request.prompt_len - (cached or 0)
        tally.cached.append(cached)
        tally.computed.append(computed)
        tally.flops += self._flops.upto(request.prompt_len) + self._head_flops
        tally.flops_computed += self._head_flops
        tally.flops_computed += self._flops.between(cached or 0, request.prompt_len)
        tally.peak_pages = max(tally.peak_pages, self._arena.pools.pages.num_used)

    def _result(self) -> SimResult:
        tally = self._tally
        filed = self._metrics.group("filed")
        peak = tally.peak_pages
        if self.setup.charge_running:
            peak = max(peak, self.cache.peak_pages()[1])
        return SimResult(
            trace=self._trace.name,
            setup=self.setup,
            prompt_tokens=self._trace.prompt_tokens,
            num_requests=len(tally.cached),
            cached=tuple(tally.cached),
            computed=tuple(tally.computed),
            flops_saved=1 - tally.flops_computed / tally.flops if tally.flops else 0.0,
            peak_bytes=peak * self._arena.pools.page_bytes,
            evictions=self._metrics.group("evictions"),
            filed=filed,
            reused={Kind.STATE.value: self._reuse.states, Kind.FULL.value: self._reuse.tokens},
            held=self.cache.used_pages(),
            policy_s=self.policy_s,
            cache_s=tally.cache_s - self._shadow_s,
        )


def _components(arena: Arena, page_size: int) -> list[FullComponent | StateComponent]:
    found: list[FullComponent | StateComponent] = []
    if arena.has_kv:
        found.append(FullComponent(page_size))
    if arena.pools.state_pages:
        found.append(StateComponent())
    if not found:
        raise ConfigError("the shape keeps neither KV nor state, so there is nothing to cache")
    return found
