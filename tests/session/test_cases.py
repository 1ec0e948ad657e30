"""How prefix caches for such models fail in the field, each as a kind, on a real model."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from testkit.models import micro_model, micro_runtime, tokenizer

from agentcache.config import CacheConfig
from agentcache.pools.tensors import TensorPools
from agentcache.runtime import Runtime
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.session import Turn

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, 8000, length).tolist()


def ask(runtime: Runtime, prompt: list[int], **options: Any) -> Turn:
    """A verified call in a session of its own."""
    turn = runtime.session().generate(prompt, verify=True, **{"max_new_tokens": 3, **options})
    assert turn.verify is not None
    assert turn.verify.ok, turn.verify
    return turn


def checkpoint_digests(runtime: Runtime) -> dict[int, str]:
    """Digest of each filed checkpoint's bytes, by node."""
    pools = runtime.cache.pools
    assert isinstance(pools, TensorPools)

    def read() -> dict[int, str]:
        return {
            id(node): hashlib.sha256(
                pools._arena[node.data[Kind.STATE].slots.tolist()].numpy().tobytes()
            ).hexdigest()
            for node in runtime.cache.tree.nodes()
            if Kind.STATE in node.data
        }

    return runtime.on_engine(read)


def test_state_is_filed_only_under_what_it_has_absorbed(runtime: Runtime) -> None:
    """Chunks that end at odd places, two prompts at a time, then many others, then again."""
    prompts = [ids(1, 95), ids(2, 107)]
    streams = [
        runtime.session().generate(prompt, max_new_tokens=7, stream=True) for prompt in prompts
    ]
    for stream in streams:
        stream.turn  # noqa: B018 - waits
    for prompt in prompts:
        assert ask(runtime, [*prompt, 9, 10]).usage.cached_tokens >= 94
    for n in range(50):
        runtime.session().generate(ids(100 + n, 20), max_new_tokens=1)
    for prompt in prompts:
        ask(runtime, [*prompt, 11, 12, 13])


def test_published_states_never_change(runtime: Runtime) -> None:
    prompt = ids(3, 70)
    runtime.session().generate(prompt, max_new_tokens=0)
    first = ask(runtime, [*prompt, 5, 6, 7], max_new_tokens=9)
    before = checkpoint_digests(runtime)
    ask(runtime, [*prompt, 8, 9], max_new_tokens=9)
    again = ask(runtime, [*prompt, 5, 6, 7], max_new_tokens=9)
    assert again.ids.tolist() == first.ids.tolist()
    after = checkpoint_digests(runtime)
    assert before.items() <= after.items()


def test_regenerated_reply_does_not_go_on_from_the_first(runtime: Runtime) -> None:
    session = runtime.session()
    prompt = ids(4, 60)
    first = session.generate(prompt, max_new_tokens=8)
    second = session.generate(prompt, max_new_tokens=8, verify=True)
    assert second.ids.tolist() == first.ids.tolist()
    assert second.verify is not None
    assert second.verify.ok


def test_kv_without_a_state_is_no_hit(runtime: Runtime) -> None:
    prompt = ids(5, 90)
    runtime.session().generate(prompt, max_new_tokens=3)

    def drop_states() -> None:
        cache = runtime.cache
        for node in cache.tree.nodes():
            cache.memory._drop(node, Kind.STATE)

    runtime.on_engine(drop_states)
    turn = ask(runtime, [*prompt, 9, 10])
    assert turn.usage.cached_tokens == 0
    assert turn.miss is not None
    assert (turn.miss.reason, turn.miss.vetoed_by) == ("no_checkpoint", "state")
    assert turn.miss.kv_len >= len(prompt)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompt_that_ends_at_a_boundary_or_beside_it(runtime: Runtime, extra: int) -> None:
    prompt = ids(6, 64)
    runtime.session().generate(prompt, max_new_tokens=0)
    other = [*prompt, 77][: len(prompt) + extra]
    cold = micro_runtime()
    expected = cold.session().generate(other, max_new_tokens=5).ids.tolist()
    cold.close()
    for _ in range(3):
        assert ask(runtime, other, max_new_tokens=5).ids.tolist() == expected


def test_append_only_turns_reuse_prompt_and_reply_of_the_turn_before(runtime: Runtime) -> None:
    session = runtime.session()
    known = 0
    for n in range(9):
        turn = session.chat([{"role": "user", "content": f"Question {n}?"}], max_new_tokens=12)
        if n:
            assert turn.usage.cached_tokens == known - 1
        known = turn.usage.prompt_tokens + turn.usage.output_tokens


