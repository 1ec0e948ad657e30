"""What one thing alone costs: a match from the root, an eviction, a record of the tree."""

from __future__ import annotations

import gc
import tracemalloc
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
from _turns import NAMESPACE, ONE_SHOT_LEN, Agents, CacheServer, make_cache, num_pages, one_shots

from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.cache import HybridCache

__all__ = ["POLICIES", "cold_match", "evictions", "records"]

POLICIES = ("lru", "session-lru")
_COLD_REPETITIONS = 21
_TINY_LENS = (24, 8)
"""Prompt and answer of an entry that is there to be evicted."""
_EVICTIONS_IN_TURN = 10


def _session(
    kinds: Sequence[Kind], page: int, path_len: int, path_nodes: int
) -> tuple[HybridCache, Agents]:
    """A cache with room for one session of two nodes a turn, and that session."""
    pages = num_pages(kinds, page, path_len, num_turns=path_nodes)
    one_shot_pages = num_pages(kinds, page, ONE_SHOT_LEN)
    return make_cache(kinds, page, 2 * pages + path_nodes * one_shot_pages), Agents(1, path_len)


def cold_match(
    kinds: Sequence[Kind], page: int, path_len: int, path_nodes: int
) -> dict[str, float]:
    """A long prompt that comes without a mark: ms of the whole door, and of the match alone.

    The least of 21, as with the turns.
    """
    cache, agents = _session(kinds, page, path_len, path_nodes)
    server, tokens = CacheServer(cache), np.empty(0, dtype=np.int32)
    turns = path_nodes // 2
    for step in agents.turns(turns, path_len // turns):
        server.serve(step)
        tokens = tokens if step.session is None else step.tokens
    prompt = np.concatenate([tokens, np.arange(50, dtype=np.int32)])
    gc.collect()
    acquire_s, match_s, found = [], [], 0
    for _ in range(_COLD_REPETITIONS):
        begin = thread_time()
        lease = cache.acquire(NAMESPACE, prompt)
        acquire_s.append(thread_time() - begin)
        if lease.boundary != len(tokens) - 1:
            raise RuntimeError(f"{lease.boundary} tokens found, not {len(tokens) - 1}")
        found = len(cache.tree.path(lease.locked))
        cache.release(lease)
        begin = thread_time()
        cache.tree.match(cache.tree.root(NAMESPACE), prompt, len(prompt) - 1)
        match_s.append(thread_time() - begin)
    return {
        "ms_per_turn_mean": 1000 * min(acquire_s),
        "match_only_ms": 1000 * min(match_s),
        "num_nodes": found,
        "final_tokens": len(prompt),
    }


def evictions(policy: str, entries: Sequence[int]) -> list[dict[str, float]]:
    """Ms of one eviction in caches of so many entries, of which live sessions stand on a fourth."""
    caches = [_idle_entries(policy, num) for num in entries]
    took, rounds = [0.0] * len(entries), min(entries) // 2 // _EVICTIONS_IN_TURN
    gc.collect()
    for _ in range(rounds):  # by turns, so that a slow second of the machine hits all
        for idx, cache in enumerate(caches):
            begin = thread_time()
            for _ in range(_EVICTIONS_IN_TURN):
                if not cache.memory.evict_one():
                    raise RuntimeError("nothing left to evict")
            took[idx] += thread_time() - begin
    done = rounds * _EVICTIONS_IN_TURN
    return [
        {"ms_per_turn_mean": 1000 * seconds / done, "num_evictions": done, "num_entries": num}
        for seconds, num in zip(took, entries, strict=True)
    ]


def _idle_entries(policy: str, num_entries: int) -> HybridCache:
    kinds, page = (Kind.FULL, Kind.STATE), 64
    pages_each = num_pages(kinds, page, sum(_TINY_LENS))
    cache = make_cache(kinds, page, num_entries * pages_each, policy)
    server = CacheServer(cache)
    for number, step in enumerate(one_shots(num_entries // 2, *_TINY_LENS)):
        server.serve(step, keep=number % 2 == 0)  # each makes two entries
    if server.evictions.count:
        raise RuntimeError(f"{server.evictions.count} entries left before all were there")
    return cache


def records(kinds: Sequence[Kind], page: int, path_len: int, path_nodes: int) -> dict[str, float]:
    """Python's memory per node of one session's path, without token ids and slot indices."""
    cache, agents = _session(kinds, page, path_len, path_nodes)
    server, turns = CacheServer(cache), path_nodes // 2
    steps = [s for s in agents.turns(turns, path_len // turns) if s.session is not None]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for step in steps:
            server.serve(step)
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    num_nodes, data_bytes = 0, 0
    for node in cache.tree.nodes():
        num_nodes += 1
        data_bytes += node.tokens.nbytes
        data_bytes += sum(residency.slots.nbytes for residency in node.data.values())
    return {"bytes_per_node": (used - data_bytes) / num_nodes, "num_nodes": num_nodes}
