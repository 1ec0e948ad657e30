"""A step that is played is the step a pass computes, down to the last bit of all memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from testkit.rows import needs_compiled, runs_of
from testkit.sequences import STARTS, World, by_pass

from agentcache.engine.backend import Batch, Capture, Span
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.native import steps
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE
from agentcache.kernels import rows
from agentcache.kernels.recording import KernelRecorder, Recording
from agentcache.pools.tensors import TensorPools

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


COVERED = [name for name, each in VARIANTS.items() if each.text_model_type in NATIVE]
RECORDABLE: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in COVERED},
    "windows": ("gemma3", {"hidden_activation": "silu"}),
    "without experts": ("qwen3_next", {"mlp_only_layers": [0, 1, 2, 3]}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
}


def make_backend(name: str, dtype: torch.dtype = torch.float32) -> NativeBackend:
    family, changes = RECORDABLE.get(name, (name, {}))
    return NativeBackend(build(family, dtype=dtype, **changes))


backend_of = cache(make_backend)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each test begins with one thread and may take more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Counts:
    """How often steps were recorded for good, and played."""

    recorded = played = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    found, keep, play = Counts(), steps._Recorded, Recording.play

    def counted_keep(*args: Any) -> Any:
        found.recorded += 1
        return keep(*args)

    def counted_play(recording: Recording) -> Tensor:
        found.played += 1
        return play(recording)

    monkeypatch.setattr(steps, "_Recorded", counted_keep)
    monkeypatch.setattr(Recording, "play", counted_play)
    return found


def assert_same_memory(one: World, other: World) -> None:
    """All of it, so nothing was written that should not have been."""
    assert torch.equal(one.pools._arena, other.pools._arena)
    assert torch.equal(one.pools._rows, other.pools._rows)


def check(
    backend: NativeBackend, plan: Sequence[Sequence[int]], threads: int = 1, **options: Any
) -> None:
    """Play these steps, each of some sequences, and pass them beside."""
    played, passed = World(backend, **options), World(backend, **options)
    for at, chosen in enumerate(plan):
        torch.set_num_threads(threads)
        got = played.step(chosen)
        torch.set_num_threads(1)
        expected = passed.passed(chosen)
        assert bool(expected.isfinite().all())
        assert torch.equal(got, expected), f"step {at}"
    assert_same_memory(played, passed)


# ---- played and passed ----


@needs_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECORDABLE)
def test_played_steps_are_those_of_a_pass(name: str, dtype: torch.dtype, counts: Counts) -> None:
    """Of 1, 2 and 5 sequences, each across pages."""
    backend = backend_of(name, dtype)
    plan = [[0]] * 20 + [[3, 1]] * 20 + [[4, 0, 2, 3, 1]] * 20
    check(backend, plan)
    assert (counts.recorded, counts.played) == (3, 57)


@needs_compiled
@pytest.mark.parametrize("name", RECORDABLE)
def test_sequences_join_and_leave_between_steps(name: str, counts: Counts) -> None:
    rng = np.random.default_rng(1)
    plan = [rng.permutation(5)[: rng.integers(1, 6)].tolist() for _ in range(40)]
    check(backend_of(name), plan)
    assert counts.recorded == 5


@needs_compiled
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["granitemoehybrid", "windows", "qwen3_5", "lfm2", "kimi_linear"])
def test_any_number_of_threads_plays_the_same(name: str, threads: int) -> None:
    check(backend_of(name), [[0, 1, 2, 3, 4], [2], [4, 1]] * 5, threads)


@needs_compiled
def test_two_sets_of_pools_in_turn(counts: Counts) -> None:
    backend = backend_of("granitemoehybrid")
    played, passed = ([World(backend, seed=seed) for seed in (0, 1)] for _ in range(2))
    for at in range(12):
        chosen = [0, 2, 4][: 1 + at % 3]
        for one, other in zip(played, passed, strict=True):
            assert torch.equal(one.step(chosen), other.passed(chosen))
    for one, other in zip(played, passed, strict=True):
        assert_same_memory(one, other)
    assert counts.recorded == 6


@needs_compiled
@pytest.mark.parametrize("name", ["llama", "windows"])
def test_more_runs_than_there_is_room_for(
    name: str, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded is recorded anew, with room for more; also where it is so from the first
    step on."""
    monkeypatch.setattr(steps, "_NUM_RUNS", 1)
    check(backend_of(name), [[1]] * 60 + [[2, 0]] * 30, page=2)
    assert 2 < counts.recorded < 12


