"""Seeded traces for experiments: equal seeds give equal traces.

`trace_a`, `trace_b`: single prompts, of which some long ones come back and many short ones do.
`agents`: trajectories that grow turn by turn, several open at once. `document`: questions about
one long document.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.simulate.trace import SimRequest, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from agentcache.types import IntArray

__all__ = ["MAKERS", "agents", "document", "trace_a", "trace_b", "write_trace"]

_VOCABULARY = 50_000


def trace_a(seed: int = 0, scale: float = 1.0) -> Trace:
    """15 long prefixes, each used about 20 times, among 40 hot short ones: what a cache is for.

    scale: of all lengths and of no count, so that a small one tests the same in less time.
    """
    return _prefixes("trace-a", seed, scale, num_long=15, long_uses=(18, 23))


def trace_b(seed: int = 0, scale: float = 1.0) -> Trace:
    """The short ones of `trace_a` among 150 long prefixes that come once or twice: what a cache
    should not be filled with."""
    return _prefixes("trace-b", seed, scale, num_long=150, long_uses=(1, 3))


def _prefixes(
    name: str, seed: int, scale: float, *, num_long: int, long_uses: tuple[int, int]
) -> Trace:
    rng = np.random.default_rng(seed)
    short = [_tokens(rng, rng.integers(300, 1200) * scale) for _ in range(40)]
    short_uses = rng.integers(15, 45, size=len(short))
    long = [_tokens(rng, rng.integers(4000, 12000) * scale) for _ in range(num_long)]
    uses = rng.integers(*long_uses, size=num_long)
    jobs = [at for at, count in enumerate(short_uses) for _ in range(count)]
    jobs += [len(short) + at for at, count in enumerate(uses) for _ in range(count)]
    prefixes = [*short, *long]
    requests = []
    for number, job in enumerate(rng.permutation(jobs)):
        prefix = prefixes[int(job)]
        prompt = np.concatenate([prefix, _tokens(rng, rng.integers(20, 60))])
        answer = _tokens(rng, rng.integers(16, 64))
        requests.append(_request(str(number), number, prompt, answer, (len(prefix),), closes=True))
    return Trace(name, "generated", tuple(requests))


def document(seed: int = 0, num_questions: int = 40, scale: float = 1.0) -> Trace:
    """One long document, and a question at its end each time."""
    rng = np.random.default_rng(seed)
    text = _tokens(rng, 20_000 * scale)
    requests = []
    for number in range(num_questions):
        prompt = np.concatenate([text, _tokens(rng, rng.integers(10, 40))])
        answer = _tokens(rng, rng.integers(16, 128))
        requests.append(_request(str(number), number, prompt, answer, (len(text),), closes=True))
    return Trace("document", "generated", tuple(requests))


def agents(
    seed: int = 0, num_sessions: int = 12, num_turns: int = 12, open_at_once: int = 4
) -> Trace:
    """Agents with one system prompt: each turn goes on from the whole turn before, after a tool's
    time; `open_at_once` of them at a time."""
    rng = np.random.default_rng(seed)
    head = _tokens(rng, 1000)
    free = [(3.0 * at, at) for at in range(open_at_once)]
    requests = []
    for number in range(num_sessions):
        free.sort()
        at, place = free.pop(0)
        history = np.concatenate([head, _tokens(rng, rng.lognormal(5.5, 0.5))])
        marks = (len(head), len(history))
        turns = int(rng.integers(num_turns // 2, num_turns + 1))
        for turn in range(turns):
            answer = _tokens(rng, rng.lognormal(4.5, 0.6))
            is_last = turn == turns - 1
            requests.append(_request(str(number), at, history, answer, marks, closes=is_last))
            at += 1.0 + len(answer) / 60 + float(rng.lognormal(0.7, 1.0))
            history = np.concatenate([history, answer, _tokens(rng, rng.lognormal(5.5, 0.9))])
        free.append((at, place))
    requests.sort(key=lambda request: request.at)
    return Trace("agents", "generated", tuple(requests))


MAKERS = {"trace-a": trace_a, "trace-b": trace_b, "document": document, "agents": agents}
"""By name; each takes a seed."""


def _tokens(rng: np.random.Generator, count: float | np.integer[Any]) -> IntArray:
    return rng.integers(0, _VOCABULARY, max(1, int(count)), dtype=np.int32)


def _request(
    session: str,
    at: float,
    prompt: IntArray,
    answer: IntArray,
    marks: tuple[int, ...],
    *,
    closes: bool,
) -> SimRequest:
    ids = np.concatenate([prompt, answer])
    return SimRequest(session, float(at), ids, len(prompt), closes=closes, marks=marks)


def write_trace(trace: Trace, path: Path) -> None:
    """A trace as JSON lines in the form of the Marconi artifact, to be read back."""
    with path.open("w", encoding="utf-8") as file:
        for row in _rows(trace.requests):
            file.write(json.dumps(row) + "\n")


def _rows(requests: Iterable[SimRequest]) -> Iterable[Mapping[str, Any]]:
    numbers: dict[str | None, int] = {}
    turns: dict[int, int] = {}
    for request in requests:
        number = numbers.setdefault(request.session, len(numbers))
        turn = turns[number] = turns.get(number, -1) + 1
        parent = -1 if request.parent is None else numbers.get(request.parent, -1)
        yield {
            "session_id": number,
            "turn_id": turn,
            "ts": request.at,
            "num_input_tokens": request.prompt_len,
            "num_output_tokens": len(request.ids) - request.prompt_len,
            "input_tokens": request.ids[: request.prompt_len].tolist(),
            "output_tokens": request.ids[request.prompt_len :].tolist(),
            "parent_session": parent,
            "closed": request.closes,
            "marks": list(request.marks),
        }
