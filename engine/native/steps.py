"""Decode steps recorded once for each number of sequences, and played from then on.

A step of a small model is some hundred kernels of a few microseconds each; Python between them
would take as long as they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, cast
from weakref import WeakKeyDictionary, ref

import torch

from agentcache.kernels import rows
from agentcache.kernels.recording import Recording, Scratch, Unrecordable, record
from agentcache.kernels.row_attention import KeyRuns
from agentcache.kernels.row_moves import scatter
from agentcache.pools.layout import PoolSizes
from agentcache.pools.tensors import TensorPools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from agentcache.engine.backend import Batch, Span
    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.packing import Pass
    from agentcache.pools.layout import KVLayout, StateLayout

__all__ = ["RecordedSteps", "Step", "is_recordable"]

_MOST_SEQUENCES = 16
"""With more, a step is bound by what the kernels do."""
_NUM_RUNS = 64
"""Runs of slots that a sequence's keys lie in, on average; if there are more, it is doubled."""


@dataclass(frozen=True, slots=True)
class StepPlaces:
    """Where one kind of KV lies. slots: of the new tokens, [R]. of_steps: all that they see."""

    slots: Tensor
    of_steps: KeyRuns

    def store(self, target: Tensor, new: Tensor) -> None:
        """Write [R, heads, dim] into the new tokens' slots of `target` [slots, heads, dim]."""
        scatter(target, self.slots, new)

    def __getattr__(self, name: str) -> NoReturn:
        raise Unrecordable(f"{name!r} is not the same at every step")


class Step:
    """One token each of several sequences, in memory that stays where it is.

    Stands in for a `Pass` where one is recorded, with nothing but tensors that may change from step
    to step; a layer that asks for anything else cannot be recorded. As it is made, every sequence
    has its first token, in the slot and row of its number. It keeps no pools alive.
    """

    exact = False
    runs = ()

    def __init__(self, pools: TensorPools, num: int, num_runs: int, scratch: Scratch) -> None:
        self._pools = ref(pools)
        self._groups = pools.kv_layout.groups
        self.steps = num
        self.ids = torch.zeros(num, dtype=torch.int64)
        self.positions = torch.zeros(num, dtype=torch.int64)
        self.step_rows = torch.arange(num)
        self._scratch = scratch
        self._num_runs = num * num_runs
        self._places: dict[str, StepPlaces] = {}
        for group in self._groups:
            pairs = torch.zeros((self._num_runs, 2), dtype=torch.int64)
            pairs[:num, 0], pairs[:num, 1] = torch.arange(num), 1
            runs = KeyRuns(pairs, torch.arange(num + 1))
            self._places[group.kind] = StepPlaces(torch.arange(num), runs)

    def __getattr__(self, name: str) -> NoReturn:
        raise Unrecordable(f"{name!r} is not the same at every step")

    @property
    def pools(self) -> TensorPools:
        """The pools that the sequences lie in."""
        pools = self._pools()
        assert pools is not None
        return pools

    def places(self, kind: str) -> StepPlaces:
        """Where a kind of KV lies."""
        return self._places[kind]

    def next_block(self) -> None:
        """What the block before the last has made is not needed any more."""
        self._scratch.turn()

    def wanted(self) -> None:
        """All logits are."""

    def fill(self, spans: Sequence[Span]) -> bool:
        """Take these tokens in; False if their keys lie in more runs than there is room for."""
        for group in self._groups:
            places = self._places[group.kind]
            runs: list[tuple[int, int]] = []
            firsts, slots = [0], []
            for span in spans:
                first = 0 if group.window is None else max(0, span.start + 1 - group.window)
                runs.extend(span.pages(group.kind).runs(first, span.start + 1))
                firsts.append(len(runs))
                start, length = runs[-1]
                slots.append(start + length - 1)
            if len(runs) > self._num_runs:
                return False
            places.of_steps.pairs.numpy()[: len(runs)] = runs
            places.of_steps.firsts.numpy()[:] = firsts
            places.slots.numpy()[:] = slots
        self.ids.numpy()[:] = [span.ids[0] for span in spans]
        self.positions.numpy()[:] = [span.start for span in spans]
        self.step_rows.numpy()[:] = [span.row for span in spans]
        return True


class RecordedSteps:
    """Steps over one set of pools after another, recorded where they are first needed."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self._scratch = Scratch()
        self._by_pools: WeakKeyDictionary[TensorPools, dict[int, _Recorded]] = WeakKeyDictionary()

    def logits(self, batch: Batch) -> Tensor | None:
        """One row per span, [R, vocab] float32; None where this is no step to be recorded."""
        num = len(batch.spans)
        if batch.exact or num > _MOST_SEQUENCES or not all(map(_is_step, batch.spans)):
            return None
        recorded = self._by_pools.setdefault(batch.pools, {})
        known, num_runs = recorded.get(num), _NUM_RUNS
        if known is not None:
            if known.step.fill(batch.spans):
                return known.recording.play().clone()
            num_runs = 2 * known.num_runs
        step = Step(batch.pools, num, num_runs, self._scratch)
        while not step.fill(batch.spans):
            num_runs *= 2
            step = Step(batch.pools, num, num_runs, self._scratch)
        recording = _record(self._model, step, self._scratch)
        recorded[num] = _Recorded(step, recording, num_runs)
        return recording.output.clone()


@dataclass(frozen=True, slots=True)
class _Recorded:
    step: Step
    recording: Recording
    num_runs: int


def is_recordable(model: NativeModel, kv: KVLayout, state: StateLayout) -> bool:
    """Whether all that a step of the model computes is done by the compiled kernels.

    Tried in memory of its own, with one sequence and with two: by the time that something turns out
    to be none of them, states have been moved on.
    """
    if not rows.IS_COMPILED:
        return False
    sizes = PoolSizes.of(kv, state, num_pages=2, page_size=1, num_rows=2, num_staging=0)
    pools, scratch = TensorPools(kv, state, sizes), Scratch()
    try:
        # what layers make at their first pass and keep is not to be made in a recording
        model.logits(cast("Pass", Step(pools, 1, 1, scratch)))
        for num in (1, 2):
            step = Step(pools, num, 1, scratch)
            _record(model, step, scratch)
    except Unrecordable:
        return False
    return True


def _record(model: NativeModel, step: Step, scratch: Scratch) -> Recording:
    return record(lambda: model.logits(cast("Pass", step)), scratch)


def _is_step(span: Span) -> bool:
    return len(span.ids) == 1 and len(span.logits_at) == 1
