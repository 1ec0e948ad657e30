"""Warm = cold, checked: the same tokens computed again from nothing, in memory of their own.

A cold run does not touch the cache it is compared with; its memory is outside the budget and is
given back when it ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentcache.engine.backend import Batch, ModelBackend, Span
from agentcache.pools.layout import PoolSizes
from agentcache.pools.table import PageTable
from agentcache.pools.tensors import TensorPools
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from agentcache.clock import Clock
    from agentcache.pools.layout import SidecarSpec
    from agentcache.types import IntArray

__all__ = ["ColdRun", "VerifyResult", "cold_run", "compare", "log_mismatch"]

LOGIT_TOLERANCE = 1e-4
"""In units of the standard deviation of a position's logits."""

STATE_TOLERANCE = 1e-4
"""Relative L2 distance of one layer's state or KV."""

TOLERANCES = {
    "unchanged": (LOGIT_TOLERANCE, STATE_TOLERANCE),
    "float16": (5e-2, 5e-3),
    "int8": (4.0, 0.2),
}
"""Of logits and of states, by how the checkpoints are kept that a call may have gone on from. What
rounding does to tiny random models over ten turns, two to three times over; a state that is lost or
another's is off by about 1."""

HALF_TOLERANCES = (4.0, 0.2)
"""The same where weights and KV have 16 bits and the two runs have split the work differently: up
to 0.1 and 0.02 in dense models, 1.8 and 0.1 where a router takes another expert."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """A warm call against a cold one.

    positions: logit rows compared. different_ids: rows whose most likely ids differ though the cold
    run's two best are further apart than the tolerance. max_logit_error: greatest difference over a
    row's standard deviation. max_state_error: greatest relative L2 distance over `layers`, which
    names each layer's "state", "conv" and "kv", and by their own names the parts of what lies
    beside the pages. cold_ttft_s: time of the cold run to its first logits.
    """

    positions: int
    different_ids: int
    max_logit_error: float
    max_state_error: float
    layers: dict[str, float]
    cold_ttft_s: float
    logit_tolerance: float = LOGIT_TOLERANCE
    state_tolerance: float = STATE_TOLERANCE

    @property
    def ok(self) -> bool:
        """Whether everything is within the tolerances; an error that is no number is not."""
        return (
            self.different_ids == 0
            and self.max_logit_error <= self.logit_tolerance
            and self.max_state_error <= self.state_tolerance
        )

    @property
    def worst_layer(self) -> str | None:
        """The name in `layers` with the greatest distance; None where nothing is kept."""
        return max(self.layers, key=lambda name: self.layers[name], default=None)


@dataclass(frozen=True, slots=True, eq=False)
class ColdRun:
    """Everything a run from nothing left: logits [num_logits, vocab], state row 0, all KV.

    tables: its pages by kind.
    """

    logits: torch.Tensor
    pools: TensorPools
    tables: Mapping[str, PageTable]
    ttft_s: float


def cold_run(
    backend: ModelBackend,
    tokens: IntArray,
    *,
    prompt_len: int,
    num_logits: int,
    chunk: int,
    clock: Clock,
    exact: bool = False,
    stepwise: bool = False,
) -> ColdRun:
    """Absorb `tokens` from an empty state, in chunks as a prefill does.

    num_logits: rows wanted, from the prompt's last token on. exact: as for a batch. stepwise: what
    follows the prompt goes token by token, as a reply does; else in chunks too.
    """
    tables, num_pages = _tables(backend, len(tokens))
    sizes = PoolSizes.of(
        backend.kv_layout,
        backend.state_layout,
        num_pages=num_pages,
        page_size=_PAGE,
        num_rows=1,
        num_staging=0,
    )
    pools = TensorPools(backend.kv_layout, backend.state_layout, sizes, device=backend.device)
    wanted = range(prompt_len - 1, prompt_len - 1 + num_logits)
    rows: list[torch.Tensor] = []
    begin, ttft, at = clock.now(), 0.0, 0
    while at < len(tokens):
        if at < prompt_len:
            stop = min(at + chunk, prompt_len)
        else:
            stop = at + 1 if stepwise else min(at + chunk, len(tokens))
        inside = tuple(p - at for p in wanted if at <= p < stop)
        span = Span(tokens[at:stop], at, tables[Kind.FULL], 0, logits_at=inside, windows=tables)
        rows.append(backend.forward(Batch((span,), pools, exact))[0])
        at = stop
        if at == prompt_len:
            ttft = clock.now() - begin
    return ColdRun(torch.cat(rows), pools, tables, ttft)


def _tables(backend: ModelBackend, length: int) -> tuple[dict[str, PageTable], int]:
    """Pages for all KV of a sequence by kind, one kind after the other; and how many they are."""
    tables, at = {}, 0
    for kind, page_len in backend.kv_layout.page_shape(_PAGE).lens.items():
        num = -(-length // page_len)
        tables[kind] = PageTable(page_len, np.arange(at, at + num, dtype=np.int32))
        at += num
    tables.setdefault(Kind.FULL, PageTable(_PAGE, np.empty(0, dtype=np.int32)))
    return tables, at


_PAGE = 64


def compare(
    warm_logits: torch.Tensor,
    pools: TensorPools,
    tables: Mapping[str, PageTable],
    row: int,
    cold: ColdRun,
    length: int,
    *,
    same_split: bool = False,
) -> VerifyResult:
    """Compare a running request, whose `row` has absorbed `length` tokens, with a cold run.

    same_split: whether both have split the work in the same way, so that nothing may differ.
    """
    logit_tolerance, state_tolerance = _tolerances(pools, same_split)
    different, logit_error = _logits(warm_logits, cold.logits, logit_tolerance)
    layers: dict[str, float] = {}
    for (layer, name), state in pools.state.items():
        layers[f"{layer}.{name.replace('recurrent', 'state')}"] = _distance(
            state[row], cold.pools.state[layer, name][0]
        )
    for group in pools.kv_layout.groups:
        first = 0 if group.window is None else max(0, length + 1 - group.window)
        for spec in group.specs:
            warm_kv, cold_kv = (
                _kv(of.kv[spec.layer_idx], table[group.kind], first, length)
                for of, table in ((pools, tables), (cold.pools, cold.tables))
            )
            layers[f"{spec.layer_idx}.kv"] = _distance(warm_kv, cold_kv)
    for beside in pools.kv_layout.sidecars:
        warm_entries, cold_entries = (
            _entries(of.sidecars[beside.name], beside, table[Kind.FULL], length)
            for of, table in ((pools, tables), (cold.pools, cold.tables))
        )
        for idx in range(beside.shape[0]):
            layers[f"{beside.name}[{idx}]"] = _distance(warm_entries[:, idx], cold_entries[:, idx])
    return VerifyResult(
        positions=len(warm_logits),
        different_ids=different,
        max_logit_error=logit_error,
        max_state_error=_max(layers.values()),
        layers=layers,
        cold_ttft_s=cold.ttft_s,
        logit_tolerance=logit_tolerance,
        state_tolerance=state_tolerance,
    )


def _tolerances(pools: TensorPools, same_split: bool) -> tuple[float, float]:
    rounded = TOLERANCES[pools.checkpoint_format]
    if same_split or pools.kv_layout.dtype not in (torch.float16, torch.bfloat16):
        return rounded
    return max(rounded[0], HALF_TOLERANCES[0]), max(rounded[1], HALF_TOLERANCES[1])


def _logits(warm: torch.Tensor, cold: torch.Tensor, tolerance: float) -> tuple[int, float]:
    if not len(warm):
        return 0, 0.0
    spread = cold.std(dim=1)
    errors = (warm - cold).abs().amax(dim=1) / spread
    best = cold.topk(2, dim=1).values
    clear = best[:, 0] - best[:, 1] > tolerance * spread
    differs = warm.argmax(dim=1) != cold.argmax(dim=1)
    broken = ~torch.isfinite(warm).all(dim=1)
    return int((differs & clear | broken).sum()), _max(errors.tolist())


def _distance(warm: torch.Tensor, cold: torch.Tensor) -> float:
    """Relative L2 distance; infinite where anything is not a number."""
    gap = float(torch.linalg.vector_norm(warm.float() - cold.float()))
    norm = float(torch.linalg.vector_norm(cold.float()))
    if gap == 0:
        return 0.0
    return gap / norm if np.isfinite(gap) and norm > 0 else float("inf")


def _kv(
    halves: tuple[torch.Tensor, torch.Tensor], table: PageTable, first: int, length: int
) -> torch.Tensor:
    """What a layer keeps of positions [first, length), keys before values."""
    runs = list(table.runs(first, length))
    parts = [half[at : at + num].flatten() for half in halves for at, num in runs]
    return torch.cat(parts) if parts else halves[0][:0]


def _entries(
    sidecar: torch.Tensor, spec: SidecarSpec, table: PageTable, length: int
) -> torch.Tensor:
    """What lies beside the pages of positions [0, length), [entries, *shape]."""
    pages, places = spec.places(0, length // spec.tokens, table.page_size)
    return sidecar[torch.from_numpy(table.pages[pages]).long(), torch.from_numpy(places).long()]


def log_mismatch(
    result: VerifyResult,
    *,
    session: str | None,
    prompt_len: int,
    cached_len: int,
    dropped: int | None,
) -> None:
    """Log a call that differs from a cold run. dropped: entries that left the cache for it."""
    logging.getLogger("agentcache").warning(
        "a call of session %r differs from a cold run: %d prompt tokens, %d of them reused; %d of "
        "%d ids differ, logits by %.1e (tolerance %.0e), layer %s by %.1e (tolerance %.0e); %s",
        session,
        prompt_len,
        cached_len,
        result.different_ids,
        result.positions,
        result.max_logit_error,
        result.logit_tolerance,
        result.worst_layer,
        result.max_state_error,
        result.state_tolerance,
        'it stays cached (on_mismatch="drop" would drop it)'
        if dropped is None
        else f"{dropped} entries of its path were dropped",
    )


def _max(values: Iterable[float]) -> float:
    """The greatest value; infinite if any is not a number."""
    numbers = list(values)
    if any(np.isnan(v) for v in numbers):
        return float("inf")
    return max(numbers, default=0.0)
