"""Steps as they are computed and captured on another device than a CPU.

Here by PyTorch's operations on a CPU, captured by a recorder that does what a CUDA graph does: it
launches the same operations on the same memory again. That nothing waits for the device is tried on
the device that has no memory. What needs a GPU is in `test_on_a_gpu.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from testkit.sequences import World
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentcache.engine.backend import Batch, Span
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.native import steps as steps_module
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE
from agentcache.engine.native.linear import LinearStack
from agentcache.engine.native.moe import Experts
from agentcache.engine.native.packing import Pass
from agentcache.engine.native.steps import RecordedSteps, Room, Step, is_recordable, spare_pools
from agentcache.errors import UnsupportedOption
from agentcache.kernels import rows
from agentcache.kernels.recording import Unrecordable
from agentcache.pools.table import PageTable
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

COVERED = [name for name, each in VARIANTS.items() if each.text_model_type in NATIVE]


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on a CPU are computed with as those on a GPU are."""
    monkeypatch.setattr(rows, "IS_COMPILED", False)
    monkeypatch.setattr(rows, "steps_apart", lambda _: True)


class Launches(TorchDispatchMode):
    """Notes down all operations with the memory they work on. output: set in the end."""

    output: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._all: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise Unrecordable("it waits for the device")
        made = func(*args, **(kwargs or {}))
        given = {_memory(each) for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        # some count as views and copy where they have to
        if func._schema.is_mutable or not all(_memory(each) in given for each in tree_leaves(made)):
            self._all.append((func, args, kwargs or {}, made))
        return made

    def play(self) -> Tensor:
        for func, args, kwargs, made in self._all:
            again = func(*args, **kwargs)
            if not func._schema.is_mutable:
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    old.copy_(new)
        return self.output


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class LaunchRecorder:
    """Stands in for `CudaGraphRecorder`."""

    bounds_keys = True

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, compute: Callable[[], Tensor]) -> Launches:
        self.recorded += 1
        with Launches() as launches:
            launches.output = compute()
        return launches

    def next_block(self) -> None:
        """Memory of its own for everything."""


# ---- what is computed ----


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", COVERED)
def test_captured_steps_are_those_of_a_pass(name: str, dtype: torch.dtype) -> None:
    backend = NativeBackend(build(name, dtype=dtype))
    recorder = LaunchRecorder()
    captured, passed = World(backend), World(backend)
    backend._steps = RecordedSteps(backend._model, recorder)
    with torch.inference_mode():
        for chosen in ([0], [3, 1], [3, 1], [0], [4, 0, 2, 3, 1], [1, 3], [4, 0, 2, 3, 1]) * 3:
            got, expected = captured.step(chosen), passed.passed(chosen)
            tolerance = 1e-4 if dtype == torch.float32 else 0.15
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    assert recorder.recorded == 3


@pytest.mark.parametrize("name", COVERED)
def test_steps_apart_are_those_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and memory, with spans of one and of several tokens in one pass."""
    plain = World(NativeBackend(build(name)))
    expected = [plain.passed(chosen) for chosen in ([0, 2], [1], [3, 4, 0])]
    monkeypatch.setattr(rows, "IS_COMPILED", False)
    monkeypatch.setattr(rows, "steps_apart", lambda _: True)
    apart = World(NativeBackend(build(name)))
    for chosen, logits in zip(([0, 2], [1], [3, 4, 0]), expected, strict=True):
        torch.testing.assert_close(apart.passed(chosen), logits, rtol=1e-4, atol=1e-4)
    for one, other in zip(apart.pools.state.values(), plain.pools.state.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.usefixtures("as_on_a_device")
def test_more_keys_than_there_is_room_for_are_captured_anew() -> None:
    backend = NativeBackend(build("llama"))
    recorder = LaunchRecorder()
    pools = spare_pools(backend.kv_layout, backend.state_layout, 600, torch.device("cpu"))
    table = PageTable(1, np.arange(600, dtype=np.int32))
    steps = RecordedSteps(backend._model, recorder)
    with torch.inference_mode():
        for start in range(300):
            ids = np.array([start % 7], dtype=np.int32)
            batch = Batch((Span(ids, start, table, 0, (0,), windows={"full": table}),), pools)
            got = steps.logits(batch)
            if start in (0, 100, 255, 256, 299):
                expected = backend._model.logits(Pass(batch, backend.device))
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert recorder.recorded == 2


@pytest.mark.parametrize("gated", [True, False])
def test_grouped_experts_are_the_experts(gated: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    up = torch.randn(6, 64 if gated else 32, 16, generator=rng)
    down = torch.randn(6, 16, 32, generator=rng)
    chosen = torch.stack([torch.randperm(5, generator=rng)[:3] for _ in range(40)])
    weights = torch.rand(40, 3, generator=rng)
    maps = {"up": LinearStack(up), "down": LinearStack(down)}
    experts = Experts(route=lambda _: (chosen, weights), act=torch.relu, gated=gated, **maps)
    x = torch.randn(40, 16, generator=rng)
    expected = experts._by_expert(x, chosen, weights)
    found = experts._grouped(x, chosen, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_device_has_what_was_sent_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over memory of a CPU that stands for the device's: until then it has what it had."""
    monkeypatch.setattr(torch, "zeros_like", lambda host, device: host.clone())
    numbers = steps_module._Numbers({"ids": (2,), "runs": (1, 2)}, torch.device("meta"))
    numbers.host["ids"][:] = [5, 6]
    numbers.host["runs"][:] = [[7, 8]]
    assert numbers.given["ids"].tolist() == [0, 0]
    numbers.send()
    assert numbers.given["ids"].tolist() == [5, 6]
    assert numbers.given["runs"].tolist() == [[7, 8]]