@needs_compiled
def test_runs_are_counted_over_all_sequences(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is for an average: a sequence in many pieces among those in one."""
    monkeypatch.setattr(steps, "_NUM_RUNS", 8)
    check(backend_of("llama"), [[0, 1, 3]] * 10, starts=(60, 0, 0, 0), page=4)
    assert counts.recorded == 1


@needs_compiled
def test_pages_before_a_window_are_not_read(counts: Counts) -> None:
    """They are given back as the engine gives them back, and filled with NaN."""
    backend = backend_of("windows")
    played, passed = World(backend), World(backend)
    (group,) = [each for each in backend.kv_layout.groups if each.window is not None]
    for _ in range(30):
        assert torch.equal(played.step([0, 2]), passed.passed([0, 2]))
        for world in (played, passed):
            for at in (0, 2):
                table = world.sequences[at].windows[group.kind]
                first = max(0, world.sequences[at].stop + 1 - group.window)
                world.pools.on_free(table.trim(first // table.page_size))
    assert_same_memory(played, passed)
    assert counts.played


@needs_compiled
def test_a_state_is_captured_after_a_played_step(counts: Counts) -> None:
    world = World(backend_of("granitemoehybrid"))
    (staging,) = world.pools.staging_rows
    for _ in range(3):
        (span,) = world.next_spans([2])
        span = replace(span, captures=(Capture(span.stop, staging),))
        world.backend.forward(Batch((span,), world.pools))
        assert torch.equal(world.pools._rows[staging], world.pools._rows[span.row])
    assert counts.played == 2


@needs_compiled
def test_one_row_of_logits_for_each_span() -> None:
    world = World(backend_of("llama"))
    for chosen in ([3], [0, 2, 1]) * 2:
        given = world.backend.forward(Batch(world.next_spans(chosen), world.pools))
        assert [each.shape for each in given] == [(1, 256)] * len(chosen)
        assert all(each.dtype == torch.float32 for each in given)


@needs_compiled
def test_logits_handed_out_stay_as_they_are() -> None:
    world = World(backend_of("granitemoehybrid"))
    given: list[Tensor] = []
    kept: list[Tensor] = []
    for chosen in ([0, 1], [2, 3], [4], [0, 1], [4], [0, 1, 2]):
        given += world.backend.forward(Batch(world.next_spans(chosen), world.pools))
        kept += [each.clone() for each in given[len(kept) :]]
    assert all(map(torch.equal, given, kept))


# ---- what is not recorded ----


@needs_compiled
def test_other_batches_are_passes(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact ones, too many sequences, a chunk among them, logits that nobody wants or that are
    not of the token."""
    backend = backend_of("granitemoehybrid")
    world, same = World(backend), World(backend)
    monkeypatch.setattr(steps, "_MOST_SEQUENCES", 3)

    def spans_of(world: World, kind: str) -> tuple[Span, ...]:
        first, second, *others = world.next_spans([0, 1, 2, 3] if kind == "many" else [0, 1])
        if kind == "chunk":
            long = np.arange(9, dtype=np.int32)
            second = world.sequences[1] = replace(second, ids=long, logits_at=(8,))
        if kind == "no logits":
            second = replace(second, logits_at=())
        return first, second, *others

    for kind in ("exact", "many", "chunk", "no logits") * 2:
        batch, alike = (
            Batch(spans_of(each, kind), each.pools, kind == "exact") for each in (world, same)
        )
        got, expected = backend.forward(batch), by_pass(backend, alike)
        assert [len(each) for each in got] == [len(span.logits_at) for span in batch.spans]
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert (counts.recorded, counts.played) == (0, 0)
    world.step([0, 1, 2])
    assert counts.recorded == 1


@needs_compiled
def test_played_steps_and_chunks_in_turn() -> None:
    """What a step leaves behind a chunk goes on from, and the other way round."""
    backend = backend_of("falcon_h1")
    played, passed = World(backend), World(backend)
    for at in range(12):
        if at % 3 == 1:
            for world in (played, passed):
                span = world.sequences[at % 5]
                ids = np.arange(at, at + 5, dtype=np.int32)
                span = replace(span, ids=ids, start=span.stop, logits_at=(4,))
                world.sequences[at % 5] = span
                backend.forward(Batch((span,), world.pools))
        else:
            chosen = [at % 5, (at + 2) % 5]
            assert torch.equal(played.step(chosen), passed.passed(chosen))
    assert_same_memory(played, passed)


@pytest.mark.parametrize("name", COVERED)
def test_a_family_is_recordable_or_falls_back(name: str) -> None:
    backend = backend_of(name)
    assert (backend._steps is not None) == rows.IS_COMPILED
    played, passed = World(backend), World(backend)
    for chosen in ([0, 2], [1], [3, 4, 0]) * 2:
        got, expected = played.step(chosen), passed.passed(chosen)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["granitemoehybrid", "llama"])
