"""The native backend: a model's weights in layers of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.describe import describe, text_config
from agentcache.engine.machine import drop_file_pages
from agentcache.engine.native.families import NATIVE
from agentcache.engine.native.large_pages import move_weights
from agentcache.engine.native.packing import Pass
from agentcache.engine.native.steps import RecordedSteps, is_recordable
from agentcache.engine.native.weights import Weights
from agentcache.errors import UnsupportedModel, UnsupportedOption
from agentcache.kernels import rows
from agentcache.kernels.cuda_graph import CudaGraphRecorder
from agentcache.kernels.recording import KernelRecorder

if TYPE_CHECKING:
    from agentcache.engine.backend import Batch

__all__ = ["NativeBackend", "has_native"]


def has_native(model_type: str) -> bool:
    """Whether there is a description of a family."""
    return model_type in NATIVE


class NativeBackend:
    """Takes a causal LM over, loaded or mapped: from here on its weights are ours.

    Spans of any length share a pass. cuda_graphs: decode steps are captured, once for each number
    of sequences and power of two of keys. rounding_error: what rounding its weights has moved
    logits by, in units of their deviation, root mean square.

    Raises UnsupportedModel where its family has no description here or the model is not proven,
    ModelError where description and weights do not fit, and UnsupportedOption where there is
    nothing to capture graphs with.
    """

    max_extend_batch = 64

    def __init__(self, model: Any, *, cuda_graphs: bool = False) -> None:
        config = text_config(model.config)
        self.model_type: str = config.model_type
        if self.model_type not in NATIVE:
            raise UnsupportedModel(
                f"there is no native backend for {self.model_type!r}; take backend='transformers', "
                f"or a model of {', '.join(sorted(NATIVE))}"
            )
        description = describe(model)
        self.doubt: str | None = None
        self.rounding_error = 0.0
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.shape = description.shape
        self.kv_layout = description.kv
        self.state_layout = description.state
        weights = Weights.of(model)
        self._loaded_at = tuple(tensor.data_ptr() for tensor in weights.tensors.values())
        with torch.no_grad(), self.device:  # what is made on the way lies beside the weights
            self._model = NATIVE[self.model_type](config, weights)
        weights.check_all_used()
        self._steps = self._graphs() if cuda_graphs else self._recorded_steps()

    def round_weights(self) -> int:
        """Keep the weights of linear maps, experts, embedding and head as int8; returns how many.

        Raises UnsupportedOption where the model is not on a CPU. Routers of experts, convolutions
        and norms stay as they are.
        """
        if self.device.type != "cpu":
            raise UnsupportedOption("weight_format='int8' is for models on a CPU")
        num = 0
        for part in self._model.roundable():
            num += part.weight.numel()
            part.round_to_int8()
        self._steps = self._recorded_steps()  # what was recorded reads the weights as they were
        return num

    def move_weights(self) -> int:
        """Put weights on a CPU into memory of large pages, where that is to be had; returns how
        many bytes. What was read of their files is let go of."""
        moved = move_weights(self._model.roundable())
        if moved:
            drop_file_pages(self._loaded_at)
            self._steps = self._recorded_steps()  # these know addresses
        return moved

    @torch.inference_mode()
    def forward(self, batch: Batch) -> list[torch.Tensor]:
        logits = None if self._steps is None else self._steps.logits(batch)
        if logits is None:
            tokens = Pass(batch, self.device)
            out = tokens.by_span(self._model.logits(tokens))
        else:
            out = list(logits.split(1))
        for span in batch.spans:
            for capture in span.captures:
                if capture.length == span.stop:
                    batch.pools.copy_row(span.row, capture.row)
        return out

    @torch.inference_mode()
    def _recorded_steps(self) -> RecordedSteps | None:
        """Where every operation of a step is a kernel that can be recorded."""
        if self.device.type != "cpu" or not rows.IS_COMPILED:
            return None
        layouts = self.kv_layout, self.state_layout
        if not is_recordable(self._model, *layouts, KernelRecorder(), self.device):
            return None
        return RecordedSteps(self._model, KernelRecorder())

    @torch.inference_mode()
    def _graphs(self) -> RecordedSteps:
        if self.device.type != "cuda":
            raise UnsupportedOption(
                f"cuda_graphs is for models on a CUDA device, and this one is on {self.device}"
            )
        recorder = CudaGraphRecorder(self.device)
        if not is_recordable(self._model, self.kv_layout, self.state_layout, recorder, self.device):
            raise UnsupportedOption(
                f"a decode step of this {self.model_type} model cannot be captured as a graph; "
                "leave cuda_graphs out"
            )
        return RecordedSteps(self._model, recorder)
