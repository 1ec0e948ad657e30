"""A verification that fails is logged and counted, and where asked its path leaves the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from testkit.models import idle_counts, micro_model, tokenizer

from agentcache.cache.tables import path_pages
from agentcache.config import CacheConfig
from agentcache.engine.families.tiny import build
from agentcache.errors import UnsupportedOption
from agentcache.pools.tensors import TensorPools
from agentcache.runtime import Runtime
from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.session import Turn

PROMPT = np.random.default_rng(3).integers(20, 8000, 60).tolist()
LONGER = [*PROMPT, *range(100, 112)]


def make(**options: Any) -> Runtime:
    settings = CacheConfig(budget="8MiB", page_size=4, prefill_chunk=32)
    return Runtime(micro_model(), tokenizer(), cache=settings, poison=True, **options)


def damage(runtime: Runtime, kind: str, prompt: list[int] = PROMPT) -> None:
    """Spoil the checkpoint at the end of a prompt that was filed, or KV in its middle."""

    def spoil() -> None:
        cache, tokens = runtime.cache, np.array(prompt, dtype=np.int32)
        assert isinstance(cache.pools, TensorPools)
        match = cache.tree.match(
            cache.tree.root(runtime.namespace(None).digest()), tokens, len(tokens)
        )
        assert match.boundary == len(prompt)
        if kind == Kind.STATE:
            pages = match.node.data[kind].slots
        else:
            pages = path_pages(match.node, kind, runtime.config.page_size, 3, 4)
        cache.pools._arena[torch.from_numpy(pages.astype("int64"))] = 0

    runtime.on_engine(spoil)


def file_damaged(runtime: Runtime, kind: str) -> None:
    runtime.session().generate(PROMPT, max_new_tokens=0)
    damage(runtime, kind)


def call(runtime: Runtime, prompt: list[int] = LONGER, **options: Any) -> Turn:
    options = {"replay": [5, 6, 7], **options}
    return runtime.session().generate(prompt, **options)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "differs from a cold run" in r.getMessage()]


def test_difference_is_logged_and_counted_and_stays_cached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with make() as runtime:
        file_damaged(runtime, Kind.STATE)
        turn = runtime.session("the-one").generate(LONGER, replay=[5, 6, 7], verify=True)
        assert turn.verify is not None
        assert not turn.verify.ok
        (said,) = warnings(caplog)
        assert "session 'the-one'" in said
        assert "72 prompt tokens, 60 of them reused" in said
        assert f"layer {turn.verify.worst_layer} by {turn.verify.max_state_error:.1e}" in said
        assert f"logits by {turn.verify.max_logit_error:.1e}" in said
        assert "stays cached" in said
        assert runtime.stats()["verify"] == {"calls": 1, "failed": 1, "dropped": 0}
        again = call(runtime, [*PROMPT, 9, 9, 9], verify=True)
        assert again.usage.cached_tokens == 60
        assert again.verify is not None
        assert not again.verify.ok
        assert len(warnings(caplog)) == 2


def test_sound_call_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with make(on_mismatch="drop") as runtime:
        runtime.session().generate(PROMPT, max_new_tokens=0)
        turn = call(runtime, verify=True)
        assert turn.verify is not None
        assert turn.verify.ok
        assert call(runtime).usage.cached_tokens >= 70
        assert runtime.stats()["verify"] == {"calls": 1, "failed": 0, "dropped": 0}
    assert warnings(caplog) == []


@pytest.mark.parametrize("kind", [Kind.STATE, Kind.FULL])
@pytest.mark.parametrize("verify", [True, 1.0], ids=["before it returns", "in the background"])
def test_dropped_path_is_computed_anew_and_right(
    kind: str, verify: bool | float, caplog: pytest.LogCaptureFixture
) -> None:
    with make(on_mismatch="drop") as runtime:
        empty = idle_counts(runtime)
        file_damaged(runtime, kind)
        turn = call(runtime, verify=verify)
        assert turn.usage.cached_tokens == 60
        assert idle_counts(runtime) == empty
        counted = runtime.stats()["verify"]
        assert (counted["calls"], counted["failed"]) == (1, 1)
        assert counted["dropped"] >= 4  # KV and state, of the prompt and of what followed it
        (said,) = warnings(caplog)
        assert f"{counted['dropped']} entries of its path were dropped" in said
        cold, warm = call(runtime, verify=True), call(runtime, verify=True)
        assert cold.usage.cached_tokens == 0
        assert warm.usage.cached_tokens >= 70
        for sound in (cold, warm):
            assert sound.verify is not None
            assert sound.verify.ok, sound.verify
        assert len(warnings(caplog)) == 1


def test_session_whose_path_was_dropped_goes_on_from_nothing() -> None:
    with make(on_mismatch="drop") as runtime:
        session = runtime.session()
        session.generate(PROMPT, max_new_tokens=0)
        fork = session.fork()
        damage(runtime, Kind.STATE)
        turn = session.generate(LONGER, replay=[5, 6, 7], verify=True)
        assert turn.verify is not None
        assert not turn.verify.ok
        for each in (session, fork):
            after = each.generate([*each.ids.tolist(), *LONGER[60:], 9], verify=True, replay=[5])
            assert after.miss is not None
            assert after.verify is not None
            assert after.verify.ok
        assert runtime.stats()["leases"] == 0


def test_other_prompts_stay_cached() -> None:
    other = PROMPT[::-1]
    with make(on_mismatch="drop") as runtime:
        runtime.session().generate(other, max_new_tokens=0)
        file_damaged(runtime, Kind.STATE)
        call(runtime, verify=True)
        assert call(runtime, [*other, 1, 2, 3]).usage.cached_tokens == 60


def test_attention_alone_is_dropped_too() -> None:
    settings = CacheConfig(budget="4MiB", page_size=4, prefill_chunk=32)
    model = build("llama", vocab_size=8192)
    with Runtime(model, tokenizer(), cache=settings, on_mismatch="drop") as runtime:
        file_damaged(runtime, Kind.FULL)
        turn = call(runtime, verify=True)
        assert turn.verify is not None
        assert turn.verify.worst_layer is not None
        assert turn.verify.worst_layer.endswith(".kv")
        assert not turn.verify.ok
        after = call(runtime, verify=True)
        assert after.usage.cached_tokens == 0
        assert after.verify is not None
        assert after.verify.ok


def test_anything_else_is_refused() -> None:
    with pytest.raises(UnsupportedOption, match="'evict'; take log or drop"):
        make(on_mismatch="evict")
