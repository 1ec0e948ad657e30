from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from agentcache.kernels.paged_attention import segment_attention, segment_attention_reference

HEAD_DIM = 16
SCALE = HEAD_DIM**-0.5
Run = tuple[Tensor, Tensor]

RUNS: dict[str, list[int]] = {
    "empty": [],
    "one token": [1],
    "one run": [500],
    "some of them empty": [0, 64, 0, 1],
    "awkward lengths": [63, 64, 65, 2, 1000],
    "many": [1 + n % 17 for n in range(100)],
}


def make_history(lengths: list[int], num_kv_heads: int, dtype: torch.dtype) -> list[Run]:
    """Runs as pages hold them: token-major, one of three layers, keys beside values."""
    rng = torch.Generator().manual_seed(1)
    runs = []
    for length in lengths:
        pages = torch.randn(length, 3, 2, num_kv_heads, HEAD_DIM, generator=rng).to(dtype)
        runs.append((pages[:, 1, 0], pages[:, 1, 1]))
    return runs


def make_new(
    num_new: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the projections give them: `[T, heads, D]` seen as `[heads, T, D]`."""
    rng = torch.Generator().manual_seed(2)
    shapes = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = (torch.randn(num_new, heads, HEAD_DIM, generator=rng).to(dtype) for heads in shapes)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("num_new", [1, 2, 65, 300])
@pytest.mark.parametrize("lengths", RUNS.values(), ids=list(RUNS))
def test_matches_one_softmax_over_everything(
    lengths: list[int], num_new: int, heads: tuple[int, int], dtype: torch.dtype, check_close: Any
) -> None:
    history = make_history(lengths, heads[1], dtype)
    new = make_new(num_new, *heads, dtype)
    expected = segment_attention_reference(new[0], history, *new[1:], SCALE)
    check_close(segment_attention(new[0], history, *new[1:], scale=SCALE), expected)


@pytest.mark.parametrize("num_new", [1, 40])
def test_partial_results_of_very_different_weight_merge(num_new: int, check_close: Any) -> None:
    history = make_history([30, 30, 30], 2, torch.float32)
    q, k, v = make_new(num_new, 4, 2)
    history[1][0].mul_(60.0)  # scores in the hundreds: exp would overflow
    history[2][0].mul_(0.01)
    expected = segment_attention_reference(q, history, k, v, 1.0)
    check_close(segment_attention(q, history, k, v, scale=1.0), expected)


@pytest.mark.parametrize("length", [2048, 4099])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_long_runs_are_shared_among_threads(
    length: int, num_kv_heads: int, check_close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    history = make_history([length, 5], num_kv_heads, torch.float32)
    q, k, v = make_new(1, 4, num_kv_heads)
    expected = segment_attention_reference(q, history, k, v, SCALE)
    check_close(segment_attention(q, history, k, v, scale=SCALE), expected, 5e-6)


def test_values_may_be_narrower_than_keys(check_close: Any) -> None:
    history = [(k, v[..., :8]) for k, v in make_history([100, 3], 2, torch.float32)]
    q, k, v = make_new(10, 4, 2)
    expected = segment_attention_reference(q, history, k, v[..., :8], SCALE)
    check_close(segment_attention(q, history, k, v[..., :8], scale=SCALE), expected)


@pytest.mark.parametrize("num_new", [1, 5])
def test_new_tokens_may_have_any_strides(num_new: int, check_close: Any) -> None:
    history = make_history([20], 2, torch.float32)
    q, k, v = (
        tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in make_new(num_new, 4, 2)
    )
    expected = segment_attention_reference(q, history, k, v, SCALE)
    check_close(segment_attention(q, history, k, v, scale=SCALE), expected)


def test_history_without_contiguous_features_is_refused() -> None:
    runs = torch.randn(2, HEAD_DIM, 20).transpose(1, 2).transpose(0, 1)
    q, k, v = make_new(1, 4, 2)
    with pytest.raises(ValueError, match="last dimension must be contiguous"):
        segment_attention(q, [(runs, runs)], k, v, scale=SCALE)


def test_result_does_not_share_memory_with_the_new_values() -> None:
    q, k, v = make_new(1, 2, 2)
    before = v.clone()
    segment_attention(q, [], k, v, scale=SCALE).zero_()
    assert torch.equal(v, before)


def allocated_bytes(num_new: int, lengths: list[int]) -> int:
    """Bytes allocated by one call, freed again or not."""
    history = make_history(lengths, 1, torch.float32)
    q, k, v = make_new(num_new, 4, 1)
    segment_attention(q, history, k, v, scale=SCALE)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        segment_attention(q, history, k, v, scale=SCALE)
    results = prof.profiler.kineto_results  # public summaries hide what an op frees itself
    events = [event for event in results.events() if event.name() == "[memory]"]
    return sum(event.nbytes() for event in events if event.nbytes() > 0)


@pytest.mark.parametrize("num_new", [1, 32])
def test_memory_taken_does_not_grow_with_history(num_new: int) -> None:
    taken = {length: allocated_bytes(num_new, [length]) for length in (1024, 8192, 32768)}
    assert taken[1024] > 0
    # a long run may be shared among threads, which costs one more output of a few hundred bytes
    assert max(taken.values()) - min(taken.values()) < 1024, taken
