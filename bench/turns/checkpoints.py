"""What rounding parked checkpoints saves, costs and does to the answers, per model and format.

A state at some depth is parked in each format, taken back, and a greedy continuation of the state
that was never parked is absorbed from it: in one go, and again in turns, with the state parked and
taken back before each. Error of the states when they are first taken back and when the continuation
ends; of its logits, the greatest, in units of their standard deviation; how many of its ids would
have been others. Medians of times. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit, median
from benchkit.shown import count, kib

from agentcache.config import CHECKPOINT_FORMATS
from agentcache.engine.backend import Batch, Span
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.loader import load_model
from agentcache.engine.transformers_backend import TransformersBackend
from agentcache.engine.verify import TOLERANCES
from agentcache.pools.layout import PoolSizes
from agentcache.pools.packing import make_packing
from agentcache.pools.table import PageTable
from agentcache.pools.tensors import TensorPools
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agentcache.engine.backend import ModelBackend
    from agentcache.pools.packing import Packing
    from agentcache.types import IntArray

MODELS = ("small-hybrid", "granitemoehybrid", "mamba2", "qwen3_next", "jamba")
MOST_BYTES = {"float16": 0.55, "int8": 0.35}
PAGE, CHUNK, FIRST_ID = 16, 512, 8
COLUMNS = (
    Column("model", "model"),
    Column("format", "format"),
    Column("tokens", "tokens", count),
    Column("checkpoint", "bytes", kib),
    Column("save ms", "save_s", lambda s: f"{1000 * s:.2f}"),
    Column("load ms", "load_s", lambda s: f"{1000 * s:.2f}"),
    Column("states", "state_error", "{:.1e}".format),
    Column("logits", "logit_error", "{:.1e}".format),
    Column("other ids", "different_ids", count),
    Column("in turns: states", "turns_end_state_error", "{:.1e}".format),
    Column("logits", "turns_logit_error", "{:.1e}".format),
    Column("other ids", "turns_different_ids", count),
)

States = dict[tuple[int, str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with memory for one sequence, whose state is in row 0."""

    backend: ModelBackend
    pools: TensorPools
    tables: dict[str, PageTable]

    def absorb(self, ids: IntArray, start: int) -> torch.Tensor:
        """The last token's logits after `ids`, which begin at position `start`."""
        span = Span(
            ids, start, self.tables[Kind.FULL], 0, logits_at=(len(ids) - 1,), windows=self.tables
        )
        return self.backend.forward(Batch((span,), self.pools))[0][0].clone()

    def states(self) -> States:
        """Copies of the present states."""
        return {key: state[0].clone() for key, state in self.pools.state.items()}

    def set_states(self, states: States) -> None:
        """Make these the present states."""
        for key, state in states.items():
            self.pools.state[key][0] = state


