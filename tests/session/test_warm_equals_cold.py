"""Output, states and KV with the cache are those without it, whatever happened before."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from testkit.helpers import check
from testkit.models import idle_counts, micro_runtime

from agentcache.errors import RequestTooLarge

if TYPE_CHECKING:
    from agentcache.runtime import Runtime
    from agentcache.session import Session, Turn

# Prompts are made of few blocks, so that many share a prefix and leave it inside a page or a chunk.
BLOCKS = [[5 + 7 * block + i for i in range(size)] for block, size in enumerate((3, 9, 14, 40))]


@cache
def _runtime(policy: str, page_size: int, kib: int) -> Runtime:
    """Room for a few checkpoints only, and freed memory is NaN."""
    return micro_runtime(
        verify=True, policy=policy, page_size=page_size, budget=f"{kib}KiB", max_running=2
    )


class WarmEqualsCold(RuleBasedStateMachine):
    """Sessions with forks, rewinds and evictions; every call is compared with a cold run."""

    @initialize(
        policy=st.sampled_from(["lru", "session-lru"]),
        page_size=st.sampled_from([1, 4]),
        kib=st.sampled_from([300, 600]),
    )
    def start(self, policy: str, page_size: int, kib: int) -> None:
        self.runtime = _runtime(policy, page_size, kib)
        self.sessions: list[Session] = [self.runtime.session()]
        self.hits = 0

    def teardown(self) -> None:
        if hasattr(self, "runtime"):
            for session in self.sessions:
                session.close()
            self.runtime.clear()
            assert idle_counts(self.runtime) == dict.fromkeys(idle_counts(self.runtime), 0)

    def _check(self, turn: Turn) -> None:
        assert turn.verify is not None
        assert turn.verify.ok, turn.verify
        usage = turn.usage
        assert usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens
        self.hits += usage.cached_tokens > 0

    @rule(data=st.data(), blocks=st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=4))
    def prompt(self, data: st.DataObject, blocks: list[list[int]]) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        ids = [token for block in blocks for token in block]
        try:
            self._check(session.generate(ids, max_new_tokens=data.draw(st.integers(0, 3))))
        except RequestTooLarge:
            assert self.runtime.stats()["leases"] == 0

    @rule(data=st.data(), extra=st.sampled_from(BLOCKS), stepwise=st.booleans())
    def go_on(self, data: st.DataObject, extra: list[int], stepwise: bool) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        ids = [*session.ids.tolist(), *extra]
        if len(ids) > 250:
            return
        replay = data.draw(st.lists(st.integers(5, 90), min_size=1, max_size=6))
        try:
            self._check(session.generate(ids, replay=replay, stepwise=stepwise))
        except RequestTooLarge:
            assert self.runtime.stats()["leases"] == 0

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.sessions.append(data.draw(st.sampled_from(self.sessions)).fork())

    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        turns = session.stats()["turns"]
        session.rewind(data.draw(st.integers(0, turns)))

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        self.sessions.remove(session)
        session.close()

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        cache = self.runtime.cache
        self.runtime.on_engine(lambda: [cache.evict_one() for _ in range(count)])

    @invariant()
    def accounts_are_exact(self) -> None:
        if hasattr(self, "runtime"):
            stats = self.runtime.stats()
            assert stats["held_bytes"] <= stats["budget"]
            assert stats["leases"] == 0
            self.runtime.on_engine(lambda: check(self.runtime.cache))


WarmEqualsCold.TestCase.settings = settings(max_examples=12, stateful_step_count=16, deadline=None)
TestWarmEqualsCold = WarmEqualsCold.TestCase