# ---- that nothing waits ----


def _on_meta(name: str) -> NativeBackend:
    """On the device that has no memory: whatever reads a number there fails."""
    backend = NativeBackend(build(name, dtype=torch.bfloat16))
    model = build(name, dtype=torch.bfloat16).to("meta")
    on_meta = NativeBackend.__new__(NativeBackend)
    for key, value in vars(backend).items():
        setattr(on_meta, key, value)
    on_meta.device, on_meta._steps = torch.device("meta"), None
    with torch.no_grad(), on_meta.device:
        on_meta._model = _assembled(model)
    return on_meta


def _assembled(model: Any) -> Any:
    from agentcache.engine.describe import text_config
    from agentcache.engine.native.weights import Weights

    config = text_config(model.config)
    return NATIVE[config.model_type](config, Weights.of(model))


@pytest.mark.parametrize("name", COVERED)
def test_nothing_in_a_step_waits_for_the_device(name: str) -> None:
    backend = _on_meta(name)
    pools = spare_pools(backend.kv_layout, backend.state_layout, 2, backend.device)
    with torch.inference_mode():
        logits = Step(pools, 2, Room(4, 32)).compute(backend._model.logits)
    assert (logits.device.type, len(logits)) == ("meta", 2)


@pytest.mark.parametrize("name", COVERED)
def test_nothing_in_a_pass_waits_for_the_device(name: str) -> None:
    """Of steps, and of more tokens than count as few."""
    backend = _on_meta(name)
    pools = spare_pools(backend.kv_layout, backend.state_layout, 100, backend.device)
    spans = []
    for row, (start, num) in enumerate([(3, 1), (0, 50), (20, 1)]):
        table = PageTable(1, np.arange(100, dtype=np.int32))
        tables = {kind: PageTable(1, table.pages) for kind in pools.page_lens}
        ids = np.zeros(num, dtype=np.int32)
        full = tables.get(Kind.FULL.value, table)
        spans.append(Span(ids, start, full, row, (num - 1,), windows=tables))
    with torch.inference_mode():
        found = backend.forward(Batch(tuple(spans), pools))
    assert [each.device.type for each in found] == ["meta"] * 3


# ---- what is refused ----


def test_a_step_that_waits_is_not_recordable() -> None:
    backend = NativeBackend(build("llama"))
    waits = type("Waits", (), {"logits": lambda _, tokens: torch.ones(int(tokens.ids[0]) + 1)})()
    found = is_recordable(
        waits, backend.kv_layout, backend.state_layout, LaunchRecorder(), torch.device("cpu")
    )
    assert not found


def test_graphs_of_a_model_on_a_cpu_are_refused() -> None:
    with pytest.raises(UnsupportedOption, match="on a CUDA device, and this one is on cpu"):
        NativeBackend(build("llama"), cuda_graphs=True)
