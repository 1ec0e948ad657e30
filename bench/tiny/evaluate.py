"""Is what `tiny-agent` says right, and the same with its cache as without?

Dialogues of one to eight turns that no training has seen are held with the model through sessions
of one runtime, several at once, greedily; each tool gives its scripted result. Then every reply is
asked for again by a tenant of its own, who shares nothing and so computes the whole prompt: warm
and cold have to say the same token ids. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit
from benchkit.shown import count, percent

from agentcache import Runtime
from agentcache.engine.tiny.dialogues import KINDS
from agentcache.engine.tiny.evaluate import Tally, held_out_dialogues, judge
from agentcache.types import WeightFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache import Session
    from agentcache.engine.tiny.dialogues import Dialogue, Message
    from agentcache.engine.tiny.evaluate import Score

COLUMNS = (
    Column("kind of turn", "kind", str),
    Column("calls", "calls", count),
    Column("exact", "exact_calls", percent),
    Column("answers", "answers", count),
    Column("exact", "exact_answers", percent),
)
RECALL = ("recall of the code word", "memory of earlier turns")
MOST_TOKENS = 96


@dataclass(slots=True)
class Comparison:
    """Dialogues compared warm and cold, those that differ, and the prompt tokens of both."""

    compared: int = 0
    different: int = 0
    cached: int = 0
    prompt: int = 0


class Asking:
    """One dialogue in a session, remembered for the cold comparison."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.replies: list[tuple[list[Message], Sequence[dict[str, Any]], list[int]]] = []
        self.cached = self.prompt = 0

    async def __call__(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Message:
        turn = await self.session.acomplete(
            list(messages), tools=list(tools) or None, max_new_tokens=MOST_TOKENS
        )
        self.replies.append((list(messages), tools, list(turn.ids)))
        self.cached += turn.usage.cached_tokens
        self.prompt += turn.usage.prompt_tokens
        return turn.message


async def hold(
    runtime: Runtime, index: int, dialogue: Dialogue, tally: Tally, comparison: Comparison
) -> None:
    """One dialogue, warm and then cold."""
    with runtime.session(f"warm-{index}") as session:
        asking = Asking(session)
        await judge(dialogue, asking, tally)
    same = True
    for number, (messages, tools, ids) in enumerate(asking.replies):
        tenant = f"cold-{index}-{number}"
        with runtime.session(tenant, tenant=tenant) as cold:
            turn = await cold.acomplete(
                messages, tools=list(tools) or None, max_new_tokens=MOST_TOKENS
            )
        if turn.usage.cached_tokens:
            raise AssertionError("a tenant of its own found something in the cache")
        same = same and list(turn.ids) == ids
    comparison.compared += 1
    comparison.different += not same
    comparison.cached += asking.cached
    comparison.prompt += asking.prompt


async def run(runtime: Runtime, count: int, seed: int, at_once: int) -> tuple[Tally, Comparison]:
    """All dialogues, `at_once` of them side by side."""
    tally, comparison, places = Tally(), Comparison(), asyncio.Semaphore(at_once)

    async def one(index: int, dialogue: Dialogue) -> None:
        async with places:
            await hold(runtime, index, dialogue, tally, comparison)

    dialogues = held_out_dialogues(count, seed)
    await asyncio.gather(*(one(index, dialogue) for index, dialogue in enumerate(dialogues)))
    return tally, comparison


def conversation_seconds(runtime: Runtime) -> float:
    """Wall time of three turns with two calls; infinite if the last answer is wrong."""
    tool = {"name": "height", "parameters": {"properties": {"name": {"type": "string"}}}}
    began = time.perf_counter()
    with runtime.session("three turns") as session:
        for number, new in enumerate(
            (
                {"role": "user", "content": "How high is Etna?"},
                {"role": "tool", "content": "3403"},
                {"role": "user", "content": "And Fuji?"},
                {"role": "tool", "content": "3776"},
                {"role": "user", "content": "What was the first result?"},
            )
        ):
            tools = [] if number else [{"type": "function", "function": tool}]
            turn = session.chat([new], tools=tools or None, max_new_tokens=MOST_TOKENS)
    seconds = time.perf_counter() - began
    return seconds if turn.message["content"] == "The first result was 3403." else math.inf


def row_of(kind: str, scores: tuple[Score, Score]) -> dict[str, Any]:
    """A line of the table."""
    calls, answers = scores
    return {
        "kind": kind,
        "calls": calls.total,
        "exact_calls": calls.share,
        "answers": answers.total,
        "exact_answers": answers.share,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dialogues", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the dialogues")
    parser.add_argument("--at-once", type=int, default=8, help="dialogues side by side")
    parser.add_argument("--model", default="tiny-agent", help="or a folder, as export writes it")
    parser.add_argument("--weight-format", choices=get_args(WeightFormat), default="unchanged")
    parser.add_argument("--show-wrong", type=int, default=0, help="how many wrong replies to print")
    add_json_option(parser)
    args = parser.parse_args(argv)
    if min(args.dialogues, args.at_once) < 1:
        parser.error("--dialogues and --at-once have to be at least 1")
    with Runtime.load(args.model, weight_format=args.weight_format) as runtime:
        seconds = conversation_seconds(runtime)
        tally, comparison = asyncio.run(run(runtime, args.dialogues, args.seed, args.at_once))
    lengths = range(1, 9)
    rows = [row_of(kind, tally.sums(lengths, [kind])) for kind in KINDS]
    rows += [
        row_of("all, dialogues of 1 and 2 turns", tally.sums((1, 2))),
        row_of("all, dialogues of 3 to 7 turns", tally.sums(range(3, 8))),
        row_of("all, dialogues of 8 turns", tally.sums((8,))),
    ]
    short_calls, short_answers = tally.sums((1, 2))
    long_calls, long_answers = tally.sums((8,))
    recall = tally.sums(lengths, RECALL)[1]
    goals = [
        Goal("calls of 1 and 2 turns, %", 100 * short_calls.share, 98, at_least=True),
        Goal("answers of 1 and 2 turns, %", 100 * short_answers.share, 97, at_least=True),
        Goal("calls of 8 turns, %", 100 * long_calls.share, 90, at_least=True),
        Goal("answers of 8 turns, %", 100 * long_answers.share, 90, at_least=True),
        Goal("recall and memory, %", 100 * recall.share, 90, at_least=True),
        Goal("dialogues with other ids when cold", comparison.different, 0),
        Goal("three turns with two calls, s", seconds, 10),
    ]
    console = console_for(args.json)
    for kind, said, expected in tally.wrong[: args.show_wrong]:
        console.print(kind, said, "instead of", expected, sep="\n  ", markup=False)
    console.print(
        f"{comparison.compared} dialogues; {comparison.cached:,} of {comparison.prompt:,} "
        "prompt tokens were cached when warm, none when cold"
    )
    ratios = {"prompt tokens cached": comparison.cached / comparison.prompt}
    settings = {
        "dialogues": args.dialogues,
        "seed": args.seed,
        "model": args.model,
        "weight_format": args.weight_format,
    }
    result = Result("bench/tiny/evaluate", rows, ratios, goals, settings)
    return emit(result, COLUMNS, args.json)


if __name__ == "__main__":
    sys.exit(main())
