"""Weights in 8 bits: every linear map, by how little, and never mixed with what is not rounded."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch

from agentcache.config import CacheConfig
from agentcache.engine.backends import make_backend
from agentcache.engine.families.tiny import build
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.linear import Linear
from agentcache.errors import UnsupportedOption
from agentcache.kernels import rows
from agentcache.runtime import Runtime


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, rows.MOST_ROWS, rows.MOST_ROWS + 1])
def test_rounded_weights_are_near_and_all_numbers_of_rows_agree(
    num_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 40, dtype=dtype), torch.randn(24, dtype=dtype)
    weight[3] = 0
    scale = torch.rand(24) + 0.5
    linear = Linear(weight, bias, scale=scale)
    linear.round_to_int8()
    assert linear.weight.dtype == torch.int8
    assert linear.weight_scale is not None
    kept = linear.weight.float() * linear.weight_scale[:, None]
    most = weight.float().abs().amax(1, keepdim=True) / 254
    assert ((kept - weight.float()).abs() <= most * (1 + 1e-5)).all()
    x = torch.randn(num_rows, 40, dtype=dtype)
    expected = ((x.double() @ kept.double().T + bias.double()) * scale.double()).to(dtype)
    torch.testing.assert_close(
        linear(x), expected, rtol=2e-2 if dtype.itemsize < 4 else 1e-4, atol=1e-4
    )


def reachable(root: object) -> set[int]:
    """Ids of all linear maps that can be reached from an object through data."""
    seen, todo, found = set(), [root], set()
    while todo:
        each = todo.pop()
        if (
            id(each) in seen
            or isinstance(each, (type, torch.Tensor))
            or (
                callable(each)
                and not (type(each).__module__.startswith("agentcache.engine.native"))
            )
        ):
            continue
        seen.add(id(each))
        if isinstance(each, Linear):
            found.add(id(each))
        todo.extend(gc.get_referents(each))
    return found


@pytest.mark.parametrize(
    "name", ["granitemoehybrid", "jamba", "qwen3_next", "kimi_linear", "falcon_h1", "lfm2"]
)
def test_every_linear_map_of_the_blocks_is_found(name: str) -> None:
    backend = NativeBackend(build(name))
    model = backend._model
    found = [id(each) for each in model.linears()]
    assert len(found) == len({*found})
    assert {*found} == reachable(model.blocks)
    assert backend.round_weights() > 0
    assert all(each.weight.dtype == torch.int8 for each in model.linears())
    assert model.head.weight.dtype == torch.float32


def test_how_much_logits_move_is_measured_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agentcache"):
        backend = make_backend(build("granitemoehybrid"), weight_format="int8")
    assert isinstance(backend, NativeBackend)
    assert 1e-4 < backend.rounding_error < 0.3
    (record,) = caplog.records
    assert "weights are kept in 8 bits" in record.getMessage()
    assert make_backend(build("granitemoehybrid")).rounding_error == 0.0  # type: ignore[union-attr]


def test_rounding_needs_the_native_backend_and_a_known_form() -> None:
    with pytest.raises(UnsupportedOption, match=r"needs the native backend.*mamba2"):
        make_backend(build("mamba2"), weight_format="int8")
    odd: Any = "int4"
    with pytest.raises(UnsupportedOption, match=r"'int4'; take one of unchanged, int8"):
        make_backend(build("llama"), weight_format=odd)
    with pytest.raises(UnsupportedOption, match="'int4'"):
        Runtime.load("no such model", weight_format="int4")


def test_a_rounded_model_is_another_one_and_warm_is_cold() -> None:
    cache = CacheConfig(budget="64MiB")
    prints = []
    for weight_format in ("unchanged", "int8"):
        with Runtime.load("tiny-hybrid", weight_format=weight_format, cache=cache) as runtime:
            prints.append(runtime.namespace(None).digest())
            session = runtime.session()
            for text in ("one", "two", "three"):
                turn = session.chat(
                    [{"role": "user", "content": text * 20}], max_new_tokens=6, verify=True
                )
                assert turn.verify is not None
                assert turn.verify.ok
            assert turn.usage.cached_tokens > 0
    assert prints[0] != prints[1]
