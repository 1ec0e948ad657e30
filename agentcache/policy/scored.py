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


class ScoredPolicy(Policy):
    """A policy that scores all candidates together.

    fields: names of the columns it wants to know of each candidate.
    """

    fields: tuple[str, ...] = ()

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

    def _lowest(self, count: int, now: float) -> tuple[list[Node], list[float]]:
        """The `count` candidates of the lowest scores, in order, and the scores."""
        rows = self._table.rows()
        if not len(rows):
            return [], []
        columns = {name: column[rows] for name, column in self._table.columns.items()}
        scores = self._policy.scores(columns, now)
        if count < len(rows):
            limit = np.partition(scores, count - 1)[count - 1]
            near = np.flatnonzero(scores <= limit)
        else:
            near = np.arange(len(rows))
        ages = self._table.tickets[rows[near]]
        chosen = near[np.lexsort((ages, scores[near]))][:count]
        nodes = [self._table.node(row) for row in rows[chosen].tolist()]
        return nodes, scores[chosen].tolist()


class _Table:
    """Columns that grow by doubling. A node's row is its `queue`; free rows are used again."""

    def __init__(self, fields: Sequence[str]) -> None:
        self.columns: dict[str, Floats] = {name: np.zeros(_FIRST_ROWS) for name in fields}
        self.tickets = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self._alive = np.zeros(_FIRST_ROWS, dtype=bool)
        self._nodes: list[Node | None] = []
        self._free: list[int] = []
        self._ticket = itertools.count(1)

    def __len__(self) -> int:
        return len(self._nodes) - len(self._free)

    def node(self, row: int) -> Node:
        node = self._nodes[row]
        assert node is not None
        return node

    def rows(self) -> npt.NDArray[np.intp]:
        """Rows that are in use."""
        return np.flatnonzero(self._alive[: len(self._nodes)])

    def write(self, node: Node, values: Sequence[float]) -> bool:
        """Put a node's values into its row, or into a new one; whether they are others."""
        row = node.queue
        if row < 0:
            row = node.queue = self._take_row()
            self._nodes[row] = node
            self._alive[row] = True
            self.tickets[row] = next(self._ticket)
        changed = False
        for column, value in zip(self.columns.values(), values, strict=True):
            if column[row] != value:
                column[row] = value
                changed = True
        return changed

    def drop(self, node: Node) -> None:
        row, node.queue = node.queue, -1
        self._nodes[row] = None
        self._alive[row] = False
        self._free.append(row)

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        row = len(self._nodes)
        self._nodes.append(None)
        if row == len(self._alive):
            self._grow()
        return row

    def _grow(self) -> None:
        more = len(self._alive)
        self.columns = {
            name: np.concatenate([column, np.zeros(more)]) for name, column in self.columns.items()
        }
        self.tickets = np.concatenate([self.tickets, np.zeros(more, dtype=np.int64)])
        self._alive = np.concatenate([self._alive, np.zeros(more, dtype=bool)])


_FIRST_ROWS = 256