def test_nothing_is_recordable_without_the_compiled_forms(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "IS_COMPILED", False)
    assert make_backend(name)._steps is None


@needs_compiled
@pytest.mark.parametrize("changes", [{"hidden_act": "relu"}, {"head_dim": 24}], ids=str)
def test_options_that_no_kernel_has_fall_back(changes: dict[str, Any]) -> None:
    assert NativeBackend(build("llama", **changes))._steps is None


@needs_compiled
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bamba", {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}),
        ("bamba", {"mamba_n_groups": 2, "time_step_limit": (0.1, 0.9), "mamba_d_conv": 3}),
        (
            "falcon_h1",
            {"mamba_rms_norm": True, "ssm_in_multiplier": 1.25, "lm_head_multiplier": 2.0},
        ),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"hidden_act": "gelu"}),
        ("lfm2", {"conv_bias": True, "conv_L_cache": 4}),
        ("qwen3_5", {"hidden_act": "gelu", "linear_num_key_heads": 1}),
        ("qwen3_5", {"linear_key_head_dim": 24, "linear_value_head_dim": 20}),
        ("gemma3", {"final_logit_softcapping": 2.0}),
        ("jamba", {"num_experts": 4, "mamba_proj_bias": True}),
        ("nemotron_h", {"moe_latent_size": 24, "n_group": 2, "topk_group": 1}),
        ("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": [1]}),
        ("kimi_linear", {"q_lora_rank": 24, "num_expert_group": 2, "topk_group": 1}),
        ("granitemoehybrid", {"embedding_multiplier": 5.0, "logits_scaling": 3.0}),
    ],
    ids=str,
)
def test_options_of_recordable_families(name: str, changes: dict[str, Any], counts: Counts) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        backend = NativeBackend(build(name, dtype=dtype, **changes))
        counts.recorded = 0
        check(backend, [[0, 2], [1], [2, 3]] * 4)
        assert counts.recorded == 2


# ---- weights and memory ----


@needs_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RECORDABLE)
def test_rounded_weights_are_those_that_count(name: str, dtype: torch.dtype) -> None:
    """Also after steps with the weights as they were, over the same pools."""
    backend = make_backend(name, dtype)
    played, passed = World(backend), World(backend)
    for chosen in ([0, 1], [2], [0, 1]):
        assert torch.equal(played.step(chosen), passed.passed(chosen))
    before = played.step([0, 1])
    passed.passed([0, 1])
    assert backend.round_weights() > 0
    for chosen in ([0, 1], [2], [0, 1], [2]):
        assert torch.equal(played.step(chosen), passed.passed(chosen))
    assert_same_memory(played, passed)
    assert bool(before.isfinite().all())
    check(backend, [[0, 1], [2]] * 3)
    assert backend._steps is not None


