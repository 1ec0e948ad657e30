"""Time to first token of a warm turn, against a bare forward pass over the same tokens.

A session holds a long history. Each repetition is a short turn on top of it, through the public
session API: rendering, tokenising, matching, loading the state, a forward pass that also hands out
the checkpoint before the reply header, the first token in the caller's hands. Just before it, the
same tokens go through the backend alone, over the same pages and from the same state. Both run in
one process, in turn, and medians are compared. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.probes import forward, standing_at
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit, median
from benchkit.shown import count, millis

from agentcache.config import CacheConfig
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentcache.session import Session
    from agentcache.session.history import SessionTip
    from agentcache.session.prompts import Prompt
    from agentcache.session.streams import TurnStream
    from agentcache.types import IntArray

MODELS = ("tiny-hybrid", "small-hybrid")
GOAL = 1.3
COLUMNS = (
    Column("model", "model"),
    Column("turn", "call"),
    Column("messages", "messages", count),
    Column("cached", "cached_tokens", count),
    Column("new", "computed_tokens", count),
    Column("bare pass", "bare_s", millis),
    Column("TTFT", "measured_ttft_s", millis),
    Column("ratio", "ratio", "{:.3f}".format),
    Column("cold prefill", "cold_s", millis),
)


@dataclass(slots=True)
class Samples:
    """One kind of turn, repetition by repetition.

    Seconds of the bare pass, of the time to first token that the turn reports, and of what its
    caller measures; messages: how many the history had.
    """

    bare: list[float] = field(default_factory=list)
    reported: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def row(self, model: str, call: str, cold: float) -> dict[str, Any]:
        """Medians."""
        return {
            "model": model,
            "call": call,
            "repetitions": len(self.bare),
            "messages": median(self.messages),
            "cached_tokens": median(self.cached),
            "computed_tokens": median(self.computed),
            "bare_s": median(self.bare),
            "ttft_s": median(self.reported),
            "measured_ttft_s": median(self.measured),
            "ratio": median(self.measured) / median(self.bare),
            "cold_s": cold,
            "cold_over_warm": cold / median(self.measured),
        }


class Words:
    """Texts of a known number of tokens, of words that are one token each."""

    def __init__(self, runtime: Runtime, seed: int = 0) -> None:
        tokenizer = runtime.tokenizer
        texts = (tokenizer.decode([i]) for i in range(tokenizer.vocab_size))
        self._words = [t for t in texts if t.startswith(" ") and t[1:].isalpha() and t.isascii()]
        self._random = random.Random(seed)

    def text(self, num_tokens: int) -> str:
        """That many words, each with a space before it."""
        return "".join(self._random.choices(self._words, k=num_tokens))


class Bench:
    """One model, one history, and turns on top of it."""

    def __init__(self, model: str, history_len: int, new_len: int) -> None:
        self.runtime = Runtime.load(model, cache=CacheConfig(budget="1GiB"))
        self._words = Words(self.runtime)
        self._new_len = new_len
        self.session = self.runtime.session("history")
        system = {"role": "system", "content": "You are an agent."}
        prompts = self.runtime.prompts
        overhead = len(prompts.from_messages([system, self._message(0)], None, ()).ids)
        first = [system, self._message(history_len - overhead)]
        self.session.chat(first, max_new_tokens=1)

    def _message(self, num_tokens: int) -> dict[str, str]:
        return {"role": "user", "content": self._words.text(num_tokens)}

    def chat_turns(self, repetitions: int) -> Samples:
        """Turns of one user message each; the prompts are what `chat` will make of it."""
        samples, num_words = Samples(), self._num_words()
        for _ in range(repetitions):
            message = self._message(num_words)
            prompt = self._prompt(message)
            self._repeat(
                samples,
                self.session,
                prompt.ids,
                lambda message=message: self.session.chat(  # type: ignore[misc]
                    [message], max_new_tokens=1, stream=True
                ),
            )
        return samples

    def generate_turns(self, repetitions: int) -> Samples:
        """The same with the whole prompt in ids, on a fork of the history."""
        samples, session = Samples(), self.session.fork()
        generator = np.random.default_rng(0)
        for _ in range(repetitions):
            # one token more is computed: the last one that was sampled
            new = generator.integers(0, self.runtime.tokenizer.vocab_size, self._new_len - 1)
            ids = np.concatenate([session.ids, new.astype(np.int32)])
            self._repeat(
                samples,
                session,
                ids,
                lambda ids=ids: session.generate(  # type: ignore[misc]
                    ids, max_new_tokens=1, stream=True
                ),
            )
        return samples

    def cold_s(self, repetitions: int) -> float:
        """A prefill of the whole history from nothing, in memory of its own."""
        engine, ids = self.runtime.engine, self.session.ids

        def once() -> float:
            return engine.run_cold(ids, len(ids), 1).ttft_s

        return median(self.runtime.on_engine(once) for _ in range(repetitions))

    def _num_words(self) -> int:
        """How many words make a turn compute the tokens wanted."""
        extra = len(self._prompt(self._message(0)).ids) - self._tip(self.session).history.frontier
        return max(1, self._new_len - extra)

    def _prompt(self, message: dict[str, str]) -> Prompt:
        return self.runtime.prompts.from_new([message], None, self._tip(self.session))

    def _tip(self, session: Session) -> SessionTip:
        record = next(r for r in self.runtime.registry if r.id == session.id)
        tip = record.tip(None)
        assert tip is not None
        return tip

    def _repeat(
        self,
        samples: Samples,
        session: Session,
        tokens: IntArray,
        call: Callable[[], TurnStream],
    ) -> None:
        """One bare pass over what is new in `tokens`, then the turn itself."""
        start = self._tip(session).history.frontier
        num_messages = len(self._tip(session).history.messages)
        bare = self.runtime.on_engine(lambda: self._bare(tokens, start))
        begin = time.perf_counter()
        stream = call()
        deltas = iter(stream)
        next(deltas)
        took = time.perf_counter() - begin
        for _ in deltas:
            pass
        usage = stream.turn.usage
        if usage.cached_tokens != start or usage.prompt_tokens != len(tokens):
            raise RuntimeError(
                f"the turn computed [{usage.cached_tokens}, {usage.prompt_tokens}), "
                f"the bare pass [{start}, {len(tokens)})"
            )
        samples.bare.append(bare)
        samples.reported.append(usage.ttft_s)
        samples.measured.append(took)
        samples.messages.append(num_messages)
        samples.cached.append(usage.cached_tokens)
        samples.computed.append(usage.computed_tokens)

    def _bare(self, tokens: IntArray, start: int) -> float:
        with standing_at(self.runtime, tokens, start) as lease:
            begin = time.perf_counter()
            forward(self.runtime, lease, tokens, start)
            return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = console_for(options.json)
    rows = []
    for model in options.model or MODELS:
        with console.status(f"{model}: a history of {options.history} tokens"):
            rows += _measure(model, options)
    return emit(_summary(rows, options), COLUMNS, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", action="append", help=f"may be repeated; by default {' and '.join(MODELS)}"
    )
    parser.add_argument("--history", type=int, default=8000, help="tokens cached at the start")
    parser.add_argument("--new", type=int, default=32, help="tokens that a turn computes")
    parser.add_argument("--repetitions", type=int, default=25, help="turns of each kind")
    parser.add_argument("--threads", type=int, help="torch threads; by default what torch takes")
    parser.add_argument("--cold", type=int, default=3, help="cold prefills of the history")
    add_json_option(parser)
    return parser


def _measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    bench = Bench(model, options.history, options.new)
    with bench.runtime:
        cold = bench.cold_s(options.cold)
        bench.chat_turns(_WARM_UP)
        rows = [bench.chat_turns(options.repetitions).row(model, "chat", cold)]
        rows.append(bench.generate_turns(options.repetitions).row(model, "generate", cold))
    return rows


_WARM_UP = 2


def _summary(rows: list[dict[str, Any]], options: argparse.Namespace) -> Result:
    names = [f"{row['model']}.{row['call']}" for row in rows]
    warm = {name: row["ratio"] for name, row in zip(names, rows, strict=True)}
    cold = {
        f"{name}.cold_over_warm": row["cold_over_warm"]
        for name, row in zip(names, rows, strict=True)
    }
    return Result(
        name="bench/turns/ttft",
        rows=rows,
        ratios=warm | cold,
        goals=[Goal(f"{name}, warm over bare", ratio, GOAL) for name, ratio in warm.items()],
        settings={"history": options.history, "new": options.new},
    )


if __name__ == "__main__":
    sys.exit(main())
