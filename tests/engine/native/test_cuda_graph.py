"""In which order graphs are recorded and launched, over a stand-in for the device's library.

What they compute is tried in `test_on_a_gpu.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agentcache.kernels.cuda_graph import CudaGraphRecorder
from agentcache.kernels.recording import Unrecordable

if TYPE_CHECKING:
    from collections.abc import Iterator


class Library:
    """Notes down what is asked of torch.cuda. fails: a capture does."""

    fails = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.memories: list[object] = []

    def stream(self, name: str) -> Any:
        library = self

        class Stream:
            device = torch.device("cpu")

            def wait_stream(self, other: Any) -> None:
                library.calls.append(f"{name} waits for {other.name}")

        made = Stream()
        made.name = name  # type: ignore[attr-defined]
        return made

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append(f"off {stream.name}")

    @contextmanager
    def capture(
        self, graph: Any, *, pool: object, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        self.calls.append(f"capture on {stream.name}")
        self.memories.append(pool)
        yield
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.calls.append("captured")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()

    class Graph:
        def replay(self) -> None:
            found.calls.append("replay")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: found.stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: found.stream("here"))
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(torch.cuda, "graph", found.capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return found


def test_a_step_is_computed_once_and_then_captured(library: Library) -> None:
    """The capture computes nothing, so what comes out is what was computed before it."""
    outputs = [torch.tensor([1.0]), torch.tensor([7.0]), torch.tensor([2.0]), torch.tensor([8.0])]
    made = iter(outputs)

    def compute() -> torch.Tensor:
        library.calls.append("compute")
        return next(made)

    recorder = CudaGraphRecorder(torch.device("cpu"))
    first = recorder.record(compute)
    assert library.calls == [
        "side waits for here",
        "on side",
        "compute",
        "off side",
        "here waits for side",
        "capture on side",
        "compute",
        "captured",
    ]
    assert first.output is outputs[1]  # what launching fills
    assert first.output.item() == 1.0  # and what the step has found
    second = recorder.record(compute)
    assert (second.output.item(), first.output.item()) == (2.0, 1.0)
    assert library.memories[0] is library.memories[1]  # all share one
    assert first.play() is first.output
    assert library.calls[-1] == "replay"
    assert recorder.bounds_keys


def test_what_cannot_be_captured_is_said(library: Library) -> None:
    library.fails = True
    with pytest.raises(Unrecordable, match="not permitted when stream is capturing"):
        CudaGraphRecorder(torch.device("cpu")).record(lambda: torch.zeros(1))
