"""What is played is what would be done, on what lies in the same memory by then."""

from __future__ import annotations

import gc
import os
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from testkit.rows import DTYPES, drawn, generator, needs_compiled
from torch import Tensor

from agentcache.kernels import row_gates, rows
from agentcache.kernels.mamba2_step import mamba2_step
from agentcache.kernels.recording import Recording, Scratch, Unrecordable, record
from agentcache.kernels.row_attention import KeyRuns, attend
from agentcache.kernels.row_moves import (
    add,
    as_type,
    gather,
    gather_rounded,
    rotate,
    scale,
    scatter,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_compiled
WIDTH, HEADS, DIM, STATE, SLOTS = 192, 4, 16, 16, 800
INNER, CHANNELS = HEADS * DIM, HEADS * DIM + 2 * STATE
NUM_KERNELS = {torch.float32: 17, torch.bfloat16: 20}
"""In `Everything`."""


def silu_mul(both: Tensor) -> Tensor:
    """As a gated MLP has it."""
    gate, up = both.chunk(2, -1)
    return row_gates.opened(gate, F.silu, up)


class Everything:
    """A computation that has every kernel in it, with its weights, states and inputs.

    Large enough that threads share some of it, with sequences that are gone through in parts.
    """

    def __init__(self, num: int = 5, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.table, self.norm = drawn(50, WIDTH, dtype=dtype), drawn(WIDTH, seed=1).abs()
        self.project = drawn(INNER + CHANNELS + HEADS, WIDTH, seed=2, dtype=dtype) / WIDTH**0.5
        self.taps, self.bias = drawn(CHANNELS, 4, seed=3), drawn(CHANNELS, seed=4)
        self.dt_bias, self.D, self.A = drawn(3, HEADS, seed=5).abs()
        self.A = -self.A
        self.qkv = drawn(3 * INNER, INNER, seed=6, dtype=dtype) / 8
        self.frequencies = drawn(DIM // 2, seed=7).abs()
        self.rounded = (20 * drawn(50, WIDTH, seed=9)).to(torch.int8)
        self.up = (20 * drawn(2 * WIDTH, INNER, seed=8)).to(torch.int8)
        self.factor = torch.full((2 * WIDTH,), 1e-2)
        self.ids, self.rows, self.slots = (torch.zeros(num, dtype=torch.int64) for _ in range(3))
        self.runs = KeyRuns(
            torch.ones(3 * num, 2, dtype=torch.int64), torch.arange(num + 1), most=1
        )
        self.conv = torch.empty(num + 2, CHANNELS, 3, dtype=dtype)
        self.state = torch.empty(num + 2, HEADS, DIM, STATE)
        self.keys = torch.empty(SLOTS, HEADS, DIM, dtype=dtype)
        self.values = torch.empty(SLOTS, HEADS, DIM, dtype=dtype)
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Other contents in the same memory."""
        rng, num = generator(seed), len(self.ids)
        self.ids.copy_(torch.randint(50, (num,), generator=rng))
        self.rows.copy_(torch.randperm(num + 2, generator=rng)[:num])
        self.slots.copy_(torch.randperm(SLOTS, generator=rng)[:num])
        self.runs.firsts[1:] = torch.randint(1, 4, (num,), generator=rng).cumsum(0)
        self.runs.pairs[:, 0] = torch.randint(10, (3 * num,), generator=rng)
        self.runs.pairs[:, 1] = torch.randint(1, SLOTS - 10, (3 * num,), generator=rng)
        for state in self.states():
            state.copy_(torch.randn(state.shape, generator=rng))

    def states(self) -> tuple[Tensor, ...]:
        return self.conv, self.state, self.keys, self.values

    def __call__(self) -> Tensor:
        x = scale(gather(self.table, self.ids), 1.5)
        x = add(x, gather_rounded(self.rounded, self.factor, self.ids, self.dtype))
        projected = rows.linear(rows.rms_norm(x, self.norm, 1e-5), self.project)
        y = mamba2_step(
            projected,
            self.conv,
            self.state,
            self.rows,
            taps=self.taps,
            bias=self.bias,
            dt_bias=self.dt_bias,
            dt_limits=(0.0, float("inf")),
            A=self.A,
            D=self.D,
            num_groups=1,
        )
        y = as_type(row_gates.gate(y, projected[:, :INNER]), self.dtype)
        q, k, v = (
            each.unflatten(-1, (HEADS, DIM)) for each in rows.linear(y, self.qkv).split(INNER, -1)
        )
        scatter(self.keys, self.slots, rotate(k, self.ids, self.frequencies))
        scatter(self.values, self.slots, v)
        q = rotate(q, self.ids, self.frequencies, in_turns=True)
        y = attend(q, self.keys, self.values, self.runs, scale=0.25).flatten(1)
        both = rows.linear(y, self.up, weight_scale=self.factor)
        return add(x, silu_mul(both), 0.5).view(-1, 1, WIDTH)

    def done(self, seed: int) -> list[Tensor]:
        """What comes out with those contents, and the states then."""
        self.fill(seed)
        return [self().clone(), *(each.clone() for each in self.states())]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, got, expected))


def played(everything: Everything, play: Callable[[], Tensor], seed: int) -> list[Tensor]:
    everything.fill(seed)
    return [play().clone(), *(each.clone() for each in everything.states())]


def spoil(scratch: Scratch) -> None:
    """What was made on the way has to be made again."""
    for part in scratch._parts:
        for chunk in part.chunks:
            chunk.fill_(0xFF)


# ---- recordings ----


@pytest.mark.parametrize("threads", [1, 2, 3, 2 * (os.cpu_count() or 1) + 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num", [1, 5])
def test_played_is_what_is_done(num: int, dtype: torch.dtype, threads: int) -> None:
    """On other contents of the same memory, by as many threads as there are at the time."""
    everything, scratch = Everything(num, dtype), Scratch()
    expected = [everything.done(seed) for seed in range(4)]
    everything.fill(0)
    recording = record(everything, scratch)
    assert len(recording) == NUM_KERNELS[dtype]
    assert torch.equal(recording.output, expected[0][0])
    torch.set_num_threads(threads)
    for seed in (1, 2, 3, 0, 3):
        spoil(scratch)
        assert_same(played(everything, recording.play, seed), expected[seed])


def test_played_by_more_threads_than_processors_again_and_again() -> None:
    everything = Everything()
    expected = everything.done(1)
    recording = record(everything, Scratch())
    torch.set_num_threads(4 * (os.cpu_count() or 1))
    for _ in range(20):
        assert_same(played(everything, recording.play, 1), expected)


def test_recording_does_it_once_on_the_way() -> None:
    everything = Everything()
    expected = everything.done(2)
    everything.fill(2)
    output = record(everything, Scratch()).output
    assert_same([output, *everything.states()], expected)


def test_weights_count_as_they_are_when_it_is_played() -> None:
    everything = Everything()
    recording = record(everything, Scratch())
    everything.project.mul_(2)
    everything.norm.add_(1)
    assert_same(played(everything, recording.play, 3), everything.done(3))


def test_a_recording_outlives_what_made_it() -> None:
    everything, expected = Everything(), Everything().done(1)

    def recorded() -> Recording:
        scratch = Scratch()

        def compute() -> Tensor:
            y = everything()
            scratch.turn()  # the output lies elsewhere than what it is made of
            return scale(y, 2.0)

        return record(compute, scratch)

    recording = recorded()
    gc.collect()
    others = [torch.full((size,), torch.nan) for size in (10, 1000, 1 << 16, 1 << 18) * 20]
    output, *states = played(everything, recording.play, 1)
    assert_same([output / 2, *states], expected)
    assert all(bool(each.isnan().all()) for each in others)


def test_a_recording_of_nothing() -> None:
    x = drawn(3, 4)
    recording = record(lambda: x.view(4, 3), Scratch())
    torch.set_num_threads(2)
    assert len(recording) == 0
    assert torch.equal(recording.play(), x.view(4, 3))


@pytest.mark.parametrize("inference", [False, True])
def test_looking_at_a_tensor_in_another_way_is_no_operation(inference: bool) -> None:
    x, weight = drawn(2, 3, 20), drawn(5, 20, seed=1)

    def compute() -> Tensor:
        parts = x.contiguous().reshape(6, 20).float().split([1, 5])
        left, right = parts[1].flatten(1).unflatten(0, (5, 1)).squeeze(1).chunk(2, 1)
        joined = as_type(right.unsqueeze(1)[:, 0].expand(5, 10), torch.float32)
        return add(as_type(left, torch.float32), joined).new_empty(0, 20).view(0, 20)

    with torch.inference_mode(inference):
        assert len(record(compute, Scratch())) == 3
        assert rows.linear(compute(), weight).shape == (0, 5)


# ---- what cannot be recorded ----

OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: x + x,
    "product": lambda x: x @ x,
    "in place": lambda x: x.add_(1),
    "into a part": lambda x: x[0].copy_(x[1]),
    "by a number": lambda x: x.__setitem__(0, 1.0),
    "zeros": lambda x: torch.zeros(3),
    "zeros like it": torch.zeros_like,
    "numbers": lambda x: torch.tensor([1.0, 2.0]),
    "a range": lambda x: torch.arange(3),
    "joined": lambda x: torch.cat([x, x]),
    "by index": lambda x: x[torch.ones(1, dtype=torch.int64)],
    "a copy": lambda x: x.clone(),
    "made contiguous": lambda x: x.t().contiguous(),
    "in another shape": lambda x: x.t().reshape(-1),
    "made flat": lambda x: x.t().flatten(),
    "in another type": lambda x: x.to(torch.bfloat16),
    "in float64": lambda x: x.double(),
    "a number": lambda x: x.sum().item(),
    "one number": lambda x: float(x[0, 0]),
    "whether": lambda x: bool(x[0, 0]),
    "rows that lie in between": lambda x: rows.linear(x.t(), x),
    "a norm across": lambda x: rows.rms_norm(x.t(), x[0], 1e-5),
    "more rows than are moved": lambda x: scale(x.view(-1, 1), 2.0),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_pytorch_computes_cannot_be_recorded(name: str, inference: bool) -> None:
    """Under inference, operations that copy only where they have to come as a whole."""
    x = drawn(8, 8)

    def compute() -> Tensor:
        y = rows.linear(x, x)
        OPERATIONS[name](x)
        return y

    with torch.inference_mode(inference), pytest.raises(Unrecordable, match="none of the kernels"):
        record(compute, Scratch())


@pytest.mark.parametrize("error", [Unrecordable, ValueError])
def test_nothing_is_noted_after_a_recording_that_failed(error: type[Exception]) -> None:
    everything, scratch = Everything(), Scratch()
    expected = everything.done(1)

    def fail() -> Tensor:
        everything()
        scratch.turn()
        everything()
        raise error

    with pytest.raises(error):
        record(fail, scratch)
    assert everything.table.sum().isfinite()  # PyTorch's operations are let through again
    scratch.begin()
    half = room(scratch, 1000)
    scratch.turn()
    assert are_apart([half, room(scratch, 1000)])
    everything()
    recording = record(everything, scratch)
    assert len(recording) == NUM_KERNELS[torch.float32]
    assert_same(played(everything, recording.play, 1), expected)


def test_what_is_done_after_it_is_not_in_a_recording() -> None:
    everything = Everything()
    recording = record(everything, Scratch())
    everything()
    record(lambda: silu_mul(everything.table), Scratch())
    assert len(recording) == NUM_KERNELS[torch.float32]


# ---- threads ----


def test_what_another_thread_does_is_not_noted() -> None:
    """Not its kernels, and it may compute otherwise."""
    everything, x = Everything(), drawn(4, 8)
    found: list[Tensor] = []

    def elsewhere() -> None:
        found.append(silu_mul(x) + 1)

    def compute() -> Tensor:
        y = silu_mul(x)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return add(y, y)

    recording = record(compute, Scratch())
    assert len(recording) == 2
    assert torch.equal(found[0], silu_mul(x) + 1)
    x.mul_(2)
    before = found[0].clone()
    assert torch.equal(recording.play(), 2 * silu_mul(x))
    assert torch.equal(found[0], before)
    assert len(record(everything, Scratch())) == NUM_KERNELS[torch.float32]


def test_two_threads_record_and_play_at_the_same_time() -> None:
    worlds = [Everything(3), Everything(4)]
    expected = [each.done(5) for each in worlds]
    got: list[list[Tensor]] = [[], []]
    together = threading.Barrier(2)

    def work(at: int) -> None:
        scratch = Scratch()
        for _ in range(5):
            together.wait(timeout=30)
            recording = record(worlds[at], scratch)
            assert len(recording) == NUM_KERNELS[torch.float32]
            got[at] = played(worlds[at], recording.play, 5)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in range(2):
        assert got[at]
        assert_same(got[at], expected[at])


# ---- scratch ----


def room(scratch: Scratch, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return scratch.like(torch.empty(shape, dtype=dtype))


def span(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def are_apart(tensors: list[Tensor]) -> bool:
    spans = sorted((span(each) for each in tensors), key=lambda each: each.start)
    return all(a.stop <= b.start for a, b in pairwise(spans))


def test_pieces_have_the_form_asked_for_and_lie_apart() -> None:
    scratch = Scratch()
    given = [
        room(scratch, 3, 5),
        room(scratch, 7, dtype=torch.bfloat16),
        room(scratch, 1 << 17),
        room(scratch, 3, dtype=torch.int64),
        room(scratch, 1 << 15),
        room(scratch, 0, 4),
        room(scratch, 1, dtype=torch.int8),
    ]
    assert [each.shape for each in given[:2]] == [(3, 5), (7,)]
    assert given[1].dtype == torch.bfloat16
    assert given[5].shape == (0, 4)
    assert all(each.is_contiguous() for each in given)
    assert all(each.data_ptr() % 64 == 0 for each in given if each.numel())
    assert are_apart([each for each in given if each.numel()])
    assert scratch.num_bytes >= sum(each.nbytes for each in given)


def test_what_is_made_in_a_turn_lasts_to_the_end_of_the_next() -> None:
    scratch = Scratch()
    turns = []
    for _ in range(6):
        turns.append([room(scratch, 1000), room(scratch, 1 << 17)])
        scratch.turn()
    for now, after in pairwise(turns):
        assert are_apart([*now, *after])
    for now, later in zip(turns, turns[2:], strict=False):  # and is used again then
        assert [each.data_ptr() for each in now] == [each.data_ptr() for each in later]


def test_recordings_of_one_scratch_use_the_same_memory() -> None:
    worlds = [Everything(num) for num in (5, 2, 1)]
    expected = [each.done(1) for each in worlds]
    scratch = Scratch()
    recordings = [record(worlds[0], scratch)]
    num_bytes = scratch.num_bytes
    recordings += [record(each, scratch) for each in worlds[1:]]
    assert scratch.num_bytes == num_bytes
    for at in (0, 1, 2, 1, 0, 2):
        assert_same(played(worlds[at], recordings[at].play, 1), expected[at])


def test_a_recording_that_turns_gives_what_one_does_that_does_not() -> None:
    x, weights = drawn(3, 64), [drawn(64, 64, seed=at) / 8 for at in range(8)]
    scratch = Scratch()

    def compute(turn: Callable[[], None]) -> Tensor:
        y = x
        for weight in weights:
            y = add(y, rows.linear(rows.rms_norm(y, weights[0][0], 1e-5), weight))
            turn()
        return y

    recording = record(lambda: compute(scratch.turn), scratch)
    torch.set_num_threads(2)
    for factor in (1.0, -3.0):
        x.mul_(factor)
        assert torch.equal(recording.play(), compute(lambda: None))


def test_playing_and_recording_take_no_more_memory() -> None:
    everything, scratch = Everything(), Scratch()
    recording = record(everything, scratch)
    num_bytes, num_kernels = scratch.num_bytes, len(recording)
    for _ in range(100):
        recording.play()
    for _ in range(20):
        record(everything, scratch)
    assert scratch.num_bytes == num_bytes
    assert len(recording) == num_kernels
