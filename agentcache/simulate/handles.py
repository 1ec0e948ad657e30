"""What session handles tell the cache: where trajectories stand, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentcache.cache import common_prefix_len

if TYPE_CHECKING:
    from agentcache.cache import HybridCache, Lease, SessionRef
    from agentcache.simulate.trace import SimRequest
    from agentcache.types import IntArray

__all__ = ["Handles"]


@dataclass(frozen=True, slots=True, eq=False)
class _Tip:
    """Where a session stands."""

    ref: SessionRef
    ids: IntArray


class Handles:
    """One handle per session of a trace, each with one tip."""

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache
        self._tips: dict[str, _Tip] = {}

    def stands(self, request: SimRequest) -> tuple[SessionRef | None, int]:
        """The mark that a request goes on from, and how much of its path the prompt shares.

        A session whose first prompt goes on from where its parent stands was forked there.
        """
        if request.session is None:
            return None, 0
        prompt = request.ids[: request.prompt_len]
        tip = self._tips.get(request.session)
        if tip is None:
            parent = self._tips.get(request.parent) if request.parent is not None else None
            if parent is None or common_prefix_len(parent.ids, prompt) < len(parent.ids):
                return None, 0
            tip = _Tip(self._cache.stand_again(parent.ref), parent.ids)
            self._tips[request.session] = tip
        return tip.ref, common_prefix_len(tip.ids, prompt)

    def close(self, session: str) -> None:
        """The session is over."""
        tip = self._tips.pop(session, None)
        if tip is not None:
            self._cache.leave(tip.ref)

    def expects(self, session: str, seconds: float) -> None:
        """The session will be back in about so many seconds."""
        tip = self._tips.get(session)
        if tip is not None:
            self._cache.expect(seconds, tip.ref)

    def finish(self, request: SimRequest, lease: Lease) -> None:
        """The turn is over: its session stands at its end, or nowhere any more."""
        if request.session is None:
            return
        tip = self._tips.pop(request.session, None)
        after = tip.ref if tip is not None else None
        frontier = lease.frontier
        filed = [node for node in lease.filed if node is not frontier]
        ref = self._cache.stand(frontier, filed, after=after, lease=lease)
        if after is not None:
            self._cache.leave(after)
        if request.closes:
            self._cache.leave(ref)
            return
        self._tips[request.session] = _Tip(ref, request.ids)
