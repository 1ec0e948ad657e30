"""The order of policies whose scores change with time: all of them computed at once, in batches.

Candidates are rows of a table of columns. Pushing only makes a note; when somebody asks who is
first, the notes are written to rows, all scores are computed as arrays, and the lowest of them
become the next victims, in order. They leave one by one without another look at the rest, except
those that were pushed meanwhile, so the cost of an eviction is that of a batch divided by its size.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentcache.policy.base import Policy
from agentcache.policy.worth import is_entry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentcache.tree.node import Node

__all__ = ["Bools", "Floats", "ScoredOrder", "ScoredPolicy"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class ScoredPolicy(Policy):
    """A policy that scores all candidates together.

    fields: names of the columns it wants to know of each candidate. alone: whether the score of a
    candidate depends on nothing but its own values and the time, so on no other candidate.
    """

    fields: tuple[str, ...] = ()
    alone = False

    def order(self, num_pages: int) -> ScoredOrder:
        return ScoredOrder(self)

    @abstractmethod
    def fill(self, node: Node, now: float) -> Sequence[float]:
        """The node's values for `fields`."""

    @abstractmethod
    def scores(self, columns: Mapping[str, Floats], now: float) -> Floats:
        """A score per candidate; the lowest leaves first. Called with one candidate at least."""

    def taken(self, node: Node, score: float, now: float) -> None:
        """The entry with that score was chosen to leave."""


class ScoredOrder:
    """Entries by a score, the lowest first.

    Victims are chosen `share` of all candidates at a time, `least_batch` at least. Just before, the
    values of those that are about to be chosen are looked up again, since what lies around an entry
    may have changed without its being pushed. With a batch of one, each victim is exactly the one
    of the lowest score; of equals, the one that has been there longest.
    """

    def __init__(
        self, policy: ScoredPolicy, *, least_batch: int = 4, share: float = 1 / 64
    ) -> None:
        self._policy = policy
        self._least_batch = least_batch
        self._share = share
        self._changed: dict[Node, None] = {}
        self._table = _Table(policy.fields)
        self._victims: deque[tuple[Node, float, int]] = deque()
        self._ticket = itertools.count(1)

    def __len__(self) -> int:
        """Candidates that are known, without those that were only noted."""
        return len(self._table)

    def push(self, node: Node, now: float) -> None:
        node.stamp = 0  # whatever it was chosen for no longer holds
        self._changed[node] = None

    def remove(self, node: Node) -> None:
        self._changed.pop(node, None)
        self._take_out(node)

    def shelve(self, node: Node, now: float) -> None:
        self.remove(node)

    def pop(self, now: float) -> Node | None:
        while True:
            while self._victims:
                node, score, ticket = self._victims.popleft()
                if node.stamp == ticket:
                    self._take_out(node)
                    self._policy.taken(node, score, now)
                    return node
            if not self._choose(now):
                return None

    def _take_out(self, node: Node) -> None:
        node.stamp = 0
        if node.queue >= 0:
            self._table.drop(node)

    def _write(self, now: float) -> None:
        for node in self._changed:
            if not is_entry(node):
                self._take_out(node)
                continue
            self._table.write(node, self._policy.fill(node, now))
        self._changed.clear()

    def _choose(self, now: float) -> bool:
        """Choose the next victims; whether there are any."""
        self._write(now)
        table = self._table
        if not len(table):
            return False
        count = min(len(table), max(self._least_batch, int(self._share * len(table))))
        nodes, scores = self._lowest(count, now)
        if self._refresh(nodes, now):
            nodes, scores = self._still_lowest(nodes, scores[-1], now)
            if not nodes:
                nodes, scores = self._lowest(min(count, len(table)), now)
        for node, score in zip(nodes, scores, strict=True):
            node.stamp = next(self._ticket)
            self._victims.append((node, score, node.stamp))
        return bool(nodes)

    def _refresh(self, nodes: Sequence[Node], now: float) -> bool:
        """Look the values of some nodes up again; whether that changed any."""
        changed = False
        for node in nodes:
            if is_entry(node):
                changed |= self._table.write(node, self._policy.fill(node, now))
            else:
                self._take_out(node)
                changed = True
        return changed

    def _still_lowest(
        self, nodes: Sequence[Node], limit: float, now: float
    ) -> tuple[list[Node], list[float]]:
        """Those of the lowest candidates that are still no higher than `limit`, below which no
        other one is, in order, and their scores. None where that takes a look at all of them."""
        table = self._table
        rows = np.array([node.queue for node in nodes if node.queue >= 0], dtype=np.int64)
        if not len(rows) or not self._policy.alone:
            return [], []
        scores = self._policy.scores(table.values(rows), now)
        is_low = scores <= limit
        rows, scores = rows[is_low], scores[is_low]
        order = np.lexsort((table.tickets[rows], scores))
        return [table.nodes[row] for row in rows[order].tolist()], scores[order].tolist()

    def _lowest(self, count: int, now: float) -> tuple[list[Node], list[float]]:
        """The `count` candidates of the lowest scores, in order, and the scores."""
        table = self._table
        if not len(table):
            return [], []
        scores = self._policy.scores(table.values(), now)
        if count < len(scores):
            first = count - 1
            limit = np.partition(scores, first)[first] if first else scores[scores.argmin()]
            near = (scores <= limit).nonzero()[0]
        else:
            near = np.arange(len(scores))
        if len(near) > 1:
            near = near[np.lexsort((table.tickets[near], scores[near]))][:count]
        return [table.nodes[row] for row in near.tolist()], scores[near].tolist()


class _Table:
    """Columns without gaps, which grow by doubling. A node's row is its `queue`; the last row moves
    to where one has left."""

    def __init__(self, fields: Sequence[str]) -> None:
        self.tickets = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self.nodes: list[Node] = []
        self._fields = fields
        self._columns: Floats = np.zeros((len(fields), _FIRST_ROWS))
        self._written: list[Sequence[float]] = []
        self._ticket = itertools.count()

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return len(self.tickets)

    def values(self, rows: Ints | None = None) -> dict[str, Floats]:
        """The columns as far as they are in use, which hold until the next change, or of some
        rows."""
        used = self._columns[:, : len(self.nodes)] if rows is None else self._columns[:, rows]
        return dict(zip(self._fields, used, strict=True))

    def write(self, node: Node, values: Sequence[float]) -> bool:
        """Put a node's values into its row, or into a new one; whether they are others."""
        row = node.queue
        if row < 0:
            row = node.queue = len(self.nodes)
            if row == self.capacity:
                self._grow()
            self.nodes.append(node)
            self._written.append(values)
            self.tickets[row] = next(self._ticket)
        elif self._written[row] == values:
            return False
        self._written[row] = values
        self._columns[:, row] = values
        return True

    def drop(self, node: Node) -> None:
        row, node.queue = node.queue, -1
        moved, values = self.nodes.pop(), self._written.pop()
        if moved is node:
            return
        moved.queue = row
        self.nodes[row], self._written[row] = moved, values
        last = len(self.nodes)
        self.tickets[row] = self.tickets[last]
        self._columns[:, row] = self._columns[:, last]

    def _grow(self) -> None:
        self.tickets = np.concatenate([self.tickets, np.zeros_like(self.tickets)])
        self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)


_FIRST_ROWS = 256
