"""Calls that go on from rounded checkpoints: nearly the same answer, in less memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from testkit.helpers import check
from testkit.models import idle_counts, micro_model, micro_runtime, tokenizer

from agentcache.cache import OutOfPages
from agentcache.config import CacheConfig
from agentcache.engine.verify import LOGIT_TOLERANCE, TOLERANCES
from agentcache.errors import ConfigError, UnsupportedOption
from agentcache.pools.tensors import TensorPools
from agentcache.runtime import Runtime
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.engine.request import Request
    from agentcache.session import Turn

FORMATS = pytest.mark.parametrize("name", ["float16", "int8"])
CHUNK = 32
PROMPT = np.random.default_rng(0).integers(5, 90, 3 * CHUNK + 1).tolist()
"""Its checkpoint before the last token lies where a chunk ends."""
NEW = 12


@pytest.fixture(scope="module")
def wanted() -> Turn:
    """The call from nothing, with states kept as they are."""
    with micro_runtime() as runtime:
        return say(runtime)


def say(runtime: Runtime, prompt: list[int] = PROMPT, **options: Any) -> Turn:
    return runtime.session().generate(prompt, max_new_tokens=NEW, return_logits=True, **options)


def logit_error(turn: Turn, right: Turn) -> float:
    assert turn.logits is not None
    assert right.logits is not None
    errors = (turn.logits - right.logits).abs().amax(dim=1) / right.logits.std(dim=1)
    return float(errors.max())


@FORMATS
def test_turns_stay_within_the_format_s_tolerance_and_beyond_the_exact_one(name: str) -> None:
    logit_tolerance, state_tolerance = TOLERANCES[name]
    with micro_runtime(checkpoint_format=name) as runtime:
        session, history = runtime.session(), list(PROMPT)
        for turn_idx in range(6):
            turn = session.generate(history, replay=[7 + turn_idx, 8, 9], verify=True)
            report = turn.verify
            assert report is not None
            assert report.ok, report
            assert (report.logit_tolerance, report.state_tolerance) == TOLERANCES[name]
            assert report.max_logit_error <= logit_tolerance
            assert report.max_state_error <= state_tolerance
            rounded = report.max_state_error > 1.1 * TOLERANCES["unchanged"][1]
            assert rounded == (turn_idx > 0), report
            history += [7 + turn_idx, 8, 9, 20 + turn_idx, 21]
            assert (turn.usage.cached_tokens > 0) == (turn_idx > 0)
        stats = runtime.stats()
        assert (stats["verify"]["calls"], stats["verify"]["failed"]) == (6, 0)
        assert stats["held_bytes"] <= stats["budget"]
        assert stats["held_bytes"] == stats["bytes"]["total"]["reserved"]
        runtime.on_engine(lambda: check(runtime.cache))


@FORMATS
def test_call_from_nothing_is_not_rounded(name: str, wanted: Turn) -> None:
    with micro_runtime(checkpoint_format=name) as runtime:
        assert logit_error(say(runtime), wanted) <= LOGIT_TOLERANCE


@FORMATS
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_state_that_is_lost_or_no_number_is_reported(name: str, value: float) -> None:
    with micro_runtime(checkpoint_format=name) as runtime:
        pools, cache = runtime.cache.pools, runtime.cache
        assert isinstance(pools, TensorPools)
        runtime.session().generate(PROMPT, max_new_tokens=0)

        def spoil() -> None:
            row = pools.staging_rows[0]
            for node in cache.tree.nodes():
                if Kind.STATE in node.data:
                    pools.load_state(node.data[Kind.STATE].slots, row)
                    for state in pools.state.values():
                        state[row].view(-1)[:: 1 if value == 0 else 50] = value
                    pools.save_state(row, node.data[Kind.STATE].slots)

        runtime.on_engine(spoil)
        turn = runtime.session().generate([*PROMPT, 3], max_new_tokens=2, verify=True)
        assert turn.usage.cached_tokens >= len(PROMPT) - 1
        assert turn.verify is not None
        assert not turn.verify.ok


def test_more_checkpoints_fit_the_same_budget() -> None:
    counts = {}
    for name in ("unchanged", "float16", "int8"):
        with micro_runtime(checkpoint_format=name, budget="400KiB", max_running=1) as runtime:
            for n in range(24):
                runtime.session().generate([n + 5, *range(5, 16)], max_new_tokens=0)
            stats = runtime.stats()
            counts[name] = stats["entries"]["state"]
            assert stats["held_bytes"] == stats["bytes"]["total"]["reserved"] <= 400 * 1024
            pools = runtime.cache.pools
            used = stats["bytes"]["state"]["used"]
            assert used == counts[name] * pools.state_pages * pools.page_bytes
            runtime.clear()
            assert set(idle_counts(runtime).values()) == {0}
    assert counts["unchanged"] < counts["float16"] < counts["int8"]


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="'int4'; known: unchanged, float16, int8"):
        CacheConfig(checkpoint_format="int4")


@FORMATS
def test_exact_and_rounded_exclude_each_other(name: str) -> None:
    settings = CacheConfig(budget="16MiB", checkpoint_format=name)
    with pytest.raises(UnsupportedOption, match=f"checkpoint_format='{name}'"):
        Runtime(micro_model(), tokenizer(), cache=settings, exact=True)
    with micro_runtime(checkpoint_format=name) as runtime:
        with pytest.raises(UnsupportedOption, match="exact=True"):
            runtime.session().generate(PROMPT, max_new_tokens=1, exact=True)
        assert set(idle_counts(runtime).values()) == {0}


def preempt(
    runtime: Runtime, is_due: Callable[[Request], bool], *, whole: bool = True
) -> list[int]:
    """Take the memory of the call once when it is due; `whole=False`: there is room to park no
    state but a packed one. Returns where it stood, once it has happened."""
    stepper, memory = runtime.engine._stepper, runtime.cache.memory
    step, alloc, done = stepper.step, memory.alloc_scattered, []

    def short(kind: str, count: int) -> Any:
        if count == runtime.cache.pools.row_pages:
            raise OutOfPages(count)
        return alloc(kind, count)

    def stepped() -> None:
        step()
        for request in list(stepper._scheduler.running):
            if request.lease is not None and not done and is_due(request):
                done.append(request.absorbed)
                if not whole:
                    memory.alloc_scattered = short  # type: ignore[method-assign]
                stepper._suspend(request)
                memory.alloc_scattered = alloc  # type: ignore[method-assign]

    stepper.step = stepped  # type: ignore[method-assign]
    return done


DUE: dict[str, Callable[[Request], bool]] = {
    "inside the prompt": lambda request: request.absorbed == CHUNK,
    "on a checkpoint": lambda request: request.absorbed == len(PROMPT) - 1,
    "inside the reply": lambda request: request.num_outputs == NEW // 2,
}


@FORMATS
@pytest.mark.parametrize("where", DUE)
@pytest.mark.parametrize("whole", [True, False])
def test_preemption_rounds_nothing(name: str, where: str, whole: bool, wanted: Turn) -> None:
    with micro_runtime(checkpoint_format=name) as runtime:
        done = preempt(runtime, DUE[where], whole=whole)
        turn = say(runtime)
        assert turn.ids.tolist() == wanted.ids.tolist()
        assert logit_error(turn, wanted) <= LOGIT_TOLERANCE
        assert runtime.stats()["preempted"] == len(done) == 1
        # Four passes absorb the prompt; what was parked is computed by no more than one again.
        passes = runtime.stats()["passes"]["extend"]
        assert passes <= 5 if whole else passes > 4
        runtime.on_engine(lambda: check(runtime.cache))
        runtime.clear()
        assert set(idle_counts(runtime).values()) == {0}


@FORMATS
def test_preempted_call_goes_on_from_what_it_had_reused_at_first(name: str) -> None:
    longer = [*PROMPT, *range(5, 45)]
    with micro_runtime(checkpoint_format=name) as runtime:
        runtime.session().generate(PROMPT, max_new_tokens=0)
        right = say(runtime, longer)
        assert right.usage.cached_tokens >= len(PROMPT) - 1
    with micro_runtime(checkpoint_format=name) as runtime:
        runtime.session().generate(PROMPT, max_new_tokens=0)
        done = preempt(runtime, lambda request: request.num_outputs == 3, whole=False)
        turn = say(runtime, longer)
        assert done == [len(longer) + 2]
        assert turn.usage.cached_tokens == right.usage.cached_tokens
        assert logit_error(turn, right) <= LOGIT_TOLERANCE
