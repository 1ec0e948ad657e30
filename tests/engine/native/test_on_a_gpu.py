"""The native backend on a GPU: answers from the cache, and graphs, are what a cold run says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from testkit.sequences import World

from agentcache import CacheConfig, Runtime, UnsupportedOption
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.loader import load_model
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
COVERED = [name for name, each in VARIANTS.items() if each.text_model_type in NATIVE]


@pytest.fixture(autouse=True)
def whole_floats() -> Iterator[None]:
    """float32 products in float32, or nothing could be compared."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", COVERED)
def test_steps_and_passes_are_those_of_a_cpu(name: str) -> None:
    worlds = [
        World(NativeBackend(build(name))),
        World(NativeBackend(build(name).to("cuda"))),
        World(NativeBackend(build(name).to("cuda"), cuda_graphs=True)),
    ]
    for chosen in ([0], [3, 1], [3, 1], [0], [4, 0, 2, 3, 1], [1, 3], [4, 0, 2, 3, 1]) * 2:
        on_cpu, *others = (world.step(chosen) for world in worlds)
        for logits in others:
            torch.testing.assert_close(logits.cpu(), on_cpu, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", COVERED)
def test_bfloat16_graphs_are_those_of_passes(name: str) -> None:
    backend = NativeBackend(build(name, dtype=torch.bfloat16).to("cuda"), cuda_graphs=True)
    captured, passed = World(backend), World(backend)
    for chosen in ([0], [3, 1], [0], [4, 0, 2, 3, 1], [1, 3], [4, 0, 2, 3, 1]) * 2:
        got, expected = captured.step(chosen), passed.passed(chosen)
        torch.testing.assert_close(got, expected, rtol=0.15, atol=0.15)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_a_session_on_a_gpu(cuda_graphs: bool) -> None:
    """Turns, a fork, an edit and a return, each verified against a cold run."""
    cache = CacheConfig(budget="64MiB", policy="session-lru")
    with Runtime.load(
        "tiny-agent", device="cuda", cuda_graphs=cuda_graphs, cache=cache, verify=True
    ) as rt:
        assert rt.engine.backend.device.type == "cuda"
        with rt.session("a") as session:
            messages = [{"role": "user", "content": "What is 2 and 2?"}]
            for turn in range(3):
                reply = session.chat(messages, max_new_tokens=24)
                messages += [reply.message, {"role": "user", "content": f"And {turn}?"}]
            fork = session.fork("b")
            fork.chat([*messages[:3], {"role": "user", "content": "No."}], max_new_tokens=24)
            session.chat(messages, max_new_tokens=24)
        assert rt.stats()["verify"]["failed"] == 0


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="on a CPU"):
        Runtime.load("tiny-hybrid", device="cuda", weight_format="int8")
    loaded = load_model("tiny-hybrid")
    loaded.model.to("cuda")
    with pytest.raises(UnsupportedOption, match="goes by transformers"):
        Runtime(loaded.model, loaded.tokenizer, backend="transformers", cuda_graphs=True)
