"""Policies by name in a runtime: what is reused is right, and where it ends."""

from __future__ import annotations

from itertools import pairwise

import pytest

from agentcache.config import CacheConfig
from agentcache.runtime import Runtime


def hits(admission: str, policy: str = "lru") -> list[tuple[int, int]]:
    """(prompt tokens, cached tokens) of calls of one session, each compared with a cold run."""
    config = CacheConfig(budget="3MiB", admission=admission, policy=policy, prefill_chunk=96)
    out = []
    with Runtime.load("tiny-hybrid", cache=config, verify=True, threads=1) as runtime:
        session = runtime.session()
        for number in range(4):
            message = {"role": "user", "content": f"question {number}: " + "tell me more " * 8}
            turn = session.chat([message], max_new_tokens=20)
            assert turn.verify is not None
            assert turn.verify.ok
            out.append((turn.usage.prompt_tokens, turn.usage.cached_tokens))
    return out


def test_blocks_of_prompt_and_reply_are_reused_up_to_the_last_full_one() -> None:
    calls = hits("every-block")
    assert calls[0][1] == 0
    lens = [prompt for prompt, _ in calls]
    for before, (_, cached) in zip(lens, calls[1:], strict=False):
        assert cached == (before + 19) // 16 * 16, "19 tokens of the reply were absorbed"


@pytest.mark.parametrize("policy", ["slru", "gdsf", "marconi"])
def test_policy_runs_a_session_and_answers_as_without_a_cache(policy: str) -> None:
    calls = hits("marconi", policy)
    assert all(cached >= prompt for (prompt, _), (_, cached) in pairwise(calls))