def test_long_prompts_with_one_head_hit_at_the_third_and_marked_at_the_second(
    runtime: Runtime,
) -> None:
    shared = ids(7, 150)
    turns = [ask(runtime, [*shared, *ids(50 + n, 70)]) for n in range(4)]
    assert [turn.usage.cached_tokens for turn in turns] == [0, 0, 150, 150]
    head = {"role": "user", "content": "word " * 150, "mark": True}
    lists = [[head, {"role": "user", "content": f"tail {n}"}] for n in range(2)]
    marked = [runtime.session(tenant="t").complete(m, max_new_tokens=1) for m in lists]
    assert marked[1].usage.cached_tokens > 150


def test_template_that_drops_thinking_costs_the_reply_and_no_more(
    make_runtime: Callable[..., Runtime],
) -> None:
    runtime = Runtime(
        micro_model(),
        with_template("drops_thinking.jinja"),
        cache=CacheConfig(budget="16MiB", page_size=4, prefill_chunk=32),
    )
    with runtime:
        session = runtime.session()
        question = [{"role": "user", "content": "Which file is it? " * 8}]
        first = session.chat(question, replay="<think>let me look</think>It is a.py.")
        turn = session.chat(
            [{"role": "user", "content": "And which line?"}], max_new_tokens=2, verify=True
        )
        assert "let me look" not in runtime.tokenizer.decode(session.ids.tolist())
        assert turn.verify is not None
        assert turn.verify.ok
        # Reused up to the reply header of the turn before.
        assert turn.usage.cached_tokens >= first.usage.prompt_tokens - 12
        assert turn.miss is not None
        assert turn.miss.reason == "diverged"
        assert turn.miss.fallback


def with_template(name: str) -> Any:
    changed = copy.deepcopy(tokenizer())
    changed.chat_template = (TEMPLATES / name).read_text()
    return changed


def test_with_room_for_all_no_session_loses_its_state(
    make_runtime: Callable[..., Runtime],
) -> None:
    runtime = make_runtime(budget="4MiB", max_running=2)
    sessions = [runtime.session(f"s{n}") for n in range(3)]
    for n, session in enumerate(sessions):
        session.generate(ids(20 + n, 200), max_new_tokens=1)
    for step in range(6):
        for session in sessions:
            prompt = [*session.ids.tolist(), *ids(40 + step, 20)]
            turn = session.generate(prompt, max_new_tokens=1)
            assert turn.usage.computed_tokens <= 20 + 1


def test_fifty_turns_stay_within_a_budget_of_few_states(
    make_runtime: Callable[..., Runtime],
) -> None:
    runtime = make_runtime(budget="350KiB", max_running=1)
    pools = runtime.cache.pools
    assert isinstance(pools, TensorPools)
    assert pools.pages.num_pages < 10 * pools.state_pages
    session = runtime.session()
    for n in range(50):
        prompt = [*session.ids.tolist(), *ids(n, 3)]
        turn = session.generate(prompt, max_new_tokens=1, verify=n % 10 == 9)
        assert turn.usage.computed_tokens <= (len(prompt) if n == 0 else 3 + 1)
        assert turn.verify is None or turn.verify.ok
        assert pools.held_bytes() <= 350 * 1024
    assert runtime.stats()["evictions"]["state"] > 50


def test_ten_forks_add_ten_states_and_ten_pages_at_most(runtime: Runtime) -> None:
    session = runtime.session()
    session.generate(ids(9, 300), max_new_tokens=1)

    def used() -> int:
        return int(runtime.stats()["bytes"]["total"]["used"])

    before = used()
    forks = [session.fork() for _ in range(10)]
    assert used() == before
    pools = runtime.cache.pools
    for n, fork in enumerate(forks):
        fork.generate([*fork.ids.tolist(), 50 + n], max_new_tokens=0)
    # Each has its end and the place one token before it; their pages are small.
    assert used() - before <= 20 * pools.row_bytes + 20 * pools.page_bytes


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("prefill_chunk", [1, 7])
def test_any_page_and_chunk_size_gives_the_same(
    make_runtime: Callable[..., Runtime], page_size: int, prefill_chunk: int
) -> None:
    reference = make_runtime()
    runtime = make_runtime(page_size=page_size, prefill_chunk=prefill_chunk)
    prompt = ids(11, 50)
    for length in (17, 33, 50):
        expected = reference.session().generate(prompt[:length], max_new_tokens=4)
        assert ask(runtime, prompt[:length], max_new_tokens=4).ids.tolist() == expected.ids.tolist()
