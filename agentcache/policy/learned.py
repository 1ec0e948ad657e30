"""Learned worth: what leaves is what is worth least per byte and second, by what its kind taught.

An entry's score is the work that it is expected to save per second that it stays, over the bytes
that its leaving frees:

    rate of return x FLOPs saved against the next usable ancestor / bytes freed

The rate is the Gittins index of its class (see `policy.hazard`), which is learned from when
boundaries were used again in this very traffic, whether the cache still had them or not (see
`policy.history`). Classes tell apart why there is a boundary, how often it was used, and what a
session handle says of it: a live trajectory stands there, has moved past it, or is over. Without
handles the same classes are learned from tokens alone.
"""

from __future__ import annotations

from enum import IntEnum
from math import log2
from typing import TYPE_CHECKING

import numpy as np

from agentcache.policy.base import Origin
from agentcache.policy.coverage import is_checkpoint
from agentcache.policy.hazard import SHARES, ReturnTimes, Waiting
from agentcache.policy.history import History
from agentcache.policy.scored import ScoredOrder, ScoredPolicy
from agentcache.policy.worth import freed_bytes, saved_flops

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentcache.policy.base import Arrival, Costs, Filed
    from agentcache.policy.hazard import Floats, Ints
    from agentcache.policy.history import Boundary
    from agentcache.tree.node import Node

__all__ = ["Learned"]


class _Standing(IntEnum):
    """What session handles say of a boundary."""

    NOBODY = 0
    PASSED = 1
    OVER = 2
    LIVE = 3


_MOST_USES = 4
_NUM_TURNS, _NUM_SIZES = 3, 4
_LIVE = 0
_NUM_CLASSES = 1 + len(Origin) * (_MOST_USES + 1) * _Standing.LIVE

_FADING = 0.8
"""What an older gap between uses still counts after each further one."""

_PRICE = 3.0
"""A checkpoint that only the memory of evicted tokens asks for has to promise so many times what
the entries promised that had to leave."""

_UNKNOWN = 1e-9
"""Uses per second of what nothing is remembered of."""


