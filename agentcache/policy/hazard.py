"""When will what is kept be used again? Learned per class of entry, from what was and was not.

Per class and range of ages: how many entries were used again at that age, and for how long entries
of that age were waited for. Their ratio is the hazard, the rate of return of an entry that has
waited so long; entries that never return count by their waiting.

From the hazards follows what an entry is worth per second that it is kept: the Gittins index, the
best ratio of the chance to be used until some time to the expected time until then or until its use
(Gittins, "Bandit processes and dynamic allocation indices", 1979, for one that is stopped at will).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["SECONDS", "SHARES", "ReturnTimes", "Waiting"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SECONDS: Floats = np.concatenate([[0.0], 0.25 * 2.0 ** np.arange(23)])
"""Where ranges of ages begin: they double, from a quarter of a second to weeks."""

SHARES: Floats = np.concatenate([[0.0], 0.25 * 2.0 ** (np.arange(22) / 4)])
"""The same for ages in shares of the time that was announced: fine from a quarter to ten times."""

_DOUBT = 2.0
"""Uses that a class's mean rate counts for, spread over all ages, until more are seen."""

_TRAIT_DOUBT = 4.0
"""Uses that a trait has to show to be believed by half."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Entries that wait now: class, group and seconds since the last use of each, [E]."""

    classes: Ints
    groups: Ints
    seconds: Floats


class ReturnTimes:
    """Hazards of so many classes of entries. Classes are made up of groups, by two traits, that
    return more or less often than the class as a whole.

    >>> times = ReturnTimes(num_classes=1)
    >>> for _ in range(50):
    ...     times.ended(0, 0, seconds=3.0, used=True)
    >>> nobody = np.zeros(0, np.int64)
    >>> times.learn(Waiting(nobody, nobody, np.zeros(0)))
    >>> early, late = times.index(np.array([0, 0]), np.array([0, 0]), np.array([1.0, 100.0]))
    >>> bool(early > late)
    True
    """

    def __init__(
        self,
        num_classes: int,
        traits: tuple[int, int] = (1, 1),
        starts: Floats = SECONDS,
    ) -> None:
        """traits: values of the two traits that make a group, which is number first * T + second.
        starts: where each range of ages begins, ascending from 0; the last is twice as long as
        all before it, and stands for whatever is older."""
        self._starts = starts
        self._bounds: list[float] = starts.tolist()
        self._widths: Floats = np.diff(np.append(starts, 3 * starts[-1]))
        self._traits = traits
        self._num_groups = traits[0] * traits[1]
        self._octave = _octave(starts)
        # Most classes never show: sums are kept of those that have, at their slot. The last slot is
        # of no class; what none has been seen of looks there.
        self._slot: Ints = np.full(num_classes, -1)
        self._uses: Floats = np.zeros((1, self._num_groups, len(starts)))
        self._waited: Floats = np.zeros_like(self._uses)
        # Waits that ended and are not yet among the sums: by twice the group, plus one if used.
        self._ended = array("q")
        self._ended_s = array("d")
        self._hazard: Floats = np.ones((num_classes, len(starts)))
        self._index: Floats = np.zeros((num_classes, len(starts)))
        self._factor: Floats = np.ones((num_classes, self._num_groups))
        self._table: Floats | None = None
        self.mean: Floats = np.zeros(num_classes)

    def ended(self, kind: int, group: int, seconds: float, *, used: bool) -> None:
        """An entry was used after so many seconds, or has left its class unused."""
        self._ended.append((kind * self._num_groups + group) * 2 + used)
        self._ended_s.append(seconds)
        if len(self._ended) >= _MOST_ENDED:
            self._count_ended()

    def learn(self, waiting: Waiting) -> None:
        """Work the indices out anew; what waits now counts by the time it has waited."""
        self._count_ended()
        alive = self._waiting(waiting)  # may give slots to new classes
        waited = self._waited + alive
        uses = self._uses.sum(axis=1)
        exposed = waited.sum(axis=1)
        overall = (uses.sum() + 0.5) / (exposed.sum() + _PRIOR_S)
        mean = (uses.sum(axis=1) + 0.3) / (exposed.sum(axis=1) + 0.3 / overall)
        prior = np.minimum(self._widths, _DOUBT / len(self._starts) / mean[:, None])
        hazard = (uses + mean[:, None] * prior) / (exposed + prior)
        self.mean, self._hazard = mean[self._slot], hazard[self._slot]
        self._index = _gittins(hazard, self._widths)[self._slot]
        self._factor = self._factors(waited, hazard)[self._slot]
        self._table = None

    def _factors(self, waited: Floats, hazard: Floats) -> Floats:
        """How much more often than its class each group returns: a factor for its first trait times
        one for its second, each the uses seen over those expected."""
        traits = (len(waited), *self._traits)
        seen = self._uses.sum(axis=2).reshape(traits)
        expected = (waited * hazard[:, None, :]).sum(axis=2).reshape(traits)
        first = (seen.sum(axis=2) + _TRAIT_DOUBT) / (expected.sum(axis=2) + _TRAIT_DOUBT)
        expected = (expected * first[:, :, None]).sum(axis=1)
        second = (seen.sum(axis=1) + _TRAIT_DOUBT) / (expected + _TRAIT_DOUBT)
        factors: Floats = (first[:, :, None] * second[:, None, :]).reshape(len(waited), -1)
        return factors

    def _count_ended(self) -> None:
        if not self._ended:
            return
        which, used = np.divmod(np.array(self._ended), 2)
        ended = Waiting(*np.divmod(which, self._num_groups), np.array(self._ended_s))
        del self._ended[:], self._ended_s[:]
        waited = self._waiting(ended)  # as above
        at = self._cells(self._slot[ended.classes], ended.groups) + self._ages(ended.seconds)
        self._waited = self._waited + waited
        self._uses = self._uses + np.bincount(at, used, self._uses.size).reshape(self._uses.shape)

    def _waiting(self, waiting: Waiting) -> Floats:
        """Seconds that entries have spent waiting at each age, summed per slot and group."""
        self._make_room(waiting.classes)
        age = self._ages(waiting.seconds)
        at = self._cells(self._slot[waiting.classes], waiting.groups) + age
        size, shape = self._waited.size, self._waited.shape
        count = np.bincount(at, minlength=size).reshape(shape)
        inside = np.bincount(at, waiting.seconds - self._starts[age], size).reshape(shape)
        older = count[:, :, ::-1].cumsum(axis=2)[:, :, ::-1] - count
        return inside + older * self._widths

    def _make_room(self, classes: Ints) -> None:
        """Give a slot to each class that has none."""
        present = np.bincount(classes, minlength=len(self._slot)) > 0
        new = np.flatnonzero(present & (self._slot < 0))
        if len(new):
            self._slot[new] = np.arange(len(new)) + len(self._waited) - 1
            more = np.zeros((len(new), *self._waited.shape[1:]))
            self._uses = np.concatenate([self._uses, more])
            self._waited = np.concatenate([self._waited, more])

    def _cells(self, classes: Ints, groups: Ints) -> Ints:
        """Where the ages of a group begin in an array [C, G, A] that is read as one row."""
        cells: Ints = (classes * self._num_groups + groups) * len(self._starts)
        return cells

    def place(self, kind: int, group: int) -> int:
        """A number for a class and group, by which `index_at` finds it."""
        return (kind * self._num_groups + group) * len(self._bounds)

    def index(self, classes: Ints, groups: Ints, seconds: Floats) -> Floats:
        """Uses per second that each entry is worth keeping for, [E]."""
        return self.index_at(self._cells(classes, groups), seconds)

    def index_at(self, places: Ints, seconds: Floats) -> Floats:
        """The same for entries by their places, in fewer steps."""
        if self._table is None:  # of all classes, groups and ages
            self._table = self._index[:, None, :] * self._factor[:, :, None]
        found: Floats = self._table.take(places + self._ages(seconds))
        return found

    def surprise(self, kind: int, group: int, seconds: float) -> float:
        """The negative logarithm of how likely a use right after so many seconds was held to be."""
        age = bisect_right(self._bounds, seconds) - 1
        hazard = self._hazard[kind] * self._factor[kind, group]
        waited = hazard[:age] @ self._widths[:age] + hazard[age] * (seconds - self._bounds[age])
        return float(waited - np.log(hazard[age]))

    def _ages(self, seconds: Floats) -> Ints:
        """The range of ages that each time lies in."""
        if self._octave is None:
            ages: Ints = self._starts.searchsorted(seconds, side="right") - 1
            return ages
        exponents = np.maximum(seconds, 0.5 * self._bounds[1]).view(np.int64) >> _MANTISSA
        ages = np.minimum(exponents - self._octave, len(self._bounds) - 1)
        return ages


