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

from functools import lru_cache
from math import log
from typing import TYPE_CHECKING

import numpy as np

from agentcache.policy.base import Origin
from agentcache.policy.coverage import is_checkpoint
from agentcache.policy.hazard import SHARES, ReturnTimes, Waiting
from agentcache.policy.history import History
from agentcache.policy.scored import ScoredOrder, ScoredPolicy
from agentcache.policy.worth import freed_bytes, usable_above

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agentcache.policy.base import Arrival, Costs, Filed
    from agentcache.policy.hazard import Floats, Ints
    from agentcache.policy.history import Boundary
    from agentcache.tree.node import Node

__all__ = ["Learned"]


_NOBODY, _PASSED, _OVER, _STANDING = range(4)
"""What session handles say of a boundary. Plain numbers, since this is asked several times a turn,
and members of an enumeration take longer to reach."""

_MOST_USES = 4
_NUM_TURNS, _NUM_SIZES = 3, 4
_LIVE = 0
"""The class of whatever a live session stands on."""

_NUM_CLASSES = 1 + len(Origin) * (_MOST_USES + 1) * _STANDING

_FADING = 0.8
"""What an older gap between uses still counts after each further one."""

_FORGETTING = 0.99
"""What an older judgement of rhythms still counts after each further one."""

_PRICE = 3.0
"""A checkpoint that only the memory of evicted tokens asks for has to promise so many times what
the entries promised that had to leave."""

_MOST_LENGTHS = 2**14
"""Lengths of which the work is kept: that of an entry is asked for several times while it lives."""

_UNKNOWN = 1e-9
"""Uses per second of what nothing is remembered of."""


