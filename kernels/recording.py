"""A pass noted down and done again without Python: the same operations on the same memory, over
what lies there by then.

On a CPU as the kernels it calls, on a GPU as a CUDA graph (`cuda_graph.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentcache.kernels import rows

if rows.IS_COMPILED:
    from agentcache.kernels import _rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = [
    "KernelRecorder",
    "Playable",
    "Recorder",
    "Recording",
    "Scratch",
    "Unrecordable",
    "record",
]

_ALIGN = 64
_CHUNK_BYTES = 1 << 18


class Unrecordable(Exception):
    """Something was computed by another operation than the compiled kernels."""


class Playable(Protocol):
    """Something that was recorded. output: what the function returned then, and what `play` fills;
    until the next playing."""

    @property
    def output(self) -> Tensor: ...

    def play(self) -> Tensor:
        """Do it all again; returns `output`."""
        ...


class Recorder(Protocol):
    """A way to record. bounds_keys: whether the number of keys that attention goes through is part
    of what is recorded."""

    bounds_keys: bool

    def record(self, compute: Callable[[], Tensor]) -> Playable:
        """Run `compute` once, and note down what it does. Raises Unrecordable; by then part of it
        is done."""
        ...

    def next_block(self) -> None:
        """To be called by `compute` where what was made in the turn before the last is not needed
        any more."""
        ...


class Scratch:
    """Memory for what is made on the way, the same at every repetition.

    Two halves take turns, so what is made in one turn lasts to the end of the next. Recordings that
    are never played at the same time may share one.
    """

    def __init__(self) -> None:
        self._parts = [_Region(), _Region()]
        self._now = 0

    def begin(self) -> None:
        """All of it may be used anew, by a new recording."""
        for part in self._parts:
            part.clear()
        self._now = 0

    def turn(self) -> None:
        """From here on in the other half."""
        self._now = 1 - self._now
        self._parts[self._now].clear()

    def like(self, made: Tensor) -> Tensor:
        """Memory for a contiguous tensor of that shape and type."""
        flat = self._parts[self._now].take(made.numel() * made.itemsize)
        return flat.view(made.dtype).view(made.shape)

    @property
    def num_bytes(self) -> int:
        """How much memory it holds."""
        return sum(chunk.numel() for part in self._parts for chunk in part.chunks)


class _Region:
    """Pieces of memory, handed out from the first on."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        self._chunk, self._at = 0, 0

    def take(self, num_bytes: int) -> Tensor:
        while self._chunk < len(self.chunks):
            chunk = self.chunks[self._chunk]
            if self._at + num_bytes <= len(chunk):
                taken = chunk[self._at : self._at + num_bytes]
                self._at += -(-num_bytes // _ALIGN) * _ALIGN
                return taken
            self._chunk, self._at = self._chunk + 1, 0
        self.chunks.append(torch.empty(max(num_bytes, _CHUNK_BYTES), dtype=torch.uint8))
        return self.take(num_bytes)


class Recording:
    """What `record` has noted down. output: what the function returned then, and what `play` fills.

    Weights, states and inputs have to outlive it.
    """

    def __init__(self, tape: _rows.Tape, output: Tensor, scratch: Scratch) -> None:
        self.output = output
        self._tape = tape
        self._scratch = scratch  # the tape has its addresses

    def __len__(self) -> int:
        """Number of kernels."""
        return len(self._tape)

    def play(self) -> Tensor:
        """Do it all again, on what lies in the same memory by now; returns `output`."""
        self._tape.play(torch.get_num_threads())
        return self.output


class KernelRecorder:
    """Records compiled kernels, with one piece of memory for what all recordings make on the way:
    no two may be played at the same time."""

    bounds_keys = False

    def __init__(self) -> None:
        self._scratch = Scratch()

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """As `Recorder` says."""
        return record(compute, self._scratch)

    def next_block(self) -> None:
        """As `Recorder` says."""
        self._scratch.turn()


def record(compute: Callable[[], Tensor], scratch: Scratch) -> Recording:
    """Run `compute`, with what it makes on the way in `scratch`, and note down its kernels.

    Raises Unrecordable where anything is computed otherwise: by an operation of PyTorch that does
    more than make room or look at a tensor in another way. By then part of it is done.
    """
    tape = _rows.Tape()
    scratch.begin()
    tape.start()
    try:
        with _KernelsOnly(scratch):
            output = compute()
    finally:
        tape.stop()
    return Recording(tape, output, scratch)


_MAKE_ROOM = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
    }
)


class _KernelsOnly(TorchDispatchMode):
    """Lets through what computes nothing."""

    def __init__(self, scratch: Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scratch = scratch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MAKE_ROOM:
            return self._scratch.like(func(*args, **(kwargs or {})))
        if func.is_view and func is not _TAKE_IN:
            seen = func(*args, **(kwargs or {}))
            # `contiguous`, `to` and `reshape` count as views, and copy where they have to
            if all(_share_memory(each, args[0]) for each in _tensors(seen)):
                return seen
        raise Unrecordable(f"{func} is none of the kernels")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """To keep torch.compile out of here PyTorch would import it, and sympy: 60 MB, a second."""
        return False


_TAKE_IN = torch.ops.aten.lift_fresh.default
"""Of `torch.tensor`, whose numbers are gone after the recording."""


def _tensors(found: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return (found,) if isinstance(found, torch.Tensor) else found


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
