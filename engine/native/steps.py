"""Decode steps recorded once for each number of sequences, and played from then on.

A step of a small model is some hundred kernels of a few microseconds each; Python between them
would take as long as they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NoReturn, cast
from weakref import WeakKeyDictionary, ref

import torch

from agentcache.engine.native.packing import OfPositions
from agentcache.kernels.recording import Unrecordable
from agentcache.kernels.row_attention import KeyRuns
from agentcache.kernels.row_moves import scatter
from agentcache.pools.layout import PoolSizes
from agentcache.pools.tensors import TensorPools

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from agentcache.engine.backend import Batch, Span
    from agentcache.engine.native.model import NativeModel
    from agentcache.engine.native.packing import Pass
    from agentcache.kernels.recording import Playable, Recorder
    from agentcache.pools.layout import KVLayout, StateLayout

__all__ = ["RecordedSteps", "Room", "Step", "is_recordable", "spare_pools"]

_MOST_SEQUENCES = 16
"""With more, a step is bound by what the kernels do."""
_NUM_RUNS = 64
"""Runs of slots that a sequence's keys lie in, on average; if there are more, it is doubled."""
_FEWEST_KEYS = 256
"""Least room for keys where it is bounded; from there on in powers of two."""
_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Room:
    """What a step has room for. num_runs: runs that a sequence's keys lie in, on average. most:
    keys of a sequence."""

    num_runs: int
    most: int

    @classmethod
    def of(cls, spans: Sequence[Span], *, bounds_keys: bool) -> Room:
        """What is tried first for these. bounds_keys: as `Recorder` has it."""
        if not bounds_keys:
            return cls(_NUM_RUNS, _UNBOUNDED)
        longest = max(span.stop for span in spans)
        return cls(_NUM_RUNS, max(_FEWEST_KEYS, 1 << (longest - 1).bit_length()))

    def with_more_runs(self) -> Room:
        """Twice as many."""
        return Room(2 * self.num_runs, self.most)


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

    def __init__(self, pools: TensorPools, num: int, room: Room) -> None:
        self._pools = ref(pools)
        self._groups = pools.kv_layout.groups
        self.steps = num
        self.room = room
        self._next_block: Callable[[], None] = _nothing
        self._num_runs = num * room.num_runs
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("ids", "positions", "rows"), (num,))
        for group in self._groups:
            shapes[f"{group.kind} slots"] = (num,)
            shapes[f"{group.kind} firsts"] = (num + 1,)
            shapes[f"{group.kind} pairs"] = (self._num_runs, 2)
        self._numbers = numbers = _Numbers(shapes, pools.device)
        numbers.host["rows"][:] = range(num)
        for group in self._groups:
            numbers.host[f"{group.kind} slots"][:] = range(num)
            numbers.host[f"{group.kind} firsts"][:] = range(num + 1)
            numbers.host[f"{group.kind} pairs"][:num] = [(i, 1) for i in range(num)]
        numbers.send()
        self.ids, self.positions = numbers.given["ids"], numbers.given["positions"]
        self.step_rows = numbers.given["rows"]
        self._begin()

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
        self._next_block()

    def wanted(self) -> None:
        """All logits are."""

    def fill(self, spans: Sequence[Span]) -> bool:
        """Take these tokens in; False where there is not room enough for their keys."""
        if max(span.stop for span in spans) > self.room.most:
            return False
        host = self._numbers.host
        for group in self._groups:
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
            host[f"{group.kind} pairs"][: len(runs)] = runs
            host[f"{group.kind} firsts"][:] = firsts
            host[f"{group.kind} slots"][:] = slots
        host["ids"][:] = [span.ids[0] for span in spans]
        host["positions"][:] = [span.start for span in spans]
        host["rows"][:] = [span.row for span in spans]
        self._numbers.send()
        return True

    def compute(
        self, logits: Callable[[Pass], Tensor], next_block: Callable[[], None] | None = None
    ) -> Tensor:
        """The model's logits of it, [R, vocab]. next_block: called where a block begins."""
        self._next_block = next_block or _nothing
        self._begin()
        return logits(cast("Pass", self))

    def _begin(self) -> None:
        """What was made of the numbers before is to be made anew."""
        self.once = OfPositions(self.positions)
        given = self._numbers.given
        self._places = {
            group.kind: StepPlaces(
                given[f"{group.kind} slots"],
                KeyRuns(
                    given[f"{group.kind} pairs"],
                    given[f"{group.kind} firsts"],
                    min(self.room.most, group.window or _UNBOUNDED),
                ),
            )
            for group in self._groups
        }


