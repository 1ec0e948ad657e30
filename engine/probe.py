"""The capability probe: what a backend computes over our pools, against the model without a cache.

Every check runs in memory of its own: pages in random order and full of NaN, rows apart from each
other, so that nothing is right by accident of where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentcache.engine._probe_memory import Memory, Running
from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.engine.backend import ModelBackend

__all__ = ["CHECKS", "Check", "Reference", "Report", "components_of", "first_line", "probe"]

Reference = Callable[[IntArray], torch.Tensor]
"""A whole sequence's logits, tokens [T] to [T, vocab] float32, without any cache."""

LEAST_TOLERANCE = 1e-4
"""In units of the standard deviation of the logits."""

_SPREADS = 3
"""The tolerance is that many times what uncached passes over the same tokens differ by."""

_MOST_SPREAD = 1e-2
"""A model whose own answers differ by more has no exact answer to compare with."""

_NOTICED = 100
"""Damage to a state has to move a later token by that many tolerances."""


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    value: the greatest error, or for damage that has to be noticed the smallest effect, in units of
    the standard deviation of the reference's logits; None if the check raised. limit: what `value`
    may reach, or has to reach if `is_effect`. detail: what the effect belongs to, or the first line
    of the error.
    """

    name: str
    value: float | None
    limit: float
    is_effect: bool = False
    detail: str = ""

    @property
    def ok(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.is_effect else self.value <= self.limit

    @property
    def reason(self) -> str | None:
        """Why the check failed; None if it did not."""
        if self.ok:
            return None
        if self.value is None:
            return f"{self.name}: {self.detail}"
        if self.is_effect:
            return (
                f"{self.name}: without {self.detail} a later token moves by {self.value:.1e} of "
                f"the logits' deviation; it has to move by {self.limit:.1e} for a loss to be seen"
            )
        return f"{self.name}: error {self.value:.1e}, tolerance {self.limit:.1e}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a probe found. components: the kinds of cached data the model keeps."""

    components: tuple[str, ...]
    tolerance: float
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def reason(self) -> str | None:
        """Why the model cannot be admitted; None if it can."""
        return "; ".join(check.reason for check in self.checks if check.reason) or None

    @property
    def errors(self) -> dict[str, float | None]:
        """Greatest error per check."""
        return {check.name: check.value for check in self.checks if not check.is_effect}

    @property
    def effects(self) -> dict[str, float | None]:
        """Smallest effect per kind of damage that has to be noticed."""
        return {check.name: check.value for check in self.checks if check.is_effect}


def components_of(backend: ModelBackend) -> tuple[str, ...]:
    """Which kinds of cached data a backend's model keeps, as names of components."""
    windows = [group.window for group in backend.kv_layout.groups]
    kept = {
        Kind.FULL: None in windows,
        Kind.SWA: any(window is not None for window in windows),
        Kind.STATE: bool(backend.state_layout.specs),
    }
    return tuple(kind.value for kind, is_kept in kept.items() if is_kept)


def probe(
    backend: ModelBackend,
    reference: Reference,
    *,
    seed: int,
    other: ModelBackend | None = None,
) -> Report:
    """Run every check that applies to the model.

    reference: the same weights by the stock modeling code, in modules of its own. other: another
    backend of the same model, whose states and KV have to be the same layer by layer. A check that
    raises has failed. The same seed draws the same tokens, cuts and places in memory.
    """
    subject = _Subject(backend, reference, seed)
    components = components_of(backend)
    uncached = _measure("uncached", _uncached, subject, limit=_MOST_SPREAD)
    if not uncached.ok:  # nothing to hold the other checks against
        return Report(components, LEAST_TOLERANCE, (uncached,))
    tolerance = max(LEAST_TOLERANCE, _SPREADS * (uncached.value or 0.0))
    checks = [uncached]
    for name, (needs, run) in _ERRORS.items():
        if needs.intersection(components):
            checks.append(_measure(name, run, subject, limit=tolerance))
    if other is not None:
        run_kept = partial(_kept, other=other)
        checks.append(_measure("kept", run_kept, subject, limit=_MOST_BETWEEN_BACKENDS))
    for name, (needs, run) in _EFFECTS.items():
        if needs.intersection(components):
            limit = _NOTICED * tolerance
            checks.append(_measure(name, run, subject, limit=limit, is_effect=True))
    return Report(components, tolerance, tuple(checks))


_LEN = 71
_CUT = 43
"""Some 60 % of the tokens: where states are lost, and what follows has to show it."""