def _octave(starts: Floats) -> int | None:
    """Where ranges begin at powers of two and double, what to take from the exponent of a float of
    64 bits for the number of its range: quicker than to search. None where they do not."""
    doubling = starts[1] * 2.0 ** np.arange(len(starts) - 1)
    if np.frexp(starts[1])[0] != 0.5 or not np.array_equal(starts[1:], doubling):
        return None
    return (int(starts[1:2].view(np.int64)[0]) >> _MANTISSA) - 1


_MANTISSA = 52
"""Bits of a float behind its exponent."""

_PRIOR_S = 60.0
"""Seconds without a use that are added to all that was seen."""

_MOST_ENDED = 4096
"""Waits that are kept before they are added up without anybody asking."""


def _gittins(hazard: Floats, widths: Floats) -> Floats:
    """The index at the beginning of each age, [C, A], of hazards [C, A].

    Within an age the hazard is constant, so that with its integral H from the age in question on,
    the chance of a use is 1 - exp(-H), and the expected time adds up from ages of exp(-H) dt.
    """
    later = np.triu(np.ones((len(widths), len(widths)), dtype=bool))  # [from, A]
    risk = np.where(later, (hazard * widths)[:, None, :], 0.0)  # [C, from, A]
    total = risk.cumsum(axis=2)
    inside = np.exp(risk - total) * -np.expm1(-hazard * widths)[:, None, :]
    seconds = np.where(later, inside / hazard[:, None, :], 0.0).cumsum(axis=2)
    index: Floats = np.divide(
        -np.expm1(-total), seconds, out=np.zeros_like(total), where=later
    ).max(axis=2)
    return index