class Learned(ScoredPolicy):
    """Expected work saved per byte and second, learned; see the module.

    costs: of the model. history: what is remembered of boundaries.
    """

    fields = ("per_byte", "row", "ticket")
    alone = True
    wants_boundaries = True

    def __init__(self, costs: Costs, history: History | None = None) -> None:
        self._costs = costs
        self._upto = lru_cache(_MOST_LENGTHS)(costs.flops.upto)
        self._history = History() if history is None else history
        self._times = ReturnTimes(_NUM_CLASSES, (_NUM_TURNS, _NUM_SIZES))
        self._shares = ReturnTimes(1, starts=SHARES)
        self._trust = self._trust_in_rhythm = 0.0
        self._known: dict[Node, Boundary] = {}
        self._rows = _Rows(_FIRST_ROWS)
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
        arrival.notes.update(start=last or start, turn=turn)
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
            start=last or start,
        )
        arrival.notes["start"] = branch
        self._note(branch, _class_of(branch, _standing(branch)))
        self._forget(now)
        return (branch_len,) if self._is_worth(branch, arrival.boundary) else ()

    def _is_worth(self, branch: Boundary, boundary: int) -> bool:
        """Whether a checkpoint there promises more than what had to leave lately."""
        if not self._learn_at:
            return True
        place = self._times.place(branch.kind, branch.group)
        rate = self._times.index_at(np.array([place]), np.zeros(1))[0]
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
        notes["start"] = boundary
        if filed.origin is Origin.END and boundary.used_at < filed.at:
            self._end_wait(boundary, filed.at, used=False)
            boundary.used_at, boundary.uses = filed.at, 0
        if boundary.live is not filed.node:
            if boundary.live is not None:
                self._known.pop(boundary.live, None)
            boundary.live = filed.node
            self._known[filed.node] = boundary
        self._note(boundary, _class_of(boundary, _standing(boundary)))
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
        self._judge_rhythm(boundary, now)
        self._end_wait(boundary, now, used=True)
        gap = now - boundary.used_at
        boundary.gaps = _FADING * boundary.gaps + 1
        boundary.gap_s = _FADING * boundary.gap_s + gap
        boundary.uses += 1
        boundary.used_at = now
        self._history.refresh(boundary)
        self._rows.expected[boundary.row] = 0.0
        was_live = boundary.kind == _LIVE  # its own session moves past it
        self._note(boundary, _class_of(boundary, _PASSED if was_live else _standing(boundary)))

    def _judge_rhythm(self, boundary: Boundary, now: float) -> None:
        """Whether the boundary's own rhythm foretold this use better than its class did.

        A rhythm is a rate of which nothing is known but these gaps, and one of the class's.
        """
        gaps = self._rows.gaps.item(boundary.row)
        if not gaps or not self._learn_at:
            return
        waited, span = max(0.0, now - boundary.used_at), self._rows.span.item(boundary.row)
        plain = self._times.surprise(boundary.kind, boundary.group, waited)
        own = (gaps + 1) * log(span + waited) - gaps * log(span) - log(gaps)
        self._trust_in_rhythm = _FORGETTING * self._trust_in_rhythm + plain - own

    def _end_wait(self, boundary: Boundary, now: float, *, used: bool) -> None:
        kind, group = boundary.kind, boundary.group
        waited = max(0.0, now - boundary.used_at)
        self._times.ended(kind, group, waited, used=used)
        if kind != _LIVE:
            return
        expected = float(self._rows.expected[boundary.row])
        if expected:
            if used and self._learn_at:
                plain = self._times.surprise(kind, group, waited)
                hinted = self._shares.surprise(0, 0, waited / expected) + np.log(expected)
                self._trust = 0.95 * self._trust + float(plain - hinted)
            self._shares.ended(0, 0, waited / expected, used=used)

    def _move(self, boundary: Boundary, now: float) -> None:
        """Put a boundary into the class that it is of now."""
        kind = _class_of(boundary, _standing(boundary))
        if kind != boundary.kind:
            self._end_wait(boundary, now, used=False)
            self._note(boundary, kind)

    def _note(self, boundary: Boundary, kind: int) -> None:
        if boundary.group < 0:
            boundary.group = _group_of(boundary)
        boundary.kind = kind
        self._rows.write(boundary, self._times.place(kind, boundary.group))

    def _forget(self, now: float) -> None:
        for boundary in self._history.forgotten():
            self._end_wait(boundary, now, used=False)
            self._rows.clear(boundary.row)
            if boundary.live is not None:
                self._known.pop(boundary.live, None)

    def fill(self, node: Node, now: float) -> Sequence[float]:
        boundary = self._known.get(node)
        row = ticket = -1
        if boundary is not None and (node.is_leaf or is_checkpoint(node)):
            self._move(boundary, now)
            row = boundary.row
            ticket = self._rows.ticket.item(row)
        saved = self._upto(node.end) - self._upto(usable_above(node))
        return saved / (freed_bytes(node, self._costs) or 1), row, ticket

    def scores(self, columns: Mapping[str, Floats], now: float) -> Floats:
        if self._num_arrivals >= self._learn_at:
            self._learn(now)
        rows = columns["row"].astype(np.int64)
        is_known = self._rows.ticket.take(rows) == columns["ticket"]
        rate = np.where(is_known, self._rate(rows, now), _UNKNOWN)
        worth: Floats = rate * columns["per_byte"]
        return worth

    def _learn(self, now: float) -> None:
        self._times.learn(self._rows.waiting(now))
        self._shares.learn(self._rows.expecting(now))
        self._rows.learn(self._times.mean)
        self._learn_at = self._num_arrivals + min(512, max(8, self._num_arrivals // 8))

    def _rate(self, rows: Ints, now: float) -> Floats:
        """Uses per second that the boundaries are worth keeping for; any number for row -1."""
        table = self._rows
        age = np.maximum(now - table.used_at.take(rows), 0.0)
        rate = self._times.index_at(table.place.take(rows), age)
        if self._trust_in_rhythm >= 0:
            gaps = table.gaps.take(rows)
            rate = np.where(gaps > 0, gaps / (table.span.take(rows) + age), rate)
        return self._hinted(rate, rows, age) if self._trust > 0 else rate

    def _hinted(self, rate: Floats, rows: Ints, age: Floats) -> Floats:
        """Rates; of live boundaries with an announcement, by what was announced."""
        expected = self._rows.expected.take(rows)
        is_hinted = (expected > 0) & (self._rows.kind.take(rows) == _LIVE)
        if not is_hinted.any():
            return rate
        some = np.maximum(expected, 1e-3)
        everywhere = np.zeros(len(rows), dtype=np.int64)
        return np.where(is_hinted, self._shares.index_at(everywhere, age / some) / some, rate)

    def taken(self, node: Node, score: float, now: float) -> None:
        self._price = 0.9 * self._price + 0.1 * score if self._price else score


def _standing(boundary: Boundary) -> int:
    node = boundary.live
    if node is None or node.generation:
        return _NOBODY
    if node.refs > 0 and not node.structural:
        return _STANDING
    if node.superseded:
        return _OVER if node.is_leaf else _PASSED
    return _NOBODY


def _class_of(boundary: Boundary, standing: int) -> int:
    if standing == _STANDING:
        return _LIVE
    uses = boundary.uses if boundary.uses < _MOST_USES - 1 else _MOST_USES - (boundary.uses < 6)
    return 1 + (boundary.origin * (_MOST_USES + 1) + uses) * _STANDING + standing


def _group_of(boundary: Boundary) -> int:
    """By the turns before it and its length: below 1,024 tokens, 4,096, 16,384, and above."""
    size = min(max((boundary.node.end.bit_length() - 9) // 2, 0), _NUM_SIZES - 1)
    return min(boundary.turn, _NUM_TURNS - 1) * _NUM_SIZES + size


class _Rows:
    """What is known of each boundary, as columns by its row.

    kind: -1 in a row that is free. place: of class and group among the return times. gaps: more
    than 0 only where a boundary has its own rhythm, which is gaps / (span + its age). gap_s:
    what it adds to its class's mean gap in span. ticket: how often the row was freed.
    """

    def __init__(self, size: int) -> None:
        self.kind: Ints = np.full(size, -1)
        self.group: Ints = np.zeros(size, dtype=np.int64)
        self.place: Ints = np.zeros(size, dtype=np.int64)
        self.used_at: Floats = np.zeros(size)
        self.gaps: Floats = np.zeros(size)
        self.gap_s: Floats = np.zeros(size)
        self.span: Floats = np.ones(size)
        self.expected: Floats = np.zeros(size)
        self.ticket: Ints = np.zeros(size, dtype=np.int64)
        self._mean_gaps: Floats = np.zeros(_NUM_CLASSES)

    def write(self, boundary: Boundary, place: int) -> None:
        row, kind = boundary.row, boundary.kind
        while row >= len(self.kind):
            self._grow()
        self.kind[row], self.group[row], self.place[row] = kind, boundary.group, place
        self.used_at[row] = boundary.used_at
        if boundary.uses > 1 and kind != _LIVE:
            self.gaps[row], self.gap_s[row] = boundary.gaps + 1, boundary.gap_s
            self.span[row] = self._mean_gaps[kind] + boundary.gap_s
        else:
            self.gaps[row] = 0.0

    def learn(self, mean: Floats) -> None:
        """Each class's uses per second are these from now on."""
        self._mean_gaps = 1 / mean
        self.span = self._mean_gaps[self.kind] + self.gap_s  # free rows get some number

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
        more = vars(_Rows(len(self.kind)))
        for name, column in vars(self).items():
            if name != "_mean_gaps":
                setattr(self, name, np.concatenate([column, more[name]]))


_FIRST_ROWS = 1024
