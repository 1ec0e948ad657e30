"""Mixers put in place of stock ones that lose their state, beyond what the probe checks of all."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from agentcache.engine._probe_memory import Memory, Running
from agentcache.engine.describe import describe
from agentcache.engine.doctor import stock_reference
from agentcache.engine.families.tiny import build
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.types import IntArray, LayerKind

MENDED = ("jamba", "zamba", "falcon_mamba", "minimax", "recurrent_gemma")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    num = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num)


@cache
def backend(name: str) -> TransformersBackend:
    """A taken-over model; passes leave nothing on it, which is part of what is tested."""
    return TransformersBackend(build(name))


def tokens(num: int, seed: int = 0) -> IntArray:
    return np.random.default_rng(seed).integers(64, 192, num).astype(np.int32)


def memory(subject: TransformersBackend, num_running: int = 1, num_captures: int = 0) -> Memory:
    return Memory(
        subject,
        np.random.default_rng(0),
        room=80,
        num_running=num_running,
        num_captures=num_captures,
    )


def states(pools: Any, row: int) -> dict[tuple[int, str], torch.Tensor]:
    return {key: tensor[row].clone() for key, tensor in pools.state.items()}


def deviation(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, in units of the expected deviation."""
    return float((got - expected).square().mean().sqrt() / expected.std())


