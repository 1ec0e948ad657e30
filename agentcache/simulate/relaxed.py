"""An upper bound on the hit rate that no policy can pass, whatever it knows.

For request k to reuse its first b tokens, the KV of each segment before b has to be there. Its
tokens can only have come into the cache with a request that holds them, so it has lain there at
least since the last such request: s_k(segment). So has the checkpoint at b, for only a request that
runs over position b has its state, since the last such request. In the gap between request t and
t + 1 the cache holds at most the budget B. For any prices p_t >= 0 of a byte during gap t:

    tokens served <= B * sum_t p_t + sum_k max_b (b - cost_k(b))

where cost_k(b) = sum over the gaps in which something was held for k of bytes times price. For
whatever was served, the costs of all requests together are at most B * sum_t p_t: no byte is
counted twice, because what is held for k was last held by the request before k that has it, and so
is held for no other request in between. Tails of pages, entries that turn out useless and
checkpoints that are held longer only add to what is left out here.

This is the dual of a relaxed problem in which entries are kept in fractions (as in PFOO-U, Berger
et al., SIGMETRICS 2018, there with one price for all gaps). Each choice of prices gives a bound
that is true; better prices only make it tighter. They are found by subgradient steps from the best
single price.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from agentcache.simulate.future import Future
    from agentcache.types import ModelShape

    _Floats = npt.NDArray[np.float64]
    _Ints = npt.NDArray[np.int64]

__all__ = ["RelaxedBound"]

_STEPS = 150


class RelaxedBound:
    """Tokens that any cache can serve of a trace, at most, for a budget.

    One row per choice (k, b): request k reuses its first b tokens. Only ends of segments are
    choices: within a segment a later end costs KV in proportion, and the same checkpoint.
    """

    def __init__(self, future: Future, shape: ModelShape) -> None:
        self._kv, self._state = shape.kv_bytes_per_token, shape.state_bytes
        self._num_gaps = max(0, len(future.requests) - 1)
        gains: list[int] = []
        lens: list[int] = []
        since: list[int] = []
        owners: list[int] = []
        starts: list[int] = []
        last: dict[object, int] = {}
        for index, (request, path) in enumerate(zip(future.requests, future.paths, strict=True)):
            starts.append(len(gains))
            limit, begin = request.prompt_len - 1, 0
            for node in path:
                if begin < limit and node in last:
                    stop = min(node.end, limit)
                    gains.append(stop)
                    lens.append(stop - begin)
                    since.append(last[node])
                    owners.append(index)
                last[node] = index
                begin = node.end
            if len(gains) == starts[-1]:
                starts.pop()
        self._gains = np.array(gains, dtype=np.float64)
        self._lens = np.array(lens, dtype=np.float64)
        self._since = np.array(since, dtype=np.int64)
        self._owners = np.array(owners, dtype=np.int64)
        self._starts = np.array(starts, dtype=np.int64)
        self.reusable = int(self._best(np.zeros(len(gains)))[0].sum()) if gains else 0

    def tokens(self, budget_bytes: int) -> int:
        """The most tokens that can be served with that budget."""
        if not len(self._gains) or not self._num_gaps:
            return self.reusable
        price = self._single_price(budget_bytes)
        prices = np.full(self._num_gaps, price)
        best, mean = float(self.reusable), prices.copy()
        wanted = self._dual(np.zeros(self._num_gaps), budget_bytes)[1]
        step_len = max(price, self.reusable / max(float(wanted.sum()), 1.0))
        for step in range(1, _STEPS + 1):
            value, used = self._dual(prices, budget_bytes)
            best = min(best, value)
            slope = (used - budget_bytes) / budget_bytes
            prices = np.maximum(0.0, prices + step_len * slope / np.sqrt(step))
            mean += (prices - mean) / (step + 1)
        best = min(best, self._dual(mean, budget_bytes)[0])
        return int(best + 1e-3)  # a whole number, however the sums were rounded

    def _single_price(self, budget_bytes: int) -> float:
        """The price, the same for all gaps, with the lowest bound; the bound is convex in it."""
        low, high = -60.0, 0.0  # exponents of 2

        def value(exponent: float) -> float:
            return self._dual(np.full(self._num_gaps, 2.0**exponent), budget_bytes)[0]

        for _ in range(50):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if value(left) <= value(right):
                high = right
            else:
                low = left
        return float(2.0 ** ((low + high) / 2))

    def _dual(self, prices: _Floats, budget_bytes: int) -> tuple[float, _Floats]:
        """The bound for given prices, and the bytes that its best choices hold in each gap."""
        paid = np.concatenate([[0.0], np.cumsum(prices)])
        held = paid[self._owners] - paid[self._since]
        cost = self._along(self._kv * self._lens * held) + self._state * held
        profit, chosen = self._best(cost)
        return float(budget_bytes * paid[-1] + profit.sum()), self._use(chosen)

    def _along(self, values: _Floats) -> _Floats:
        """Sums over each request's segments up to each."""
        total = np.cumsum(values)
        before = np.concatenate([[0.0], total])[self._starts]
        counts = np.diff(np.append(self._starts, len(values)))
        result: _Floats = total - np.repeat(before, counts)
        return result

    def _best(self, cost: _Floats) -> tuple[_Floats, _Ints]:
        """Per request the most that a choice leaves over, at least 0, and the choices taken."""
        net = self._gains - cost
        most = np.maximum.reduceat(net, self._starts)
        counts = np.diff(np.append(self._starts, len(net)))
        is_best = (net == np.repeat(most, counts)) & (net > 0)
        rows = np.flatnonzero(is_best)
        _, first = np.unique(self._owners[rows], return_index=True)
        return np.maximum(most, 0.0), rows[first]

    def _use(self, chosen: _Ints) -> _Floats:
        """Bytes held in each gap for the chosen rows: their KV and that above, and a checkpoint."""
        size = np.zeros(len(self._gains))
        size[chosen] = self._state
        depth = np.zeros(len(self._gains), dtype=np.int64)
        depth[chosen] = 1
        counts = np.diff(np.append(self._starts, len(size)))
        tail = np.cumsum(depth[::-1])[::-1]
        after = np.append(tail, 0)[self._starts + counts]
        is_kept = tail - np.repeat(after, counts) > 0
        size += np.where(is_kept, self._kv * self._lens, 0.0)
        change = np.zeros(self._num_gaps + 1)
        np.add.at(change, self._since, size)
        np.add.at(change, self._owners, -size)
        return np.cumsum(change)[:-1]