class Learned(ScoredPolicy):
    """Expected work saved per byte and second, learned; see the module.

    costs: of the model. history: what is remembered of boundaries. tilt: what an index still counts
    after each doubling of the time since the last use. Below 1 the order leans to plain recency,
    which does better where times between uses are spread over everything, as in chats of people.
    """

    fields = ("saved", "bytes", "row", "ticket")
    wants_boundaries = True

    def __init__(self, costs: Costs, history: History | None = None, *, tilt: float = 1.0) -> None:
        self._costs = costs
        self.tilt = tilt
        self._history = History() if history is None else history
        self._times = ReturnTimes(_NUM_CLASSES, (_NUM_TURNS, _NUM_SIZES))
        self._shares = ReturnTimes(1, starts=SHARES)
        self._trust = 0.0
        self._known: dict[Node, Boundary] = {}
        self._rows = _Rows()
        self._price = 0.0
        self._num_arrivals = self._learn_at = 0

    def order(self, num_pages: int) -> ScoredOrder:
        return ScoredOrder(self, least_batch=1, share=1 / 256)

    def arrives(self, arrival: Arrival) -> tuple[int, ...]:
        """Learn what the request uses; a branch point that only the history knows, if it is worth
        a checkpoint."""
        history, now = self._history, arrival.at
        start = self._known.get(arrival.start)
        limit = len(arrival.tokens) - 1
        known_len, last = history.look_up(
            arrival.namespace, arrival.tokens, limit, arrival.salts, start
        )
        found = self._known.get(arrival.boundary_node)
        turn = 0
        for line in (start, last):
            if line is not None and line.origin is Origin.END:
                turn = max(turn, line.turn + 1)
        arrival.notes.update(start=start, turn=turn)
        for used in {id(each): each for each in (last, found) if each is not None}.values():
            self._use(used, now)
        self._num_arrivals += 1
        branch_len = min(known_len, limit)
        if branch_len <= arrival.boundary:
            return ()
        branch = history.remember(
            arrival.namespace,
            arrival.tokens,
            branch_len,
            Origin.BRANCH,
            now,
            salts=arrival.salts,
            start=start,
        )
        self._note(branch, _class_of(branch, self._standing(branch)))
        self._forget(now)
        return (branch_len,) if self._is_worth(branch, arrival.boundary) else ()

    def _is_worth(self, branch: Boundary, boundary: int) -> bool:
        """Whether a checkpoint there promises more than what had to leave lately."""
        if not self._learn_at:
            return True
        at = np.array([branch.row])
        rows = self._rows
        rate = self._times.index(rows.kind[at], rows.group[at], np.zeros(1))[0]
        saved = self._costs.flops.between(boundary, branch.node.end)
        return bool(rate * saved >= _PRICE * self._price * max(1, self._costs.checkpoint_bytes))

    def filed(self, filed: Filed) -> None:
        """Remember a boundary. One that a sequence ends on again waits anew."""
        notes = filed.notes
        boundary = self._history.remember(
            filed.namespace,
            filed.tokens,
            filed.node.end,
            filed.origin,
            filed.at,
            salts=filed.salts,
            start=notes.get("start"),
            turn=notes.get("turn", 0),
        )
        if filed.origin is Origin.END and boundary.used_at < filed.at:
            self._end_wait(boundary, filed.at, used=False)
            boundary.used_at, boundary.uses = filed.at, 0
        if boundary.live is not filed.node:
            if boundary.live is not None:
                self._known.pop(boundary.live, None)
            boundary.live = filed.node
            self._known[filed.node] = boundary
        self._note(boundary, _class_of(boundary, self._standing(boundary)))
        self._rows.expected[boundary.row] = 0.0
        self._forget(filed.at)

    def stands(self, node: Node, now: float) -> None:
        boundary = self._known.get(node)
        if boundary is not None:
            self._move(boundary, now)

    def expects(self, node: Node, seconds: float, now: float, session: str | None = None) -> None:
        boundary = self._known.get(node)
        if boundary is not None:
            self._rows.expected[boundary.row] = max(seconds, 1e-3)

    def _use(self, boundary: Boundary, now: float) -> None:
        """The boundary is used: learn from how long that took."""
        self._end_wait(boundary, now, used=True)
        gap = now - boundary.used_at
        boundary.gaps = _FADING * boundary.gaps + 1
        boundary.gap_s = _FADING * boundary.gap_s + gap
        boundary.uses += 1
        boundary.used_at = now
        self._history.refresh(boundary)
        self._rows.expected[boundary.row] = 0.0
        was_live = self._rows.kind[boundary.row] == _LIVE  # its own session moves past it
        standing = _Standing.PASSED if was_live else self._standing(boundary)
        self._note(boundary, _class_of(boundary, standing))

    def _end_wait(self, boundary: Boundary, now: float, *, used: bool) -> None:
        row = boundary.row
        kind, group = int(self._rows.kind[row]), int(self._rows.group[row])
        waited = max(0.0, now - boundary.used_at)
        self._times.ended(kind, group, waited, used=used)
        expected = self._rows.expected[row]
        if kind == _LIVE and expected:
            if used and self._learn_at:
                plain = self._times.surprise(kind, group, waited)
                hinted = self._shares.surprise(0, 0, waited / expected) + np.log(expected)
                self._trust = 0.95 * self._trust + float(plain - hinted)
            self._shares.ended(0, 0, waited / expected, used=used)

    def _standing(self, boundary: Boundary) -> _Standing:
        node = boundary.live
        if node is None or node.generation:
            return _Standing.NOBODY
        if node.refs > 0 and not node.structural:
            return _Standing.LIVE
        if node.superseded:
            return _Standing.OVER if node.is_leaf else _Standing.PASSED
        return _Standing.NOBODY

    def _move(self, boundary: Boundary, now: float) -> None:
        """Put a boundary into the class that it is of now."""
        kind = _class_of(boundary, self._standing(boundary))
        if kind != self._rows.kind[boundary.row]:
            self._end_wait(boundary, now, used=False)
            self._note(boundary, kind)

    def _note(self, boundary: Boundary, kind: int) -> None:
        self._rows.write(boundary, kind, _group_of(boundary))

    def _forget(self, now: float) -> None:
        for boundary in self._history.forgotten():
            self._end_wait(boundary, now, used=False)
            self._rows.clear(boundary.row)
            if boundary.live is not None:
                self._known.pop(boundary.live, None)

    def fill(self, node: Node, now: float) -> Sequence[float]:
        boundary = self._known.get(node)
        row = ticket = -1
        if boundary is not None and (is_checkpoint(node) or node.is_leaf):
            self._move(boundary, now)
            row, ticket = boundary.row, int(self._rows.ticket[boundary.row])
        return saved_flops(node, self._costs), freed_bytes(node, self._costs), row, ticket

    def scores(self, columns: Mapping[str, Floats], now: float) -> Floats:
        if self._num_arrivals >= self._learn_at:
            self._learn(now)
        rows = columns["row"].astype(np.int64)
        known = np.maximum(rows, 0)
        is_known = (rows >= 0) & (self._rows.ticket[known] == columns["ticket"])
        rate = np.where(is_known, self._rate(known, now), _UNKNOWN)
        worth: Floats = rate * columns["saved"] / np.maximum(columns["bytes"], 1)
        return worth

    def _learn(self, now: float) -> None:
        self._times.learn(self._rows.waiting(now))
        self._shares.learn(self._rows.expecting(now))
        self._learn_at = self._num_arrivals + min(512, max(8, self._num_arrivals // 8))

    def _rate(self, rows: Ints, now: float) -> Floats:
        """Uses per second that the boundaries are worth keeping for."""
        table = self._rows
        kind, age = table.kind[rows], np.maximum(now - table.used_at[rows], 0.0)
        rate = self._times.index(kind, table.group[rows], age, self.tilt)
        own = (table.gaps[rows] + 1) / (1 / self._times.mean[kind] + table.gap_s[rows] + age)
        rate = np.where((table.uses[rows] > 1) & (kind != _LIVE), own, rate)
        expected = table.expected[rows]
        if self._trust > 0 and expected.any():
            some = np.maximum(expected, 1e-3)
            none = np.zeros(len(rows), dtype=np.int64)
            hinted = self._shares.index(none, none, age / some) / some
            rate = np.where((expected > 0) & (kind == _LIVE), hinted, rate)
        return rate

    def taken(self, node: Node, score: float, now: float) -> None:
        self._price = 0.9 * self._price + 0.1 * score if self._price else score


def _class_of(boundary: Boundary, standing: _Standing) -> int:
    if standing is _Standing.LIVE:
        return _LIVE
    uses = boundary.uses if boundary.uses < _MOST_USES - 1 else _MOST_USES - (boundary.uses < 6)
    return 1 + (boundary.origin * (_MOST_USES + 1) + uses) * _Standing.LIVE + standing


def _group_of(boundary: Boundary) -> int:
    size = min(max(int(log2(boundary.node.end) / 2) - 4, 0), _NUM_SIZES - 1)
    return min(boundary.turn, _NUM_TURNS - 1) * _NUM_SIZES + size


class _Rows:
    """What is known of each boundary, as columns by its row; kind is -1 in a row that is free."""

    def __init__(self) -> None:
        self.kind: Ints = np.full(_FIRST_ROWS, -1)
        self.group: Ints = np.zeros(_FIRST_ROWS, dtype=np.int64)
        self.used_at: Floats = np.zeros(_FIRST_ROWS)
        self.uses: Floats = np.zeros(_FIRST_ROWS)
        self.gaps: Floats = np.zeros(_FIRST_ROWS)
        self.gap_s: Floats = np.zeros(_FIRST_ROWS)
        self.expected: Floats = np.zeros(_FIRST_ROWS)
        self.ticket: Ints = np.zeros(_FIRST_ROWS, dtype=np.int64)  # how often it was freed

    def write(self, boundary: Boundary, kind: int, group: int) -> None:
        row = boundary.row
        while row >= len(self.kind):
            self._grow()
        self.kind[row], self.group[row] = kind, group
        self.used_at[row], self.uses[row] = boundary.used_at, boundary.uses
        self.gaps[row], self.gap_s[row] = boundary.gaps, boundary.gap_s

    def clear(self, row: int) -> None:
        self.kind[row], self.expected[row] = -1, 0.0
        self.ticket[row] += 1

    def waiting(self, now: float) -> Waiting:
        rows = np.flatnonzero(self.kind >= 0)
        age = np.maximum(now - self.used_at[rows], 0.0)
        return Waiting(self.kind[rows], self.group[rows], age)

    def expecting(self, now: float) -> Waiting:
        """Live boundaries with an announcement; ages in shares of what was announced."""
        rows = np.flatnonzero((self.kind == _LIVE) & (self.expected > 0))
        age = np.maximum(now - self.used_at[rows], 0.0) / self.expected[rows]
        none = np.zeros(len(rows), dtype=np.int64)
        return Waiting(none, none, age)

    def _grow(self) -> None:
        for name, column in vars(self).items():
            more = np.full_like(column, -1) if name == "kind" else np.zeros_like(column)
            setattr(self, name, np.concatenate([column, more]))


_FIRST_ROWS = 1024
