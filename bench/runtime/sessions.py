"""Sessions that share a system prompt: what is computed, how fast, and in how much memory.

`interleaved`: eight coding agents take turns, each with a task of its own; `returning`: one comes
back after twenty others. Replies are recorded ids, taken token by token. With room for everything,
each call's computed tokens stand beside what it needs: left over if states stood at the end of
every earlier prompt and turn and of the shared system prompt and tools, and if one stood at every
token. Then `interleaved` is served again, call by call in turn: by a runtime whose budget is half
of what the other holds, and by the stock model with one cache object kept per session, which goes
on from it where the prompt extends it. Its bytes are those of its tensors' storages at the fullest.

Seconds are CPU seconds of the process, which hold on a busy machine as long as torch has one
thread. The runs come with the package. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from _columns import Kept, Needed, Ours
from _sessions import HEAD_LEN, NUM_OTHERS, NUM_SESSIONS, NUM_TURNS, TOOLS, Scenarios
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit
from benchkit.shown import count, millis

from agentcache.cli import SAMPLE
from agentcache.config import CacheConfig
from agentcache.engine.loader import load_model
from agentcache.replay.trace import read_paths
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from _columns import Column as Server
    from _columns import Served
    from _sessions import Step

    from agentcache.types import ModelShape

MODEL = "tiny-hybrid"
TOKENS_GOAL, SECONDS_GOAL, MEMORY_GOAL = 1.01, 1.3, 0.5
OURS, HALF, KEPT, NOTHING = "ours, no limit", "ours, half", "kept objects", "no cache"
COLUMNS = (
    Column("scenario", "scenario"),
    Column("call", "tag"),
    Column("calls", "calls", count),
    Column("served by", "column"),
    Column("computed", "computed_tokens", count),
    Column("needed (ends)", "needed_tokens", count),
    Column("needed (any)", "needed_any_tokens", count),
    Column("CPU a call", "seconds_per_call", millis),
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a scenario, what it needs, and how each column served it."""

    step: Step
    needed: int
    needed_any: int
    served: dict[str, Served]


class Bench:
    """The scenarios on one model. budget: bytes enough to hold everything."""

    def __init__(self, model: str, budget: str, head_len: int) -> None:
        self._model, self._budget = model, budget
        self.scenarios = make_scenarios(load_model(model).tokenizer, head_len)
        self.evictions = 0
        self.shape: ModelShape | None = None

    def alone(self, steps: Iterable[Step]) -> list[Call]:
        """Serve a scenario with room for everything."""
        needed, calls = Needed(self.scenarios.head), []
        with self._runtime(self._budget) as runtime:
            self.shape, ours = runtime.shape, Ours(runtime, TOOLS)
            for step in steps:
                served = ours.run(step)
                prompt = served.prompt
                least = needed.state_ends(prompt), needed.any_token(prompt)
                needed.add(prompt, step.reply)
                calls.append(Call(step, *least, {OURS: served}))
            self.evictions += sum(runtime.stats()["evictions"].values())
        return calls

    def against(self, calls: list[Call], *, nothing: bool) -> dict[str, int]:
        """Serve calls again beside the stock model, with half of its memory; the bytes of each."""
        budget = int(self._kept_bytes(calls) * MEMORY_GOAL)
        kept = Kept(load_model(self._model).model.eval())
        columns: dict[str, Server] = {KEPT: kept}
        if nothing:
            columns[NOTHING] = Kept(load_model(self._model).model.eval(), keeps=False)
        with self._runtime(budget) as runtime:
            columns[HALF] = Ours(runtime, TOOLS)
            for call in calls:
                for name, column in columns.items():
                    call.served[name] = column.run(call.step, call.served[OURS].prompt)
            stats = runtime.stats()
        return {
            "budget": stats["budget"],
            "peak": stats["bytes"]["total"]["peak"],
            "kept": kept.peak_bytes,
        }

    def _kept_bytes(self, calls: list[Call]) -> int:
        """The least that one cache per session holds: KV of its last call, and a state."""
        assert self.shape is not None
        lens = {
            call.step.session: len(call.served[OURS].prompt) + len(call.step.reply) - 1
            for call in calls
        }
        kv_bytes, state_bytes = self.shape.kv_bytes_per_token, self.shape.state_bytes
        return sum(length * kv_bytes + state_bytes for length in lens.values())

    def _runtime(self, budget: int | str) -> Runtime:
        return Runtime.load(self._model, cache=CacheConfig(budget=budget, max_running=1))


