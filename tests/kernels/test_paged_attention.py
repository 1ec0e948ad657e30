from __future__ import annotations

from functools import partial
from itertools import product
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

HEADS = [(4, 1), (6, 2), (2, 2)]

# Histories of 0 and of 20 tokens, in one run or several.
SHORT_RUNS: list[list[int]] = [[], [0, 0], [20], [3, 0, 1, 9, 7, 0]]


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


def make_sinks(
    kind: str, num_new: int, num_heads: int, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    shapes = {"per head": [num_heads], "per head and token": [num_heads, num_new]}
    if kind not in shapes:
        return None
    rng = torch.Generator().manual_seed(3)
    return (1 + torch.randn(shapes[kind], generator=rng)).to(dtype)


def make_bias(
    num_new: int, num_heads: int, past_len: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    rng = torch.Generator().manual_seed(4)
    return torch.randn(num_heads, num_new, past_len + num_new, generator=rng).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("num_new", [1, 2, 65, 300])
@pytest.mark.parametrize("lengths", RUNS.values(), ids=list(RUNS))
def test_matches_one_softmax_over_everything(
    lengths: list[int], num_new: int, heads: tuple[int, int], dtype: torch.dtype, check_close: Any
) -> None:
    history = make_history(lengths, heads[1], dtype)
    new = make_new(num_new, *heads, dtype)
    expected = segment_attention_reference(new[0], history, *new[1:], SCALE)
    check_close(segment_attention(new[0], history, *new[1:], scale=SCALE), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_new", [1, 3, 9])
@pytest.mark.parametrize("value_dim", [8, HEAD_DIM])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("sink_kind", ["no sinks", "per head", "per head and token"])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 50])
def test_window_sinks_and_bias_match_one_softmax(
    window: int | None,
    sink_kind: str,
    biased: bool,
    value_dim: int,
    num_new: int,
    dtype: torch.dtype,
    check_close: Any,
) -> None:
    for heads, lengths in product(HEADS, SHORT_RUNS):
        history = [(k, v[..., :value_dim]) for k, v in make_history(lengths, heads[1], dtype)]
        q, k, v = make_new(num_new, *heads, dtype)
        new = q, history, k, v[..., :value_dim]
        options: dict[str, Any] = {
            "window": window,
            "sinks": make_sinks(sink_kind, num_new, heads[0], dtype),
            "bias": make_bias(num_new, heads[0], sum(lengths), dtype) if biased else None,
        }
        expected = segment_attention_reference(*new, SCALE, **options)
        check_close(segment_attention(*new, scale=SCALE, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_dim", [8, HEAD_DIM])
@pytest.mark.parametrize("prefix_len", [0, 1, 40])
@pytest.mark.parametrize("num_new", [1, 9])
def test_prefix_is_seen_whatever_the_window(
    num_new: int, prefix_len: int, value_dim: int, dtype: torch.dtype, check_close: Any
) -> None:
    for heads, lengths in product(HEADS, SHORT_RUNS):
        runs = make_history([prefix_len, *lengths], heads[1], dtype)
        prefix, *history = ((k, v[..., :value_dim]) for k, v in runs)
        q, k, v = make_new(num_new, *heads, dtype)
        options: dict[str, Any] = {
            "window": 3,
            "prefix": prefix,
            "sinks": make_sinks("per head", num_new, heads[0], dtype),
            "bias": make_bias(num_new, heads[0], sum(lengths), dtype),
        }
        new = q, history, k, v[..., :value_dim]
        expected = segment_attention_reference(*new, SCALE, **options)
        check_close(segment_attention(*new, scale=SCALE, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", ["cap alone", "window", "window, prefix, sinks and bias"])
@pytest.mark.parametrize("num_new", [1, 9])
def test_capped_scores_match_one_softmax(
    num_new: int, options: str, dtype: torch.dtype, check_close: Any
) -> None:
    for heads, lengths in product(HEADS, [*SHORT_RUNS, [2100, 5]]):
        prefix, *history = make_history([40, *lengths], heads[1], dtype)
        q, k, v = make_new(num_new, *heads, dtype)
        chosen: dict[str, Any] = {"soft_cap": 0.7}
        if options != "cap alone":
            chosen["window"] = 5
        if "bias" in options:
            chosen["prefix"] = prefix
            chosen["sinks"] = make_sinks("per head", num_new, heads[0], dtype)
            chosen["bias"] = make_bias(num_new, heads[0], sum(lengths), dtype)
        expected = segment_attention_reference(q, history, k, v, SCALE, **chosen)
        check_close(segment_attention(q, history, k, v, scale=SCALE, **chosen), expected)


def test_small_cap_makes_all_keys_alike_and_a_large_one_changes_nothing(check_close: Any) -> None:
    history = make_history([30, 7], 2, torch.float32)
    q, k, v = make_new(3, 4, 2)
    attend = partial(segment_attention, q, history, k, v, scale=SCALE)
    alike = segment_attention(torch.zeros_like(q), history, k, v, scale=SCALE)
    check_close(attend(soft_cap=1e-7), alike)
    check_close(attend(soft_cap=1e4), attend())


def test_prefix_without_a_window_is_as_good_as_history(check_close: Any) -> None:
    q, k, v = make_new(9, 4, 2)
    first, *rest = make_history([40, 20, 3], 2, torch.float32)
    expected = segment_attention_reference(q, [first, *rest], k, v, SCALE)
    check_close(segment_attention_reference(q, rest, k, v, SCALE, prefix=first), expected)
    check_close(segment_attention(q, rest, k, v, scale=SCALE, prefix=first), expected)


def test_window_of_one_leaves_every_token_its_own_value(check_close: Any) -> None:
    q, k, v = make_new(9, 4, 2)
    out = segment_attention(q, make_history([20], 2, torch.float32), k, v, scale=SCALE, window=1)
    check_close(out, v.transpose(0, 1).repeat_interleave(2, dim=1))


@pytest.mark.parametrize("value_dim", [8, HEAD_DIM])
@pytest.mark.parametrize("num_new", [1, 9])
def test_sink_weighs_like_one_more_key_without_value(
    num_new: int, value_dim: int, check_close: Any
) -> None:
    q, k, v = make_new(num_new, 2, 2)
    runs = [(keys, values[..., :value_dim]) for keys, values in make_history([5], 2, torch.float32)]
    v = v[..., :value_dim]
    # all scores are zero: the weight of every key, and of the sink, is the same
    out = segment_attention(torch.zeros_like(q), runs, k, v, scale=SCALE, sinks=torch.zeros(2))
    counts = torch.arange(6, 6 + num_new)[:, None, None] + 1
    total = runs[0][1].sum(0) + v.transpose(0, 1).cumsum(0)
    check_close(out, total / counts)


@pytest.mark.parametrize("value_dim", [8, HEAD_DIM])
@pytest.mark.parametrize("num_new", [1, 3, 9])
@pytest.mark.parametrize("lengths", [[24], [7, 0, 9, 8]], ids=str)
def test_nothing_outside_the_window_is_read(
    lengths: list[int], num_new: int, value_dim: int, check_close: Any
) -> None:
    window, past_len = 6, sum(lengths)
    history = [(k, v[..., :value_dim]) for k, v in make_history(lengths, 2, torch.float32)]
    q, k, v = make_new(num_new, 4, 2)
    bias = make_bias(num_new, 4, past_len)
    new = q, history, k, v[..., :value_dim]
    expected = segment_attention_reference(*new, SCALE, window=window, bias=bias)
    num_hidden = past_len - (window - 1)
    start = 0
    for run in history:
        for tensor in run:
            tensor[: max(0, num_hidden - start)] = float("nan")
        start += len(run[0])
    age = torch.arange(num_new)[:, None] + past_len - torch.arange(past_len + num_new)
    bias.masked_fill_((age < 0) | (age >= window), float("nan"))
    check_close(segment_attention(*new, scale=SCALE, window=window, bias=bias), expected)


@pytest.mark.parametrize("value_dim", [8, HEAD_DIM])
@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("own_key", ["seen", "hidden"])
def test_bias_may_hide_whole_runs_and_the_token_itself(
    own_key: str, num_new: int, value_dim: int, check_close: Any
) -> None:
    history = [(k, v[..., :value_dim]) for k, v in make_history([4, 600, 9], 2, torch.float32)]
    q, k, v = make_new(num_new, 4, 2)
    new = q, history, k, v[..., :value_dim]
    bias = make_bias(num_new, 4, 613)
    bias[:, 0, :604] = float("-inf")  # the first token sees nothing of two runs
    bias[1:3, :, 4:] = float("-inf")  # and of all the others in some heads
    bias[1:3, :, :4] = 1.0
    if own_key == "hidden":
        bias[..., 613:] = float("-inf")
    expected = segment_attention_reference(*new, SCALE, bias=bias)
    check_close(segment_attention(*new, scale=SCALE, bias=bias), expected)


@pytest.mark.parametrize("sink_kind", ["no sinks", "per head"])
@pytest.mark.parametrize("value_dim", [8, HEAD_DIM])
@pytest.mark.parametrize("num_new", [1, 3])
def test_token_that_sees_nothing_gets_zeros(num_new: int, value_dim: int, sink_kind: str) -> None:
    history = [(k, v[..., :value_dim]) for k, v in make_history([4, 9], 2, torch.float32)]
    q, k, v = make_new(num_new, 4, 2)
    bias = make_bias(num_new, 4, 13)
    bias[:, 0] = float("-inf")
    sinks = make_sinks(sink_kind, num_new, 4)
    options: dict[str, Any] = {"scale": SCALE, "sinks": sinks, "bias": bias}
    out = segment_attention(q, history, k, v[..., :value_dim], **options)
    assert bool((out[0] == 0).all())
    assert bool((out[1:] != 0).all())
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_new", [1, 3])
def test_bias_may_have_another_dtype_and_be_shared_by_heads(
    num_new: int, dtype: torch.dtype, check_close: Any
) -> None:
    history = make_history([20, 3], 2, torch.float32)
    q, k, v = make_new(num_new, 4, 2)
    bias = make_bias(num_new, 1, 23, dtype).expand(4, -1, -1)
    for window in (None, 4):
        expected = segment_attention_reference(q, history, k, v, SCALE, window=window, bias=bias)
        actual = segment_attention(q, history, k, v, scale=SCALE, window=window, bias=bias)
        check_close(actual, expected)


@pytest.mark.parametrize("sink", [-1e4, -300.0, 300.0])
def test_sinks_of_any_weight_do_not_overflow(sink: float, check_close: Any) -> None:
    history = make_history([30], 2, torch.float32)
    history[0][0].mul_(60.0)
    q, k, v = make_new(3, 4, 2)
    sinks = torch.full((4,), sink)
    expected = segment_attention_reference(q, history, k, v, 1.0, sinks=sinks)
    check_close(segment_attention(q, history, k, v, scale=1.0, sinks=sinks), expected)


@pytest.mark.parametrize("num_new", [1, 40])
def test_partial_results_of_very_different_weight_merge(num_new: int, check_close: Any) -> None:
    history = make_history([30, 30, 30], 2, torch.float32)
    q, k, v = make_new(num_new, 4, 2)
    history[1][0].mul_(60.0)  # scores in the hundreds: exp would overflow
    history[2][0].mul_(0.01)
    expected = segment_attention_reference(q, history, k, v, 1.0)
    check_close(segment_attention(q, history, k, v, scale=1.0), expected)


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("window", [None, 2100])
@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("length", [2048, 4099])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_long_runs_are_shared_among_threads(
    length: int,
    num_kv_heads: int,
    num_new: int,
    window: int | None,
    biased: bool,
    check_close: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    history = make_history([length, 5], num_kv_heads, torch.float32)
    q, k, v = make_new(num_new, 4, num_kv_heads)
    bias = make_bias(num_new, 4, length + 5) if biased else None
    expected = segment_attention_reference(q, history, k, v, SCALE, window=window, bias=bias)
    actual = segment_attention(q, history, k, v, scale=SCALE, window=window, bias=bias)
    check_close(actual, expected, 5e-6)


def test_plain_form_takes_long_runs_in_pieces(check_close: Any) -> None:
    history = make_history([4099, 5], 2, torch.float64)
    q, k, v = make_new(3, 4, 2, torch.float64)
    bias = make_bias(3, 4, 4104, torch.float64)
    expected = segment_attention_reference(q, history, k, v, SCALE, bias=bias)
    check_close(segment_attention(q, history, k, v, scale=SCALE, bias=bias), expected, 5e-6)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0"),
        ({"soft_cap": float("nan")}, "soft_cap is nan"),
        ({"bias": torch.zeros(4, 3, 20)}, r"bias has shape \(4, 3, 20\).*\(4, 3, 23\)"),
        ({"bias": torch.zeros(1, 3, 23)}, r"bias has shape \(1, 3, 23\)"),
        ({"sinks": torch.zeros(2)}, r"sinks have shape \(2,\).*\(4,\)"),
        ({"sinks": torch.zeros(4, 1)}, r"sinks have shape \(4, 1\).*\(4, 3\)"),
    ],
    ids=[
        "window",
        "no room",
        "no number",
        "bias without new tokens",
        "bias of one head",
        "few sinks",
        "few tokens",
    ],
)
def test_options_of_wrong_size_are_refused(options: dict[str, Any], message: str) -> None:
    history = make_history([20], 2, torch.float32)
    q, k, v = make_new(3, 4, 2)
    with pytest.raises(ValueError, match=message):
        segment_attention(q, history, k, v, scale=SCALE, **options)


def test_result_does_not_share_memory_with_the_new_values() -> None:
    q, k, v = make_new(1, 2, 2)
    before = v.clone()
    segment_attention(q, [], k, v, scale=SCALE).zero_()
    assert torch.equal(v, before)


def allocations(num_new: int, lengths: list[int], options: dict[str, Any]) -> list[int]:
    """Bytes of each allocation of one call, freed again or not."""
    history = make_history(lengths, 1, torch.float32)
    q, k, v = make_new(num_new, 4, 1)
    segment_attention(q, history, k, v, scale=SCALE, **options)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        segment_attention(q, history, k, v, scale=SCALE, **options)
    results = prof.profiler.kineto_results  # public summaries hide what an op frees itself
    events = [event for event in results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in events if event.nbytes() > 0]


@pytest.mark.parametrize("num_new", [1, 32])
def test_capped_attention_takes_memory_for_one_piece_of_the_history_at_a_time(num_new: int) -> None:
    largest = {
        length: max(allocations(num_new, [length], {"soft_cap": 5.0}))
        for length in (2048, 8192, 32768)
    }
    assert len(set(largest.values())) == 1, largest


@pytest.mark.parametrize("options", ["none", "window", "sinks", "bias"])
@pytest.mark.parametrize("num_new", [1, 32])
def test_memory_taken_does_not_grow_with_history(num_new: int, options: str) -> None:
    taken = {}
    for length in (1024, 8192, 32768):
        chosen: dict[str, Any] = {
            "none": {},
            "window": {"window": 512},
            "sinks": {"sinks": make_sinks("per head", num_new, 4)},
            "bias": {"bias": make_bias(num_new, 4, length) if options == "bias" else None},
        }[options]
        taken[length] = sum(allocations(num_new, [length], chosen))
    assert taken[1024] > 0
    # a long run may be shared among threads, which costs one more output of a few hundred bytes
    assert max(taken.values()) - min(taken.values()) < 1024, taken