def subject(model: str, length: int) -> Subject:
    """A fresh model, embedded or a tiny one of a family, with room for `length` tokens."""
    backend = TransformersBackend(build(model) if model in VARIANTS else load_model(model).model)
    tables, at = {}, 0
    for kind, page_len in backend.kv_layout.page_shape(PAGE).lens.items():
        num = -(-length // page_len)
        tables[kind] = PageTable(page_len, np.arange(at, at + num, dtype=np.int32))
        at += num
    tables.setdefault(Kind.FULL, PageTable(PAGE, np.empty(0, dtype=np.int32)))
    sizes = sizes_of(backend, at, PAGE, None)
    return Subject(backend, TensorPools(backend.kv_layout, backend.state_layout, sizes), tables)


def sizes_of(
    backend: ModelBackend, num_pages: int, page_size: int, packing: Packing | None
) -> PoolSizes:
    """Pools of two rows."""
    return PoolSizes.of(
        backend.kv_layout,
        backend.state_layout,
        num_pages=num_pages,
        page_size=page_size,
        num_rows=2,
        num_staging=0,
        checkpoint_bytes=None if packing is None else packing.num_bytes,
    )


def measure(
    model: str, depths: Sequence[int], steps: int, turns: int, repetitions: int
) -> Iterator[dict[str, Any]]:
    """The rows of one model: per depth, per format."""
    on = subject(model, max(depths) + steps)
    vocab = on.backend.shape.vocab_size
    ids = np.random.default_rng(0).integers(FIRST_ID, vocab, max(depths)).astype(np.int32)
    at = 0
    for depth in sorted(depths):
        logits = torch.empty(0)
        while at < depth:
            stop = min(at + CHUNK, depth)
            logits, at = on.absorb(ids[at:stop], at), stop
        begun = on.states()
        reply, wanted = greedy(on, int(logits.argmax()), depth, steps)
        end = on.states()
        for name in CHECKPOINT_FORMATS:
            parking = Parking.of(on.backend, name)
            row = {"model": model, "tokens": depth, "positions": steps, **parking.row(begun)}
            row |= parking.times(repetitions)
            for prefix, num in (("", 1), ("turns_", turns)):
                on.set_states(begun)
                got = absorb_in_turns(on, reply, depth, num, parking)
                errors = (got - wanted).abs().amax(dim=1) / wanted.std(dim=1)
                differs = got.argmax(dim=1) != wanted.argmax(dim=1)
                row[f"{prefix}end_state_error"] = distance(on.states(), end)
                row[f"{prefix}logit_error"] = float(errors.max())
                row[f"{prefix}different_ids"] = int(differs.sum())
            yield row
        on.set_states(begun)


def absorb_in_turns(
    on: Subject, ids: IntArray, start: int, turns: int, parking: Parking
) -> torch.Tensor:
    """The logits after each id, the state being parked before each of so many turns."""
    rows = []
    for n in range(len(ids)):
        if n % -(-len(ids) // turns) == 0:
            on.set_states(parking.there_and_back(on.states()))
        rows.append(on.absorb(ids[n : n + 1], start + n))
    return torch.stack(rows)


def greedy(on: Subject, first: int, start: int, steps: int) -> tuple[IntArray, torch.Tensor]:
    """The likeliest `steps` ids, the first of them given, and the logits after each."""
    ids, rows = np.full(steps, first, dtype=np.int32), []
    for n in range(steps):
        rows.append(on.absorb(ids[n : n + 1], start + n))
        if n + 1 < steps:
            ids[n + 1] = int(rows[-1].argmax())
    return ids, torch.stack(rows)


@dataclass(frozen=True, slots=True)
class Parking:
    """Pools with room for one checkpoint of a format, in pages of their own."""

    format: str
    num_bytes: int
    pools: TensorPools
    pages: IntArray

    @classmethod
    def of(cls, backend: ModelBackend, name: str) -> Parking:
        """Pools for a model's states."""
        packing = make_packing(backend.state_layout, name)
        num_pages = sizes_of(backend, 0, 1, packing).state_pages
        pools = TensorPools(
            backend.kv_layout,
            backend.state_layout,
            sizes_of(backend, num_pages, 1, packing),
            packing=packing,
        )
        num_bytes = backend.state_layout.num_bytes if packing is None else packing.num_bytes
        return cls(name, num_bytes, pools, np.arange(num_pages, dtype=np.int32))

    def there_and_back(self, states: States) -> States:
        """What a checkpoint of the states comes back as."""
        for key, state in states.items():
            self.pools.state[key][0] = state
        self.pools.save_state(0, self.pages)
        self.pools.load_state(self.pages, 1)
        return {key: state[1].clone() for key, state in self.pools.state.items()}

    def row(self, states: States) -> dict[str, Any]:
        """Format, bytes, and the error of a checkpoint of the states."""
        return {
            "format": self.format,
            "bytes": self.num_bytes,
            "state_error": distance(self.there_and_back(states), states),
        }

    def times(self, repetitions: int) -> dict[str, float]:
        """Median seconds of saving and loading what is there."""
        return {
            "save_s": _seconds(lambda: self.pools.save_state(0, self.pages), repetitions),
            "load_s": _seconds(lambda: self.pools.load_state(self.pages, 1), repetitions),
        }


def _seconds(work: Callable[[], None], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)


def distance(states: States, wanted: States) -> float:
    """The greatest relative L2 distance of any tensor."""
    norm = torch.linalg.vector_norm
    return max(
        float(norm(states[key].float() - state.float()) / norm(state.float()))
        for key, state in wanted.items()
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    rows = []
    with console_for(options.json).status("") as status, torch.inference_mode():
        for model in options.models:
            status.update(model)
            rows += measure(
                model, options.tokens, options.steps, options.turns, options.repetitions
            )
    return emit(_summary(rows), COLUMNS, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="embedded, or tiny ones")
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--steps", type=int, default=200, help="tokens of the continuation")
    parser.add_argument("--turns", type=int, default=10, help="turns of it, the second time")
    parser.add_argument("--repetitions", type=int, default=25, help="checkpoints that are timed")
    add_json_option(parser)
    return parser


def _summary(rows: Sequence[dict[str, Any]]) -> Result:
    ratios, goals = {}, []
    for name, most_bytes in MOST_BYTES.items():
        mine = [row for row in rows if row["format"] == name]
        whole = [row for row in rows if row["format"] == "unchanged"]
        share = max(a["bytes"] / b["bytes"] for a, b in zip(mine, whole, strict=True))
        worst = {
            key: max(row[key] for row in mine)
            for key in ("logit_error", "turns_logit_error", "turns_end_state_error")
        }
        ratios |= {f"{name}: bytes": share, **{f"{name}: {key}": worst[key] for key in worst}}
        logits, states = TOLERANCES[name]
        goals += [
            Goal(f"{name}, bytes of a checkpoint over unchanged", share, most_bytes),
            Goal(f"{name}, error of logits", worst["turns_logit_error"], logits),
            Goal(f"{name}, error of a state", worst["turns_end_state_error"], states),
        ]
    return Result(name="bench/turns/checkpoints", rows=rows, ratios=ratios, goals=goals)


if __name__ == "__main__":
    sys.exit(main())