def greatest(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", MENDED)
def test_a_state_captured_inside_a_pass_is_that_of_a_pass_ending_there(name: str) -> None:
    """Also where a convolution still reaches back before the pass, and just before its end."""
    start, positions, ids = 23, (24, 25, 26, 47, 69), tokens(70)
    within = memory(backend(name), num_running=1 + len(positions), num_captures=len(positions))
    running = within.start()
    within.extend(running, ids[:start])
    _, checkpoints = within.extend(running, ids[start:], positions)
    for checkpoint in checkpoints:
        resumed = within.resume(checkpoint)
        ending = memory(backend(name))
        other = ending.start()
        ending.extend(other, ids[:start])
        ending.extend(other, ids[start : checkpoint.length])
        captured = states(within.pools, resumed.row)
        for key, expected in states(ending.pools, other.row).items():
            scale = float(expected.norm())
            assert scale > 0
            error = float((captured[key] - expected).norm()) / scale
            assert error < 1e-5, f"{key} after {checkpoint.length}: {error:.1e}"


@pytest.mark.parametrize("name", MENDED)
def test_a_row_that_was_zeroed_is_a_fresh_one(name: str) -> None:
    """Nothing of an earlier sequence stays behind, in the row or on the model."""
    within = memory(backend(name))
    first = within.start()
    fresh, _ = within.extend(first, tokens(30))
    expected = states(within.pools, first.row)
    within.step([first], [100])
    within.extend(first, tokens(40, seed=1))
    within.pools.clear_state(first.row)
    second = Running(first.tables, first.own, first.row, 0)
    logits, _ = within.extend(second, tokens(30))
    assert torch.equal(logits, fresh)
    for key, state in states(within.pools, second.row).items():
        assert torch.equal(state, expected[key]), key


@pytest.mark.parametrize("name", MENDED)
def test_other_models_of_the_process_stay_as_they_are(name: str) -> None:
    other, ids = build(name), torch.from_numpy(tokens(30))[None].long()
    with torch.inference_mode():
        before = other(input_ids=ids).logits
        taken = memory(TransformersBackend(build(name)))
        taken.extend(taken.start(), tokens(30))
        assert torch.equal(other(input_ids=ids).logits, before)


@pytest.mark.parametrize("name", MENDED)
def test_bfloat16_weights_keep_float32_states_and_lose_no_more_than_the_stock_code(
    name: str,
) -> None:
    model, exact = build(name, dtype=torch.bfloat16), build(name)
    exact.load_state_dict(model.state_dict())
    expected = stock_reference(exact)(tokens(60))
    stock = stock_reference(model)(tokens(60))
    within = memory(TransformersBackend(model))
    running = within.start()
    extended, _ = within.extend(running, tokens(60)[:40])
    steps = [within.step([running], [token]) for token in tokens(60)[40:].tolist()]
    logits = torch.cat([extended, *steps])
    assert deviation(logits, expected) < 1.1 * deviation(stock, expected)
    dtypes = {kind: tensor.dtype for (_, kind), tensor in within.pools.state.items()}
    assert dtypes.pop("recurrent") == torch.float32
    assert set(dtypes.values()) <= {torch.bfloat16}


def test_a_convolution_followed_by_another_activation() -> None:
    model = build("jamba", hidden_act="gelu")
    reference = stock_reference(model)
    within = memory(TransformersBackend(model))
    running = within.start()
    logits, _ = within.extend(running, tokens(30)[:-1])
    last = within.step([running], [int(tokens(30)[-1])])
    assert greatest(torch.cat([logits, last]), reference(tokens(30))) < 5e-5


def test_minimax_with_windows_keeps_and_sees_only_those() -> None:
    model = build("minimax", sliding_window=16)
    reference = stock_reference(model)
    subject = TransformersBackend(model)
    assert [spec.window for spec in subject.kv_layout.specs] == [16, 16]
    within = memory(subject)
    running = within.start()
    parts = [within.extend(running, tokens(70)[at : at + 14])[0] for at in range(0, 70, 14)]
    assert greatest(torch.cat(parts), reference(tokens(70))) < 5e-5


def test_the_cost_of_lightning_attention_is_that_of_a_scan_with_groups_of_one_head() -> None:
    linear = describe(build("minimax")).shape.state_layers[0]
    expected = LayerKind(
        "mamba2",
        num_heads=4,
        head_dim=16,
        state_dim=16,
        num_groups=4,
        conv_width=1,
        mlp_dim=192,
        router_dim=4,
    )
    assert linear == expected


def test_recurrent_gemma_keeps_windows_and_states_of_the_width_of_its_units() -> None:
    """Which is not the width of the model; the stock code reserves that."""
    model = build("recurrent_gemma", lru_width=96)
    reference = stock_reference(model)
    subject = TransformersBackend(model)
    assert [spec.layer_idx for spec in subject.kv_layout.specs] == [2, 5]
    assert [spec.window for spec in subject.kv_layout.specs] == [16, 16]
    shapes = {spec.name: spec.shape for spec in subject.state_layout.specs}
    assert shapes == {"conv": (96, 3), "recurrent": (96,)}
    within = memory(subject)
    running = within.start()
    parts = [within.extend(running, tokens(66)[at : at + 22])[0] for at in range(0, 66, 22)]
    assert greatest(torch.cat(parts), reference(tokens(66))) < 5e-5


def test_recurrent_gemma_is_rid_of_what_earlier_passes_left_on_its_modules() -> None:
    """A stock pass over three sequences leaves states of three; one sequence is run then."""
    model = build("recurrent_gemma")
    ids = torch.from_numpy(np.stack([tokens(20, seed) for seed in range(3)])).long()
    with torch.inference_mode():
        model(input_ids=ids, use_cache=True)
    units = [each for each in model.modules() if hasattr(each, "recurrent_states")]
    blocks = [each for each in model.modules() if hasattr(each, "conv1d_state")]
    assert all(unit.recurrent_states is not None for unit in units)
    within = memory(TransformersBackend(model))
    running = within.start()
    logits, _ = within.extend(running, tokens(30))
    within.step([running], [100])
    fresh = memory(backend("recurrent_gemma"))
    expected, _ = fresh.extend(fresh.start(), tokens(30))
    assert torch.equal(logits, expected)
    assert units
    assert all(unit.recurrent_states is None for unit in units)
    assert all(block.conv1d_state is None for block in blocks)