class _Subject:
    """What is probed, and the sequence most checks run on."""

    def __init__(self, backend: ModelBackend, reference: Reference, seed: int) -> None:
        self.backend = backend
        self.reference = reference
        self.rng = np.random.default_rng(seed)
        self.tokens = self.draw(_LEN)

    def draw(self, num: int) -> IntArray:
        """Random tokens; special ones lie at the ends of a vocabulary and are left out."""
        vocab = self.backend.shape.vocab_size
        return self.rng.integers(vocab // 4, vocab - vocab // 4, num).astype(np.int32)

    @cached_property
    def expected(self) -> torch.Tensor:
        """The reference's logits of `tokens`."""
        return self.reference(self.tokens)

    def memory(self, room: int = _LEN, *, num_running: int = 1, num_captures: int = 0) -> Memory:
        return Memory(
            self.backend,
            self.rng,
            room=room,
            num_running=num_running,
            num_captures=num_captures,
        )


def first_line(error: Exception) -> str:
    """An error's message as it stands in a table; its class where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


_Measured = tuple[float, str]
"""A value, and what it belongs to where that matters."""

_Run = Callable[[_Subject], _Measured]


def _measure(
    name: str, run: _Run, subject: _Subject, *, limit: float, is_effect: bool = False
) -> Check:
    try:
        value, detail = run(subject)
    except Exception as error:  # whatever a model's code raises is a finding about the model
        return Check(name, None, limit, is_effect, first_line(error))
    return Check(name, value, limit, is_effect, detail)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Greatest difference in units of the expected logits' deviation; infinite if not a number."""
    error = float((got - expected).abs().max() / expected.std())
    return error if math.isfinite(error) else math.inf


def _uncached(subject: _Subject) -> _Measured:
    """What the reference differs by when the same tokens are computed in shorter sequences."""
    whole = subject.expected
    parts = (subject.reference(subject.tokens[:stop]) for stop in (13, _CUT, 64))
    return max(_error(part, whole[: len(part)]) for part in parts), ""


def _extend(subject: _Subject) -> _Measured:
    """The whole sequence in one pass."""
    memory = subject.memory()
    logits, _ = memory.extend(memory.start(), subject.tokens)
    return _error(logits, subject.expected), ""


_CHUNKS = (13, 1, 19, 2, 7, 29)


def _chunks(subject: _Subject) -> _Measured:
    """A prefill in chunks of odd lengths."""
    memory = subject.memory()
    running = memory.start()
    chunks = np.split(subject.tokens, np.cumsum(_CHUNKS)[:-1])
    logits = [memory.extend(running, chunk)[0] for chunk in chunks]
    return _error(torch.cat(logits), subject.expected), ""


def _steps(subject: _Subject) -> _Measured:
    """Token by token, after a prefill and from the first token on."""
    errors = []
    for prefill, stop in ((62, _LEN), (0, 9)):
        memory = subject.memory()
        running = memory.start()
        if prefill:
            memory.extend(running, subject.tokens[:prefill])
        steps = [memory.step([running], [token]) for token in subject.tokens[prefill:stop].tolist()]
        errors.append(_error(torch.cat(steps), subject.expected[prefill:stop]))
    return max(errors), ""


def _resume(subject: _Subject) -> _Measured:
    """Checkpoints captured inside passes at any length: filed, loaded elsewhere, extended.

    The first lengths are shorter than a convolution reaches, others lie beside a scan's chunks.
    """
    cuts = {1, 2, 63, 64, *subject.rng.choice(np.arange(3, 62), 2, replace=False).tolist()}
    middle = 31
    memory = subject.memory(num_running=2, num_captures=len(cuts))
    base = memory.start()
    filed, logits = [], []
    for start, stop in ((0, middle), (middle, _LEN)):
        inside = sorted(cut for cut in cuts if start < cut <= stop)
        part, checkpoints = memory.extend(base, subject.tokens[start:stop], inside)
        filed += checkpoints
        logits.append(part)
    errors = [_error(torch.cat(logits), subject.expected)]
    for checkpoint in filed:
        running = memory.resume(checkpoint)
        rest, _ = memory.extend(running, subject.tokens[checkpoint.length :])
        errors.append(_error(rest, subject.expected[checkpoint.length :]))
        memory.release(running)
    return max(errors), ""


def _fork(subject: _Subject) -> _Measured:
    """Three continuations of one checkpoint, while the sequence it came from goes on."""
    lengths = (9, 17, 26)
    memory = subject.memory(_CUT + max(lengths), num_running=4, num_captures=1)
    head = subject.tokens[:_CUT]
    base = memory.start()
    _, (checkpoint,) = memory.extend(base, head, [_CUT])
    memory.extend(base, subject.draw(7))
    errors = []
    for length in lengths:
        tail = subject.draw(length)
        logits, _ = memory.extend(memory.resume(checkpoint), tail)
        errors.append(_error(logits, subject.reference(np.concatenate([head, tail]))[_CUT:]))
    return max(errors), ""


def _ragged(subject: _Subject) -> _Measured:
    """Decoding of three sequences of different lengths in the same passes."""
    steps = 6
    sequences = [subject.tokens, subject.draw(58), subject.draw(41)]
    memory = subject.memory(num_running=3)
    running = [memory.start() for _ in sequences]
    for each, tokens in zip(running, sequences, strict=True):
        memory.extend(each, tokens[:-steps])
    decoded = [
        memory.step(running, [int(tokens[at]) for tokens in sequences]) for at in range(-steps, 0)
    ]
    logits = torch.stack(decoded, dim=1)
    expected = [subject.reference(tokens)[-steps:] for tokens in sequences]
    return max(_error(got, want) for got, want in zip(logits, expected, strict=True)), ""


_MOST_BETWEEN_BACKENDS = 1e-3
"""Relative L2 difference of what a layer keeps."""


def _kept(subject: _Subject, other: ModelBackend) -> _Measured:
    """What every layer keeps of a prefill in two passes and a step, against another backend's."""
    kept = []
    for backend in (subject.backend, other):
        memory = Memory(backend, np.random.default_rng(0), room=_LEN)
        running = memory.start()
        memory.extend(running, subject.tokens[:_CUT])
        memory.extend(running, subject.tokens[_CUT:-1])
        memory.step([running], [int(subject.tokens[-1])])
        kept.append(memory.kept(running))
    gaps = {
        name: float((ours - theirs).norm() / theirs.norm().clamp(min=1e-12))
        for (name, ours), theirs in zip(kept[0].items(), kept[1].values(), strict=True)
    }
    worst = max(gaps, key=lambda name: gaps[name])
    return (gaps[worst] if math.isfinite(gaps[worst]) else math.inf), worst


_MOST_PAST = 512
"""Tokens past the first window, at most: a reference without a cache is slow on long sequences."""


def _window(subject: _Subject) -> _Measured:
    """A history that left its window behind: in chunks, resumed after the wrap, and in steps."""
    window = max(spec.window or 0 for spec in subject.backend.kv_layout.specs)
    past = max(32, min(3 * window, _MOST_PAST))
    tokens = subject.draw(window + past)
    expected = subject.reference(tokens)
    first, cut, last = max(1, window - 3), window + past // 2 + 1, len(tokens) - 4
    memory = subject.memory(len(tokens), num_running=2, num_captures=1)
    base = memory.start()
    begin, _ = memory.extend(base, tokens[:first])
    middle, (checkpoint,) = memory.extend(base, tokens[first : cut + 5], [cut])
    errors = [_error(torch.cat([begin, middle]), expected[: cut + 5])]
    running = memory.resume(checkpoint)
    rest, _ = memory.extend(running, tokens[cut:last])
    steps = [memory.step([running], [token]) for token in tokens[last:].tolist()]
    errors.append(_error(torch.cat([rest, *steps]), expected[cut:]))
    return max(errors), ""


_LATER = 8
_Loss = Callable[[Memory, Running], None]


def _least_effect(subject: _Subject, losses: Mapping[str, _Loss]) -> _Measured:
    """How far later tokens move when something is lost before; the loss they notice least.

    The next few tokens do not count: there almost any loss shows, and then it may be gone.
    """
    effects = {}
    for name, lose in losses.items():
        memory = subject.memory()
        running = memory.start()
        memory.extend(running, subject.tokens[:_CUT])
        lose(memory, running)
        logits, _ = memory.extend(running, subject.tokens[_CUT:])
        later = slice(_LATER, None)
        gap = (logits[later] - subject.expected[_CUT:][later]).abs().max()
        effect = float(gap / subject.expected.std())
        effects[name] = math.inf if math.isnan(effect) else effect
    least = min(effects, key=lambda name: effects[name])
    return effects[least], least


def _states_noticed(subject: _Subject) -> _Measured:
    """Each kind of state, zeroed in all layers."""
    names = dict.fromkeys(spec.name for spec in subject.backend.state_layout.specs)
    losses: dict[str, _Loss] = {
        f"its {name} states": partial(Memory.lose_state, name=name) for name in names
    }
    return _least_effect(subject, losses)


def _kv_noticed(subject: _Subject) -> _Measured:
    """KV of the layers with full attention, of those with windows, and sidecars, zeroed."""
    layout = subject.backend.kv_layout
    specs = layout.specs
    kinds = {
        "the KV of its full attention": [spec for spec in specs if spec.window is None],
        "the KV in its windows": [spec for spec in specs if spec.window is not None],
    }
    losses: dict[str, _Loss] = {
        name: partial(Memory.lose_kv, specs=some) for name, some in kinds.items() if some
    }
    if layout.sidecars:
        losses["what lies beside its pages"] = Memory.lose_sidecars
    return _least_effect(subject, losses)


_ANY = frozenset(Kind)
_ERRORS: dict[str, tuple[frozenset[str], _Run]] = {
    "extend": (_ANY, _extend),
    "chunks": (_ANY, _chunks),
    "steps": (_ANY, _steps),
    "resume": (_ANY, _resume),
    "fork": (_ANY, _fork),
    "ragged": (_ANY, _ragged),
    "window": (frozenset({Kind.SWA}), _window),
}
_EFFECTS: dict[str, tuple[frozenset[str], _Run]] = {
    "states noticed": (frozenset({Kind.STATE}), _states_noticed),
    "kv noticed": (frozenset({Kind.FULL, Kind.SWA}), _kv_noticed),
}

CHECKS = ("uncached", *_ERRORS, "kept", *_EFFECTS)
"""Names of all checks, in order."""
