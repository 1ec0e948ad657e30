"""Passes captured as CUDA graphs (`recording.py` has what they share with recordings on a CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agentcache.kernels.recording import Unrecordable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["CudaGraph", "CudaGraphRecorder"]


class CudaGraph:
    """What a function has launched, launched anew by `play`. output: what it computed."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self.output = output
        self._graph = graph

    def play(self) -> Tensor:
        """Do it all again, on what lies in the same memory by now; returns `output`."""
        self._graph.replay()
        return self.output


class CudaGraphRecorder:
    """Captures functions that read nothing back on the host.

    All graphs share one pool of memory for what they make on the way: no two may be played at the
    same time, and an output lasts until the next one is.
    """

    bounds_keys = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> CudaGraph:
        """Run `compute` once, then capture it, which computes nothing.

        Libraries make their workspaces the first time, outside of the graph. Raises Unrecordable
        where it waits for the device, or copies from memory of the host.
        """
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            first = compute()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph,
                pool=self._memory,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                output = compute()
        except RuntimeError as error:
            raise Unrecordable(f"it cannot be captured: {error}") from error
        output.copy_(first)
        return CudaGraph(graph, output)

    def next_block(self) -> None:
        """The allocator knows what is not needed any more."""
