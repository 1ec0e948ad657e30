"""Weights in 8 bits: all there are, by how little, and never mixed with what is not rounded."""

from __future__ import annotations

import gc
import logging
import re
from typing import Any

import pytest
import torch

from agentcache.config import CacheConfig
from agentcache.engine.backends import make_backend
from agentcache.engine.describe import describe
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE
from agentcache.engine.native.linear import Linear, Roundable
from agentcache.engine.trial import try_out
from agentcache.errors import UnsupportedOption
from agentcache.kernels import rows
from agentcache.runtime import Runtime

COVERED = [name for name, each in VARIANTS.items() if each.text_model_type in NATIVE]


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
    """Ids of all that may be rounded and can be reached from an object through data."""
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
        if isinstance(each, Roundable):
            found.add(id(each))
        todo.extend(gc.get_referents(each))
    return found


_KEPT = re.compile(r"conv(1d)?\.weight$|A_log$|(router|\bgate)\.weight$|kv_b_proj")
"""Matrices that are no linear map, expert, embedding or head; kv_b_proj: of latent attention."""


@pytest.mark.parametrize("name", COVERED)
def test_every_linear_map_expert_and_embedding_is_rounded(name: str) -> None:
    model = build(name)
    num = sum(
        each.numel()
        for key, each in model.named_parameters()  # what is tied comes once
        if each.dim() > 1 and not _KEPT.search(key)
    )
    backend = NativeBackend(model)
    parts = list(backend._model.roundable())
    assert len(parts) == len({*map(id, parts)})
    assert {*map(id, parts)} == reachable(backend._model)
    assert backend.round_weights() == num
    assert all(each.weight.dtype == torch.int8 for each in parts)


@pytest.mark.parametrize("name", ["llama", "falcon_h1", "granitemoehybrid_moe"])
def test_what_is_tied_is_kept_and_counted_once(name: str) -> None:
    nums = []
    for is_tied in (False, True):
        backend = NativeBackend(build(name, tie_word_embeddings=is_tied))
        nums.append(backend.round_weights())
        model = backend._model
        assert (model.head is model.embedding) == is_tied
        assert model.embedding.weight.dtype == torch.int8
    assert nums[0] - nums[1] == 256 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_an_embedding_are_those_the_head_has(dtype: torch.dtype) -> None:
    """In the type of the weights as they came, of few tokens and of many to the last bit."""
    table = torch.randn((50, 24), generator=torch.Generator().manual_seed(0)).to(dtype)
    both = Linear(table, torch.ones(50, dtype=dtype), looked_up=True)
    index = torch.arange(50).repeat(2)
    assert torch.equal(both.rows_of(index), table[index])
    both.round_to_int8()
    assert both.weight_scale is not None
    kept = (both.weight.float() * both.weight_scale[:, None]).to(dtype)
    for num in (1, rows.MOST_ROWS, rows.MOST_ROWS + 1, 100):
        assert both.rows_of(index[:num]).dtype == dtype
        assert torch.equal(both.rows_of(index[:num]), kept[index[:num]])


@pytest.mark.parametrize("name", COVERED)
def test_a_damaged_scale_is_noticed(name: str) -> None:
    """Each of them, by the same few tokens that the rounding error is measured on."""
    model = build(name)
    backend = NativeBackend(model)
    backend.round_weights()
    sample = describe(model).sample
    assert sample is not None
    whole = try_out(backend, sample)
    assert 1e-4 < whole.typical < 0.3
    for part in backend._model.roundable():
        assert part.weight_scale is not None
        before = part.weight_scale.clone()
        # one factor for all outputs would change nothing before a norm
        part.weight_scale.mul_(torch.linspace(0.5, 1.5, before.shape[-1]))
        assert try_out(backend, sample) != whole
        part.weight_scale.copy_(before)
    assert try_out(backend, sample) == whole
    part.weight_scale[:] = torch.nan  # type: ignore[index]
    assert try_out(backend, sample).typical == torch.inf


def live_bytes() -> int:
    """Of all tensors there are."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(each.nbytes() for each in storages.values())


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["granitemoehybrid_moe", "qwen3_5_moe", "nemotron_h", "llama"])
def test_weights_as_they_were_are_gone_with_the_model(name: str, is_tied: bool) -> None:
    """A quarter of the bytes is left, and scales, and what is not rounded."""
    before = live_bytes()
    changes = {"mamba_n_heads": 32} if "granite" in name else {"moe_intermediate_size": 512}
    model = build(name, hidden_size=256, tie_word_embeddings=is_tied, **changes)
    backend = NativeBackend(model)
    num = backend.round_weights()
    scales = sum(
        part.weight_scale.numel()
        for part in backend._model.roundable()
        if part.weight_scale is not None
    )
    others = sum(each.numel() for each in {*model.parameters()}) - num
    del model
    assert live_bytes() - before < num + 4 * scales + 2 * 4 * others + 10_000


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
