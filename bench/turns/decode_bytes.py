"""What one decode step allocates and copies, by the length of the history.

Attention has to read the history, but nothing may be copied for it: the bytes are the same at any
length. Counted by torch's profiler around one forward pass over a single token on the engine
thread. Exit status 1 if they are not constant.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.probes import forward, standing_at
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit, median
from benchkit.shown import count, kib, millis

from agentcache.config import CacheConfig
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.session import Session
    from agentcache.types import IntArray

GOAL = 1.05
COLUMNS = (
    Column("history", "history_tokens", count),
    Column("allocated", "allocated_bytes", kib),
    Column("copied", "copied_bytes", kib),
    Column("copies", "copies", count),
    Column("read: KV", "kv_bytes", kib),
    Column("step", "step_s", millis),
)

Event = Mapping[str, Any]

# Operators that move data: of these the argument that is written,
_WRITES_ARGUMENT = {"aten::copy_": 0, "aten::index_copy_": 3, "aten::_index_put_impl_": 2}
# and those whose result is all that they allocate.
_WRITES_RESULT = {"aten::cat", "aten::index_select", "aten::index", "aten::gather"}

_ITEM_BYTES = {
    "float": 4,
    "double": 8,
    "int": 4,
    "long int": 8,
    "short int": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::BFloat16": 2,
    "c10::Half": 2,
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one pass: every allocation, whether freed again or not, and what copies write."""

    allocated: int
    copied: int
    copies: int


def traffic(events: Sequence[Event]) -> Traffic:
    """Counts of a profiler trace that was taken with shapes and memory."""
    allocations = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Bytes"] > 0
    ]
    copies = [num for event in events if (num := _written(event, allocations))]
    return Traffic(sum(num for _, num in allocations), sum(copies), len(copies))


def _written(event: Event, allocations: Sequence[tuple[float, int]]) -> int:
    """Bytes that an operator copies; 0 for one that does not move data."""
    name = event.get("name")
    if name in _WRITES_ARGUMENT:
        at = _WRITES_ARGUMENT[name]
        size = math.prod(event["args"]["Input Dims"][at])
        return int(size) * _ITEM_BYTES[event["args"]["Input type"][at]]
    if name in _WRITES_RESULT:
        begin, end = event["ts"], event["ts"] + event["dur"]
        return sum(num for at, num in allocations if begin <= at <= end)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    console = console_for(options.json)
    rows = []
    runtime = Runtime.load(options.model, cache=CacheConfig(budget="1GiB"))
    with runtime, console.status("") as status:
        session = runtime.session("history")
        ids = np.random.default_rng(0).integers(
            0, runtime.tokenizer.vocab_size, options.longest + _num_steps(options.steps)
        )
        for length in _lengths(options.shortest, options.longest):
            status.update(f"{length} tokens")
            rows.append(_row(runtime, session, ids.astype(np.int32), length, options.steps))
    return emit(_summary(rows, options.model), COLUMNS, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-hybrid", help="embedded model, folder or Hub id")
    parser.add_argument("--shortest", type=int, default=1024, help="history at the start")
    parser.add_argument("--longest", type=int, default=32768, help="doubled up to this length")
    parser.add_argument("--steps", type=int, default=15, help="decode steps that are timed")
    add_json_option(parser)
    return parser


def _lengths(shortest: int, longest: int) -> list[int]:
    out = [shortest]
    while 2 * out[-1] <= longest:
        out.append(2 * out[-1])
    return out


def _num_steps(timed: int) -> int:
    return _WARM_UP + timed + 1


_WARM_UP = 2


def _row(
    runtime: Runtime, session: Session, ids: IntArray, length: int, timed: int
) -> dict[str, Any]:
    session.generate(ids[:length], max_new_tokens=0)
    tokens = ids[: length + _num_steps(timed)]
    seconds, counts = runtime.on_engine(lambda: _decode(runtime, tokens, length))
    return {
        "history_tokens": length,
        "allocated_bytes": counts.allocated,
        "copied_bytes": counts.copied,
        "copies": counts.copies,
        "kv_bytes": length * runtime.shape.kv_bytes_per_token,
        "step_s": median(seconds[_WARM_UP:]),
    }


def _decode(runtime: Runtime, tokens: IntArray, length: int) -> tuple[list[float], Traffic]:
    """Decode `tokens[length:]` one by one: seconds of each step but the last, which is profiled."""
    seconds = []
    with standing_at(runtime, tokens, length) as lease:
        for at in range(length, len(tokens) - 1):
            begin = time.perf_counter()
            forward(runtime, lease, tokens[: at + 1], at)
            seconds.append(time.perf_counter() - begin)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            record_shapes=True,
            profile_memory=True,
        ) as profiler:
            forward(runtime, lease, tokens, len(tokens) - 1)
    return seconds, traffic(_events(profiler))


def _events(profiler: torch.profiler.profile) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _summary(rows: list[dict[str, Any]], model: str) -> Result:
    ratios = {}
    for what in ("allocated", "copied"):
        found = [row[f"{what}_bytes"] for row in rows]
        ratios[f"{what}_most_over_least"] = max(found) / min(found)
    return Result(
        name="bench/turns/decode_bytes",
        rows=rows,
        ratios=ratios | {"step_longest_over_shortest": rows[-1]["step_s"] / rows[0]["step_s"]},
        goals=[Goal(name, ratio, GOAL) for name, ratio in ratios.items()],
        settings={"model": model},
    )


if __name__ == "__main__":
    sys.exit(main())
