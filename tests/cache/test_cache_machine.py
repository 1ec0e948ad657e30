"""A random walk over the cache's doors against a dictionary that knows what was committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from testkit.helpers import check, make_cache, tick
from testkit.strategies import array, tokens

from agentcache.cache import HybridCache, Lease, OutOfPages
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from agentcache.sessions.refs import SessionRef


class CacheMachine(RuleBasedStateMachine):
    """Requests, sessions and evictions in any order; the pool is small, so eviction is frequent."""

    @initialize(
        page_size=st.sampled_from([1, 3, 4]),
        state_pages=st.sampled_from([1, 2]),
        kv=st.booleans(),
        policy=st.sampled_from(["lru", "session-lru"]),
    )
    def start(self, page_size: int, state_pages: int, kv: bool, policy: str) -> None:
        self.cache: HybridCache = make_cache(
            num_pages=24,
            page_size=page_size,
            num_rows=3,
            state_pages=state_pages,
            policy=policy,
            kv=kv,
        )
        self.committed: dict[bytes, set[tuple[int, ...]]] = {b"a": set(), b"b": set()}
        self.running: list[tuple[bytes, IntArray, Lease]] = []
        self.refs: list[SessionRef] = []

    @rule(ids=tokens(), namespace=st.sampled_from([b"a", b"b"]), mark=st.integers(1, 24))
    def acquire(self, ids: list[int], namespace: bytes, mark: int) -> None:
        tick(self.cache)
        sequence = array(ids)
        present = self._present(namespace)
        before = self._boundary(present, ids)
        if not self.cache.pools.rows.num_free:
            return
        try:
            lease = self.cache.acquire(namespace, sequence, structural=(mark,))
        except OutOfPages:
            return
        assert lease.boundary == before
        assert all(lease.boundary < at < len(ids) for at in lease.plan)
        self.running.append((namespace, sequence, lease))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        namespace, sequence, lease = data.draw(st.sampled_from(self.running))
        length = data.draw(st.integers(1, len(sequence)))
        try:
            self.cache.reserve(lease, length)
        except OutOfPages:
            return
        if self.cache.commit(lease, sequence, length, lease.row):
            self.committed[namespace].add(tuple(sequence[:length].tolist()))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), hold=st.booleans())
    def release(self, data: st.DataObject, hold: bool) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        _, _, lease = self.running.pop(index)
        if hold:
            self.refs.append(self.cache.refs.hold(lease.locked, lease.filed))
        self.cache.release(lease)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.running) - 1))
        namespace, sequence, lease = self.running.pop(index)
        length = max(lease.boundary, lease.committed_len)
        if self.cache.suspend(lease, sequence, length) and length:
            self.committed[namespace].add(tuple(sequence[:length].tolist()))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ref = self.refs.pop(data.draw(st.integers(0, len(self.refs) - 1)))
        self.cache.refs.leave(ref)
        self.cache.refs.leave(ref)

    @rule()
    def evict(self) -> None:
        used = self.cache.pools.pages.num_used
        if self.cache.evict_one():
            assert self.cache.pools.pages.num_used < used or self.running

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        if not self.running:
            assert self.cache.pools.pages.num_used == 0
            assert list(self.cache.tree.nodes()) == []

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "cache"):
            check(self.cache)
            for namespace in (b"a", b"b"):
                assert self._present(namespace) <= self.committed[namespace]

    def _present(self, namespace: bytes) -> set[tuple[int, ...]]:
        """Sequences that the tree says can be resumed at their end."""
        out: set[tuple[int, ...]] = set()
        stack = [((), self.cache.tree.root(namespace))]
        while stack:
            path, node = stack.pop()
            path = (*path, *node.tokens.tolist())
            if not node.is_root and self.cache.tree.is_boundary(node):
                assert Kind.STATE in node.data
                out.add(path)
            stack.extend((path, child) for child in node.children.values())
        return out

    @staticmethod
    def _boundary(present: set[tuple[int, ...]], ids: list[int]) -> int:
        """The longest resumable proper prefix, by brute force."""
        return max(
            (
                len(known)
                for known in present
                if known == tuple(ids[: len(known)]) and len(known) < len(ids)
            ),
            default=0,
        )


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
