"""The memory of a simulation: pages that are counted and hold nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.errors import ConfigError
from agentcache.pools.base import Counting, RowAllocator
from agentcache.pools.pages import PageAllocator
from agentcache.replay.need import NeedCounter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.simulate.results import Setup
    from agentcache.simulate.trace import SimRequest, Trace
    from agentcache.types import ModelShape

__all__ = ["Arena"]

_MOST_PAGES = 2**27
"""Above so many pages their own bookkeeping takes gigabytes."""


@dataclass(frozen=True, slots=True)
class Arena:
    """pools: all pages. limit_pages: how many may be held between requests. has_kv: whether tokens
    leave KV behind."""

    pools: Counting
    limit_pages: int
    has_kv: bool

    @classmethod
    def of(cls, trace: Trace, shape: ModelShape, setup: Setup) -> Arena:
        """Pages for a budget, or for all of the trace where there is none.

        Raises ConfigError for a budget of less than a page, and for more pages than can be counted.
        """
        kv_bytes, state_bytes = shape.kv_bytes_per_token, shape.state_bytes
        if not kv_bytes and not state_bytes:
            raise ConfigError("the shape keeps neither KV nor states; there is nothing to cache")
        page_bytes = setup.page_size * kv_bytes or state_bytes
        room = _Room(setup.page_size if kv_bytes else 0, -(-state_bytes // page_bytes), setup)
        requests = trace.requests
        if setup.budget_bytes is None:
            limit = num_pages = room.pages(_distinct_tokens(trace), requests)
        else:
            limit = num_pages = setup.budget_bytes // page_bytes
            if not setup.charge_running:
                num_pages += max(room.pages(len(each.ids), [each]) for each in requests)
        if limit < 1:
            raise ConfigError(
                f"a budget of {setup.budget_bytes:,} bytes holds no page of {page_bytes:,} bytes; "
                "give more, or a smaller page size"
            )
        if num_pages > _MOST_PAGES:
            raise ConfigError(
                f"{num_pages:,} pages of {page_bytes:,} bytes are more than the {_MOST_PAGES:,} "
                "that can be counted; give a larger page size"
            )
        pools = Counting(
            PageAllocator(num_pages), RowAllocator(1), room.state_pages, page_bytes, state_bytes
        )
        return cls(pools, limit, kv_bytes > 0)


def _distinct_tokens(trace: Trace) -> int:
    counter = NeedCounter()
    for request in trace.requests:
        counter.add(request.ids, request.prompt_len)
    return counter.num_tokens


@dataclass(frozen=True, slots=True)
class _Room:
    """How many pages requests can take. page_size: 0 where tokens leave no KV."""

    page_size: int
    state_pages: int
    setup: Setup

    def pages(self, num_tokens: int, requests: Sequence[SimRequest]) -> int:
        """Enough for requests of so many distinct tokens with all of their checkpoints.

        Each entry ends inside a page, which the next one may have a copy of.
        """
        entries = sum(3 + len(each.marks) + len(each.passing) for each in requests)
        block_len = self.setup.block_len
        if block_len is not None:
            entries += num_tokens // block_len
        pages = entries * (2 + self.state_pages)
        return pages + (-(-num_tokens // self.page_size) if self.page_size else 0)
