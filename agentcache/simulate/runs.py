"""Traces by policies by admissions by budgets: which runs there are to do, and doing them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING

from agentcache.config import parse_bytes
from agentcache.errors import ConfigError
from agentcache.policy.admission import make_admission
from agentcache.policy.eviction import POLICIES, make_policy
from agentcache.replay.need import NeedCounter
from agentcache.simulate.bounds import BOUNDS, Bounds
from agentcache.simulate.driver import Simulator
from agentcache.simulate.results import ANY_ADMISSION, Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agentcache.simulate.results import SimResult
    from agentcache.simulate.trace import Trace
    from agentcache.types import ModelShape

    Progress = Callable[[str, int, int], None]
    """Told (what is running, requests done, requests in all)."""

__all__ = ["Budget", "Grid", "check_policy", "parse_budget", "simulate"]


@dataclass(frozen=True, slots=True)
class Budget:
    """So many bytes, or a share of what a trace needs; neither for no limit."""

    num_bytes: int | None = None
    share: float | None = None

    def of(self, need_bytes: int) -> Budget:
        """The same in bytes."""
        if self.share is None:
            return self
        return replace(self, num_bytes=max(1, int(self.share * need_bytes)))

    def __str__(self) -> str:
        if self.share is not None:
            return f"{100 * self.share:g}%"
        return "no limit" if self.num_bytes is None else f"{self.num_bytes:,} B"


def parse_budget(text: str) -> Budget:
    """A budget as it is typed: "10%" or "0.1" of the need, bytes such as "2GB", or "none".

    >>> parse_budget("10%"), parse_budget("64MiB")
    (Budget(num_bytes=None, share=0.1), Budget(num_bytes=67108864, share=None))

    Raises ConfigError.
    """
    said = text.strip()
    if said.lower() == "none":
        return Budget()
    is_percent, is_fraction = said.endswith("%"), said.startswith(("0.", "."))
    if not is_percent and not is_fraction:
        num_bytes = parse_bytes(said)
        if num_bytes < 1:
            raise ConfigError(f"a budget of {text!r} is nothing; give at least a byte")
        return Budget(num_bytes)
    try:
        share = float(said.rstrip("%")) / (100 if is_percent else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise ConfigError(f'{text!r} is no share; write "10%" or "0.1", or bytes such as "2GB"')
    return Budget(share=share)


def check_policy(name: str) -> None:
    """Raises ConfigError for what is neither a policy nor a bound."""
    if name not in BOUNDS:
        make_policy(name)


@dataclass(frozen=True, slots=True)
class Grid:
    """Every policy with every admission under every budget.

    Bounds that do not depend on the admission, or on the budget, come once for all of them. base:
    the settings that all share. Raises ConfigError for an unknown name.
    """

    policies: Sequence[str]
    admissions: Sequence[str]
    budgets: Sequence[Budget]
    base: Setup = field(default_factory=Setup)

    def __post_init__(self) -> None:
        for policy in self.policies:
            check_policy(policy)
        for admission in self.admissions:
            make_admission(admission)

    def setups(self, need_bytes: int) -> Iterator[Setup]:
        """The runs for a trace of that need."""
        seen = set[Setup]()
        for budget, admission, policy in product(self.budgets, self.admissions, self.policies):
            given = budget.of(need_bytes)
            setup = replace(
                self.base,
                policy=policy,
                admission=admission,
                budget_bytes=given.num_bytes,
                budget_share=given.share,
            )
            if policy in ("clairvoyant", "bound"):
                setup = replace(setup, admission=ANY_ADMISSION, hints=False)
            if policy == "unlimited":
                setup = replace(setup, budget_bytes=None, budget_share=None)
            if setup not in seen:
                seen.add(setup)
                yield setup


def simulate(
    trace: Trace, shape: ModelShape, grid: Grid, progress: Progress | None = None
) -> list[SimResult]:
    """All runs of a grid over one trace."""
    bounds, total = Bounds(trace, shape), len(trace.requests)
    results = []
    for setup in grid.setups(need_bytes(trace, shape)):
        title = f"{trace.name}: {setup.policy}"

        def tell(done: int, title: str = title) -> None:
            if progress is not None:
                progress(title, done, total)

        tell(0)
        is_bound = setup.policy not in POLICIES
        results.append(
            bounds.run(setup, tell) if is_bound else Simulator(trace, shape, setup).run(tell)
        )
    return results


def need_bytes(trace: Trace, shape: ModelShape) -> int:
    """What a cache without limit would hold, with a checkpoint at each turn's end and branch
    point: what shares are of."""
    counter = NeedCounter()
    for request in trace.requests:
        counter.add(request.ids, request.prompt_len)
    return counter.need_bytes(shape)
