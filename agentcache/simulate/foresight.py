"""Eviction by what will really be asked for: the order of a cache that knows its trace."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from agentcache.policy.base import Policy
from agentcache.policy.coverage import above, is_checkpoint
from agentcache.types import Kind

if TYPE_CHECKING:
    import numpy.typing as npt

    from agentcache.policy.base import Costs
    from agentcache.simulate.future import Future
    from agentcache.simulate.trace import SimRequest
    from agentcache.tree.node import Node

    _Floats = npt.NDArray[np.float64]

__all__ = ["Foresight"]

_DEAD = -1e15
"""Far below any score; by as much as is freed, so sizes still count beside it."""

_MOST_LOOKED_AT = 200
"""Readers of an entry that are asked whether they will go on from it, before it counts as dead."""


class Foresight(Policy):
    """Evicts by each entry's next use. What nobody will use leaves first, the largest of it before.

    power: of the time until the next use, by which tokens saved per byte freed are divided;
    infinite: whose next use comes last leaves first. clock: per request what time it is then, and
    once more for the end; by default requests are counted. fallback: as what share of its tokens an
    entry counts that all its readers have something deeper than: it is what they fall back on if
    that leaves, so that long trajectories may stay in part.

    Greedy: next uses are those that the entries of the moment would have.
    """

    def __init__(
        self,
        future: Future,
        costs: Costs,
        *,
        power: float = 1.0,
        clock: _Floats | None = None,
        fallback: float = 0.0,
    ) -> None:
        self.costs = costs
        self.power = power
        self.clock = np.arange(len(future.requests) + 1.0) if clock is None else clock
        self.now = -1
        self._cuts_anywhere = not costs.checkpoint_bytes
        self._fallback = fallback
        self._future = future
        self._origins: dict[Node, int] = {}

    def order(self, num_pages: int) -> _Order:
        return _Order(self)

    def leads_to(self, node: Node) -> None:
        """The present request has filed a path down to that node."""
        above: Node | None = node
        while above is not None and above not in self._origins:
            self._origins[above] = self.now
            above = above.parent

    def next_use(self, node: Node) -> tuple[int | None, float]:
        """The next request that would go on from a node's end, with what the cache holds now, and
        as what share of its tokens it counts for that."""
        readers = self._future.readers(self._origin(node), node.end)
        first = bisect_right(readers, self.now)
        next_reader: int | None = None
        for index in readers[first : first + _MOST_LOOKED_AT]:
            request = self._future.requests[index]
            if node.end >= request.prompt_len:
                continue
            if not self._goes_deeper(node, request):
                return index, 1.0
            next_reader = index if next_reader is None else next_reader
        return (next_reader, self._fallback) if self._fallback else (None, 0.0)

    def _goes_deeper(self, node: Node, request: SimRequest) -> bool:
        """Whether a request that holds the node's path would find a boundary below it."""
        limit = request.prompt_len - 1
        while node.end < limit:
            child = node.child(int(request.ids[node.end]))
            if child is None:
                return False
            if self._cuts_anywhere:
                return True
            if child.end > limit or child.raw != request.ids[node.end : child.end].tobytes():
                return False
            if is_checkpoint(child):
                return True
            node = child
        return False

    def _origin(self, node: Node) -> int:
        """A request that the node's path is the beginning of."""
        return self._origins.get(node, self.now)  # not filed yet: it is being inserted


class _Order:
    """All entries in a table, one row each; scored together at every eviction."""

    def __init__(self, policy: Foresight) -> None:
        self._policy = policy
        self._changed: dict[Node, None] = {}
        self._rows: dict[Node, int] = {}
        self._nodes: list[Node | None] = []
        self._free: list[int] = []
        self._table = np.zeros((3, 256))  # next use (infinite: none), tokens saved, bytes freed

    def push(self, node: Node, now: float) -> None:
        self._changed[node] = None

    def remove(self, node: Node) -> None:
        self._changed.pop(node, None)
        self._drop(node)

    def shelve(self, node: Node, now: float) -> None:
        self._drop(node)

    def pop(self, now: float) -> Node | None:
        self._update()
        if not self._rows:
            return None
        node = self._nodes[int(np.argmin(self._scores()))]
        assert node is not None
        self._drop(node)
        return node

    def _update(self) -> None:
        for node in self._changed:
            if node.generation or node.is_root or not (node.is_leaf or is_checkpoint(node)):
                self._drop(node)
            else:
                self._fill(node)
        self._changed.clear()

    def _drop(self, node: Node) -> None:
        row = self._rows.pop(node, None)
        if row is not None:
            self._nodes[row] = None
            self._free.append(row)

    def _fill(self, node: Node) -> None:
        row = self._rows.get(node)
        if row is None:
            row = self._rows[node] = self._new_row()
            self._nodes[row] = node
        policy, before = self._policy, above(node)
        index, share = policy.next_use(node)
        self._table[:, row] = (
            np.inf if index is None else policy.clock[index],
            share * (node.end - (0 if before is None else before.end)),
            _freed_bytes(node, policy.costs),
        )

    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._nodes.append(None)
        if len(self._nodes) > self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        return len(self._nodes) - 1

    def _scores(self) -> _Floats:
        policy = self._policy
        score: _Floats
        uses, saved, size = self._table[:, : len(self._nodes)]
        wait = np.maximum(uses - policy.clock[max(policy.now, 0)], 1e-9)
        if np.isinf(policy.power):
            score = -wait
        else:
            score = saved / np.maximum(size, 1.0) / wait**policy.power
        score = np.where(np.isinf(uses), _DEAD - size, score)
        score[self._free] = np.inf
        return score


def _freed_bytes(node: Node, costs: Costs) -> float:
    """What leaves with a node: its checkpoint, and at the bottom the KV that is only its own."""
    freed = costs.checkpoint_bytes if Kind.STATE.value in node.data else 0
    if node.is_leaf:
        top = node
        while (
            top.parent is not None
            and not top.parent.is_root
            and top.parent.num_children == 1
            and not is_checkpoint(top.parent)
            and not top.parent.locks
        ):
            top = top.parent
        freed += (node.end - top.start) * costs.token_bytes
    return freed
