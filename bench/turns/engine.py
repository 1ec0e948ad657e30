"""What the engine gains over transformers' own code, and what it adds to a forward pass.

Prefill: a long prompt from nothing, by the engine and by the stock model with its stock cache, on
the same threads; the stock model once with the chunk of its scan that published models of this
family have, and once with the one that suits it best on a CPU. Turn: a few tokens after that
prompt, over the prompt from nothing. Batch: tokens per second of eight sessions of unequal length
that decode together, over those of one of them alone. Overhead: a decode step of a running session
over a bare forward pass of one token, with a short and with a long history. All in one process, in
turn; medians, and of the long prompt the least. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.probes import forward, standing_at
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit, median
from benchkit.shown import count, millis

from agentcache.config import CacheConfig
from agentcache.engine.loader import load_model
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.types import IntArray

MODEL = "small-hybrid"
SESSIONS = 8
PREFILL_GOAL, TURN_GOAL, BATCH_GOAL, OVERHEAD_GOAL = 1.8, 80.0, 3.0, 1.10
PUBLISHED_CHUNK, SHORT_CHUNK = 256, 64
TURN_LEN = 32
COLUMNS = (
    Column("what", "what"),
    Column("tokens", "tokens", count),
    Column("ours", "ours_s", millis),
    Column("against", "other_s", millis),
    Column("ratio", "ratio", "{:.3f}".format),
)


def ids(runtime: Runtime, length: int, seed: int) -> IntArray:
    """Token ids that nothing else shares."""
    generator = np.random.default_rng(seed)
    return generator.integers(8, runtime.tokenizer.vocab_size, length).astype(np.int32)


def prefill(runtime: Runtime, model: str, length: int, repetitions: int) -> list[dict[str, Any]]:
    """Seconds of a prompt from nothing, of the same by the stock model, and of a turn behind it.

    The least of several, which take turns: a machine that others use changes its speed within
    seconds.
    """
    stock, tokens = load_model(model).model.eval(), ids(runtime, length, 0)
    given = torch.from_numpy(tokens).long()[None]
    runtime.session().generate(tokens, max_new_tokens=0)
    ours: list[float] = []
    warm: list[float] = []
    other: dict[int, list[float]] = {PUBLISHED_CHUNK: [], SHORT_CHUNK: []}
    for n in range(repetitions):
        warm += [_turn(runtime, tokens, 10 * n + m) for m in range(5)]
        ours.append(runtime.on_engine(lambda: runtime.engine.run_cold(tokens, length, 1).ttft_s))
        for chunk, seconds in other.items():
            _use_chunk(stock, chunk)
            begin = time.perf_counter()
            with torch.inference_mode():
                stock(input_ids=given, use_cache=True, logits_to_keep=1)
            seconds.append(time.perf_counter() - begin)
    return [
        *(
            _row(f"prefill of {length}, stock in chunks of {chunk}", length, min(ours), min(many))
            for chunk, many in other.items()
        ),
        _row(f"a turn of {TURN_LEN} tokens", length, min(warm), min(ours)),
    ]


def _turn(runtime: Runtime, tokens: IntArray, seed: int) -> float:
    """Seconds to the first token of a few tokens behind a prompt that is known."""
    longer = np.concatenate([tokens, ids(runtime, TURN_LEN, 200 + seed)])
    usage = runtime.session().generate(longer, max_new_tokens=1).usage
    assert usage.computed_tokens <= TURN_LEN + 1
    return usage.ttft_s


def _use_chunk(model: Any, chunk: int) -> None:
    for module in model.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = chunk


def batch(runtime: Runtime, length: int, new: int, repetitions: int) -> dict[str, Any]:
    """Seconds per token of one session alone, and of eight together."""
    prompts = [ids(runtime, length + 37 * n, n) for n in range(SESSIONS)]
    for prompt in prompts:
        runtime.session().generate(prompt, max_new_tokens=0)

    def decode(num: int) -> float:
        streams = [
            runtime.session().generate(prompt, max_new_tokens=new, stream=True)
            for prompt in prompts[:num]
        ]
        usages = [stream.turn.usage for stream in streams]
        begun = max(usage.ttft_s for usage in usages)
        tokens = sum(usage.output_tokens - 1 for usage in usages)
        return (max(usage.total_s for usage in usages) - begun) / tokens

    alone, together = [], []
    for _ in range(repetitions):
        alone.append(decode(1))
        together.append(decode(SESSIONS))
    return _row(f"{SESSIONS} decode together", length, median(together), median(alone))


def overhead(runtime: Runtime, length: int, new: int, repetitions: int) -> dict[str, Any]:
    """Seconds of one decode step, and of a bare pass over one token."""
    prompt = ids(runtime, length, 100)
    runtime.session().generate(prompt, max_new_tokens=0)
    steps, bare = [], []
    for _ in range(repetitions):
        usage = runtime.session().generate(prompt, max_new_tokens=new).usage
        steps.append((usage.total_s - usage.ttft_s) / (usage.output_tokens - 1))
        bare.append(runtime.on_engine(lambda: _bare_step(runtime, prompt, new)))
    return _row("decode step over a bare pass", length, median(steps), median(bare))


def _bare_step(runtime: Runtime, prompt: IntArray, new: int) -> float:
    tokens = np.concatenate([prompt, ids(runtime, new, 101)])
    with standing_at(runtime, tokens, len(prompt)) as lease:
        times = []
        for at in range(len(prompt), len(tokens)):
            begin = time.perf_counter()
            forward(runtime, lease, tokens[: at + 1], at)
            times.append(time.perf_counter() - begin)
    return sum(times) / len(times)


def _row(what: str, tokens: int, ours_s: float, other_s: float) -> dict[str, Any]:
    return {
        "what": what,
        "tokens": tokens,
        "ours_s": ours_s,
        "other_s": other_s,
        "ratio": other_s / ours_s,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = console_for(options.json)
    budget = CacheConfig(budget="2GiB", max_running=SESSIONS)
    rows = []
    with Runtime.load(options.model, cache=budget) as runtime:
        with console.status("decoding"):
            rows.append(batch(runtime, options.context[0], options.new, options.repetitions))
            for length in options.context:
                rows.append(overhead(runtime, length, options.new, options.repetitions))
        with console.status(f"a prefill of {options.prefill} tokens"):
            rows += prefill(runtime, options.model, options.prefill, options.repetitions)
    return emit(_summary(rows, options), COLUMNS, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--prefill", type=int, default=8000, help="tokens of the long prompt")
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[1000, 32_000],
        help="tokens of history under the decode steps",
    )
    parser.add_argument("--new", type=int, default=48, help="tokens decoded")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, help="torch threads; by default what torch takes")
    add_json_option(parser)
    return parser


def _summary(rows: list[dict[str, Any]], options: argparse.Namespace) -> Result:
    together, *steps, published, _short, warm = rows
    goals = [
        Goal("prefill, stock over ours", published["ratio"], PREFILL_GOAL, at_least=True),
        Goal("a turn, cold over warm", warm["ratio"], TURN_GOAL, at_least=True),
        Goal("eight sessions over one, tokens/s", together["ratio"], BATCH_GOAL, at_least=True),
        *(
            Goal(
                f"decode step over a bare pass at {row['tokens']}", 1 / row["ratio"], OVERHEAD_GOAL
            )
            for row in steps
        ),
    ]
    return Result(
        name="bench/turns/engine",
        rows=rows,
        ratios={f"{row['what']} at {row['tokens']}": row["ratio"] for row in rows},
        goals=goals,
        settings={"model": options.model, "new": options.new},
    )


if __name__ == "__main__":
    sys.exit(main())
