"""When will what is kept be used again? Learned per class of entry, from what was and was not.

Per class and range of ages: how many entries were used again at that age, and for how long entries
of that age were waited for. Their ratio is the hazard, the rate of return of an entry that has
waited so long; entries that never return count by their waiting.

From the hazards follows what an entry is worth per second that it is kept: the Gittins index, the
best ratio of the chance to be used until some time to the expected time until then or until its use
(Gittins, "Bandit processes and dynamic allocation indices", 1979, for one that is stopped at will).
"""

from __future__ import annotations

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
        num_groups = traits[0] * traits[1]
        shape = (num_classes, num_groups, len(starts))
        self._uses: Floats = np.zeros(shape)
        self._waited: Floats = np.zeros(shape)
        self._hazard: Floats = np.ones((num_classes, len(starts)))
        self._index: Floats = np.zeros((num_classes, len(starts)))
        self._factor: Floats = np.ones((num_classes, num_groups))
        self.mean: Floats = np.zeros(num_classes)

    def ended(self, kind: int, group: int, seconds: float, *, used: bool) -> None:
        """An entry was used after so many seconds, or has left its class unused."""
        age = bisect_right(self._bounds, seconds) - 1
        waited = self._waited[kind, group]
        waited[:age] += self._widths[:age]
        waited[age] += seconds - self._bounds[age]
        if used:
            self._uses[kind, group, age] += 1

    def learn(self, waiting: Waiting) -> None:
        """Work the indices out anew; what waits now counts by the time it has waited."""
        waited = self._waited + self._waiting(waiting)
        uses = self._uses.sum(axis=1)
        exposed = waited.sum(axis=1)
        overall = (uses.sum() + 0.5) / (exposed.sum() + _PRIOR_S)
        self.mean = (uses.sum(axis=1) + 0.3) / (exposed.sum(axis=1) + 0.3 / overall)
        prior = np.minimum(self._widths, _DOUBT / len(self._starts) / self.mean[:, None])
        self._hazard = (uses + self.mean[:, None] * prior) / (exposed + prior)
        self._index = _gittins(self._hazard, self._widths)
        self._factor = self._factors(waited)

    def _factors(self, waited: Floats) -> Floats:
        """How much more often than its class each group returns: a factor for its first trait times
        one for its second, each the uses seen over those expected."""
        num_classes, num_groups, _ = waited.shape
        traits = (num_classes, *self._traits)
        seen = self._uses.sum(axis=2).reshape(traits)
        expected = (waited * self._hazard[:, None, :]).sum(axis=2).reshape(traits)
        first = (seen.sum(axis=2) + _TRAIT_DOUBT) / (expected.sum(axis=2) + _TRAIT_DOUBT)
        expected = (expected * first[:, :, None]).sum(axis=1)
        second = (seen.sum(axis=1) + _TRAIT_DOUBT) / (expected + _TRAIT_DOUBT)
        factors: Floats = (first[:, :, None] * second[:, None, :]).reshape(num_classes, num_groups)
        return factors

    def _waiting(self, waiting: Waiting) -> Floats:
        """Seconds that waiting entries have spent at each age, summed per class and group."""
        num_classes, num_groups, num_ages = self._waited.shape
        age = self._ages(waiting.seconds)
        at = (waiting.classes * num_groups + waiting.groups) * num_ages + age
        size = num_classes * num_groups * num_ages
        shape = self._waited.shape
        count = np.bincount(at, minlength=size).reshape(shape)
        inside = np.bincount(at, waiting.seconds - self._starts[age], size).reshape(shape)
        older = count[:, :, ::-1].cumsum(axis=2)[:, :, ::-1] - count
        return inside + older * self._widths

    def index(self, classes: Ints, groups: Ints, seconds: Floats, tilt: float = 1.0) -> Floats:
        """Uses per second that each entry is worth keeping for, [E].

        tilt: what is left of an index after each range of ages.
        """
        ages = self._ages(seconds)
        index: Floats = self._index[classes, ages] * self._factor[classes, groups]
        return index if tilt == 1.0 else index * tilt**ages

    def surprise(self, kind: int, group: int, seconds: float) -> float:
        """The negative logarithm of how likely a use right after so many seconds was held to be."""
        age = bisect_right(self._bounds, seconds) - 1
        hazard = self._hazard[kind] * self._factor[kind, group]
        waited = hazard[:age] @ self._widths[:age] + hazard[age] * (seconds - self._bounds[age])
        return float(waited - np.log(hazard[age]))

    def _ages(self, seconds: Floats) -> Ints:
        """The range of ages that each time lies in."""
        ages: Ints = np.searchsorted(self._starts, seconds, side="right") - 1
        return ages


_PRIOR_S = 60.0
"""Seconds without a use that are added to all that was seen."""


def _gittins(hazard: Floats, widths: Floats) -> Floats:
    """The index at the beginning of each age, [C, A], of hazards [C, A].

    Within an age the hazard is constant, so that with its integral H from the age in question on,
    the chance of a use is 1 - exp(-H), and the expected time adds up from ages of exp(-H) dt.
    """
    index = np.empty_like(hazard)
    for age in range(len(widths)):
        risk = hazard[:, age:] * widths[age:]
        total = np.cumsum(risk, axis=1)
        inside = np.exp(risk - total) * -np.expm1(-risk)
        seconds = np.cumsum(inside / hazard[:, age:], axis=1)
        index[:, age] = (-np.expm1(-total) / seconds).max(axis=1)
    return index