class _Numbers:
    """Named whole numbers in one piece of memory. host: to be written; given: what was sent last,
    on the device, int64."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        sizes = [prod(shape) for shape in shapes.values()]
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=is_cuda)
        on_host = device.type == "cpu"
        self._given = self._host if on_host else torch.zeros_like(self._host, device=device)
        self.host: dict[str, NDArray[np.int64]] = {}
        self.given: dict[str, Tensor] = {}
        parts = zip(self._host.split(sizes), self._given.split(sizes), strict=True)
        for (name, shape), (host, given) in zip(shapes.items(), parts, strict=True):
            self.host[name] = host.view(shape).numpy()
            self.given[name] = given.view(shape)

    def send(self) -> None:
        """Let the device have what was written. The next writing has to wait until it has it, as
        whoever reads a step's logits does."""
        if self._given is not self._host:
            self._given.copy_(self._host, non_blocking=True)


class RecordedSteps:
    """Steps over one set of pools after another, recorded where they are first needed."""

    def __init__(self, model: NativeModel, recorder: Recorder) -> None:
        self._model = model
        self._recorder = recorder
        self._by_pools: WeakKeyDictionary[TensorPools, dict[tuple[int, int], _Recorded]] = (
            WeakKeyDictionary()
        )

    def logits(self, batch: Batch) -> Tensor | None:
        """One row per span, [R, vocab] float32; None where this is no step to be recorded."""
        num = len(batch.spans)
        if batch.exact or num > _MOST_SEQUENCES or not all(map(_is_step, batch.spans)):
            return None
        room = Room.of(batch.spans, bounds_keys=self._recorder.bounds_keys)
        recorded = self._by_pools.setdefault(batch.pools, {})
        known = recorded.get((num, room.most))
        if known is not None:
            if known.step.fill(batch.spans):
                return known.played.play().clone()
            room = known.step.room.with_more_runs()
        step = Step(batch.pools, num, room)
        while not step.fill(batch.spans):
            room = room.with_more_runs()
            step = Step(batch.pools, num, room)
        played = _record(self._model, step, self._recorder)
        recorded[num, room.most] = _Recorded(step, played)
        return played.output.clone()


@dataclass(frozen=True, slots=True)
class _Recorded:
    step: Step
    played: Playable


def is_recordable(
    model: NativeModel, kv: KVLayout, state: StateLayout, recorder: Recorder, device: torch.device
) -> bool:
    """Whether all that a step of the model computes can be recorded.

    Tried in memory of its own, with one sequence and with two: by the time that something turns out
    not to be, states have been moved on.
    """
    pools = spare_pools(kv, state, 2, device)
    try:
        # what layers make at their first pass and keep is not to be made in a recording
        Step(pools, 1, Room(1, 1)).compute(model.logits)
        for num in (1, 2):
            _record(model, Step(pools, num, Room(1, 1)), recorder)
    except Unrecordable:
        return False
    return True


def spare_pools(kv: KVLayout, state: StateLayout, num: int, device: torch.device) -> TensorPools:
    """Memory for the first token of so many sequences."""
    sizes = PoolSizes.of(kv, state, num_pages=num, page_size=1, num_rows=num, num_staging=0)
    return TensorPools(kv, state, sizes, device=device)


def _record(model: NativeModel, step: Step, recorder: Recorder) -> Playable:
    return recorder.record(lambda: step.compute(model.logits, recorder.next_block))


def _is_step(span: Span) -> bool:
    return len(span.ids) == 1 and len(span.logits_at) == 1


def _nothing() -> None:
    """Where nothing is to be done."""