def make_scenarios(tokenizer: Any, head_len: int = HEAD_LEN) -> Scenarios:
    """The scenarios over the runs that come with the package."""
    runs = read_paths([SAMPLE]).trajectories
    coding = [run for run in runs if "task12" not in run.id]
    policy = next(run for run in runs if run not in coding)
    return Scenarios(tokenizer, coding, policy, head_len)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(options.threads)
    console = console_for(options.json)
    bench = Bench(options.model, options.budget, options.head)
    made = bench.scenarios
    with console.status("eight in turn, room for everything"):
        calls = {"interleaved": bench.alone(made.interleaved(options.sessions, options.turns))}
    with console.status("the same beside kept cache objects"):
        memory = bench.against(calls["interleaved"], nothing=options.no_cache)
    with console.status("one comes back"):
        calls["returning"] = bench.alone(made.returning(options.others))
    return emit(_summary(calls, memory, bench.evictions, options), COLUMNS, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL, help="embedded model, folder or Hub id")
    parser.add_argument(
        "--head", type=int, default=HEAD_LEN, help="tokens of system prompt and tools"
    )
    parser.add_argument("--sessions", type=int, default=NUM_SESSIONS, help="how many take turns")
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="turns of each of them")
    parser.add_argument("--others", type=int, default=NUM_OTHERS, help="between leave and return")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--budget", default="2GiB", help="enough to hold everything")
    parser.add_argument(
        "--no-cache", action="store_true", help="the stock model without any cache besides"
    )
    add_json_option(parser)
    return parser


def _rows(scenario: str, calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
    """One row per kind of call and column; tokens and seconds a call."""
    for tag in dict.fromkeys(call.step.tag for call in calls):
        some = [call for call in calls if call.step.tag == tag]
        for column in some[0].served:
            served = [call.served[column] for call in some]
            yield {
                "scenario": scenario,
                "tag": tag,
                "calls": len(some),
                "column": column,
                "computed_tokens": _mean(one.computed_tokens for one in served),
                "needed_tokens": _mean(call.needed for call in some),
                "needed_any_tokens": _mean(call.needed_any for call in some),
                "seconds_per_call": _mean(one.seconds for one in served),
            }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _summary(
    calls: Mapping[str, list[Call]],
    memory: Mapping[str, int],
    evictions: int,
    options: argparse.Namespace,
) -> Result:
    rows = [row for scenario, some in calls.items() for row in _rows(scenario, some)]
    goals = [
        Goal(
            f"{row['scenario']}, {row['tag']}: computed over needed",
            row["computed_tokens"] / row["needed_tokens"],
            TOKENS_GOAL,
        )
        for row in rows
        if row["column"] == OURS
    ]
    ratios = dict(_ratios(calls["interleaved"], memory))
    goals += [
        Goal("evictions with room for everything", evictions, 0),
        Goal(SPEED, ratios[SPEED], SECONDS_GOAL, at_least=True),
        Goal(SPACE, ratios[SPACE], MEMORY_GOAL),
    ]
    return Result(
        name="bench/runtime/sessions",
        rows=rows,
        ratios=ratios,
        goals=goals,
        settings={
            "model": options.model,
            "threads": options.threads,
            **{f"{name}_bytes": size for name, size in memory.items()},
        },
    )


SPEED = "interleaved: CPU seconds of kept objects over ours at half the memory"
SPACE = "interleaved: bytes of ours, at its peak, over kept objects"


def _ratios(calls: list[Call], memory: Mapping[str, int]) -> Iterator[tuple[str, float]]:
    names = list(calls[0].served)
    seconds = {name: sum(call.served[name].seconds for call in calls) for name in names}
    computed = {name: sum(call.served[name].computed_tokens for call in calls) for name in names}
    needed = sum(call.needed for call in calls)
    yield SPEED, seconds[KEPT] / seconds[HALF]
    yield "interleaved: the same against ours without limit", seconds[KEPT] / seconds[OURS]
    if NOTHING in names:
        yield "interleaved: no cache over ours at half the memory", seconds[NOTHING] / seconds[HALF]
    yield SPACE, memory["peak"] / memory["kept"]
    yield "interleaved: budget of ours over kept objects", memory["budget"] / memory["kept"]
    for name in names:
        yield f"interleaved: computed over needed, {name}", computed[name] / needed


if __name__ == "__main__":
    sys.exit(main())