@needs_compiled
def test_hundreds_of_steps_take_no_more_memory(counts: Counts) -> None:
    backend = make_backend("granitemoehybrid")
    assert backend._steps is not None
    world, begin = World(backend), STARTS
    plan = [[0], [1, 2], [0, 1, 2, 3, 4]]

    def run(num: int) -> tuple[int, int]:
        for at in range(num):
            for chosen in plan:
                world.step(chosen)
            if at % 10 == 9:  # from the beginning, so that there is room
                world.sequences = [
                    replace(span, start=start, ids=span.ids[:0])
                    for span, start in zip(world.sequences, begin, strict=True)
                ]
        gc.collect()
        assert backend._steps is not None
        num_tensors = sum(type(each) is torch.Tensor for each in gc.get_objects())
        return backend._steps._recorder._scratch.num_bytes, num_tensors

    first = run(10)
    assert run(100) == first
    assert counts.recorded == 3


@needs_compiled
@pytest.mark.parametrize("name", ["granitemoehybrid", "windows"])
def test_pools_that_nobody_has_any_more_are_freed(name: str) -> None:
    backend = backend_of(name)
    assert backend._steps is not None
    kept = World(backend)
    kept.step([0, 1])
    num_known = len(backend._steps._by_pools)
    dropped = World(backend)
    memory = weakref.ref(dropped.pools), weakref.ref(dropped.pools._arena)
    for chosen in ([0], [0, 1]) * 2:
        dropped.step(chosen)
    del dropped
    gc.collect()
    assert [each() for each in memory] == [None, None]
    assert len(backend._steps._by_pools) == num_known
    again = World(backend, seed=3)  # perhaps where the others were
    same = World(backend, seed=3)
    assert torch.equal(again.step([0, 1]), same.passed([0, 1]))


@needs_compiled
def test_trying_a_model_out_leaves_no_pools_behind() -> None:
    gc.collect()
    before = sum(type(each) is TensorPools for each in gc.get_objects())
    backend = make_backend("granitemoehybrid")
    gc.collect()
    assert backend._steps is not None
    assert sum(type(each) is TensorPools for each in gc.get_objects()) == before
    assert not len(backend._steps._by_pools)


# ---- what stands in for a pass ----


@needs_compiled
def test_a_step_has_only_what_may_be_recorded() -> None:
    world = World(backend_of("llama"))
    step = steps.Step(world.pools, 2, steps.Room(3, 100))
    assert step.wanted() is None  # type: ignore[func-returns-value]
    for name in ("bounds", "rows", "behind_steps", "spans", "order"):
        with pytest.raises(steps.Unrecordable, match=f"'{name}' is not the same"):
            getattr(step, name)
    with pytest.raises(steps.Unrecordable, match="'history' is not the same"):
        _ = step.places("full").history  # type: ignore[attr-defined]


@needs_compiled
def test_a_step_takes_spans_in_or_says_that_there_is_no_room() -> None:
    world = World(backend_of("llama"), page=2)
    step = steps.Step(world.pools, 2, steps.Room(20, 31))
    spans = world.next_spans([2, 0])
    assert step.fill(spans)
    assert step.ids.tolist() == [int(span.ids[0]) for span in spans]
    assert step.positions.tolist() == [30, 17]
    assert step.step_rows.tolist() == [span.row for span in spans]
    expected = [list(span.table.runs(0, span.stop)) for span in spans]
    assert runs_of(step.places("full").of_steps) == expected
    own = [next(span.table.runs(span.start, span.stop))[0] for span in spans]
    assert step.places("full").slots.tolist() == own
    for room in (steps.Room(1, 31), steps.Room(20, 30)):
        assert not steps.Step(world.pools, 2, room).fill(spans)


@needs_compiled
def test_blocks_take_turns_with_the_memory_on_the_way() -> None:
    recorder = KernelRecorder()
    places = []
    for _ in range(4):
        places.append(recorder._scratch.like(torch.empty(100)).data_ptr())
        recorder.next_block()
    assert places[:2] == places[2:]
    assert places[0] != places[1]
