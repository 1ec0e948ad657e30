"""What a whole list of messages costs a session at each call, beside what is new in it.

An agent calls one tool a turn and sends its whole history each time, as frameworks do, in dicts of
its own making. Timed, as CPU time of its thread, is what the session does with it, without a model:
find the tip that the list goes on from, render, encode what is new, read the reply, keep the new
history; a call adds a reply of some 30 tokens and a tool's result of some 20. The other column
renders and encodes the whole list, which is what a client without sessions has to do. Exit status 1
if a goal is missed.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit, median
from benchkit.shown import count

from agentcache.engine.chat import ChatFormat
from agentcache.engine.loader import load_model
from agentcache.engine.tokenizer import Tokenizer
from agentcache.session.prompts import PromptBuilder
from agentcache.sessions.registry import Tip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.session.history import SessionTip
    from agentcache.session.prompts import Prompt

LENGTHS = (1_000, 10_000, 100_000)
NUM_MESSAGES = 200
GOAL_MS = 2.0
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name} of this agent.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
    for name in ("list_files", "read_file", "write_file", "search", "run_tests")
]


def _ms(value: float) -> str:
    return f"{value:.2f}"


COLUMNS = (
    Column("history", "history_tokens", count),
    Column("messages", "messages", count),
    Column("new tokens", "new_tokens", count),
    Column("ms per call", "ms_per_call", _ms),
    Column("ms, all encoded", "ms_encode_all", _ms),
    Column("times", "times", _ms),
)


class Agent:
    """One trajectory in a session of its own, without a model behind it."""

    def __init__(self, template: str | None) -> None:
        source = load_model("tiny-hybrid").tokenizer
        if template is not None:
            source.chat_template = template
        self.tokenizer = Tokenizer(source)
        self.format = ChatFormat(self.tokenizer)
        self.builder = PromptBuilder(self.format, self.tokenizer, self.tokenizer.vocab_size)
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You are a careful agent. " * 8},
            {"role": "user", "content": "Find out why the tests fail, and mend it."},
        ]
        self.tip: SessionTip | None = None
        self.calls = 0

    @property
    def num_tokens(self) -> int:
        return 0 if self.tip is None else len(self.tip.history)

    def prompt(self, messages: Sequence[dict[str, Any]]) -> Prompt:
        """What the session makes of a whole list."""
        tips = () if self.tip is None else (self.tip,)
        return self.builder.from_messages(messages, TOOLS, tips)

    def call(self, result_tokens: int) -> float:
        """One turn; the seconds the session took."""
        sent = copy.deepcopy(self.messages)
        arguments = f'{{"path": "src/module_{self.calls}.py", "limit": {self.calls}}}'
        said = f'I look.<tool_call>{{"name": "read_file", "arguments": {arguments}}}</tool_call>'
        ids = self.format.encode_reply(said)
        begun = time.thread_time()
        prompt = self.prompt(sent)
        reader = self.builder.read_reply(prompt, said)
        history = self.builder.extend(prompt, ids, len(prompt.ids) + len(ids), reader.message)
        took = time.thread_time() - begun
        self.calls += 1
        # Nothing here asks for the place in the tree.
        self.tip = Tip(self.calls, self.calls, history, cast("Any", None), self.tip)
        call_id = reader.message["tool_calls"][0]["id"]
        result = "line of output\n" * max(1, result_tokens // 4)
        self.messages += [
            reader.message,
            {"role": "tool", "tool_call_id": call_id, "content": result},
        ]
        return took

    def encode_all(self) -> float:
        """The seconds it takes to render and encode the whole list."""
        begun = time.thread_time()
        self.format.encode(self.format.render(self.messages, TOOLS).segments)
        return time.thread_time() - begun


def _row(length: int, repetitions: int, template: str | None) -> dict[str, Any]:
    agent = Agent(template)
    rounds = max(2, min(NUM_MESSAGES // 2, length // 100))
    for _ in range(rounds):
        agent.call(max(1, length // rounds - 60))
    agent.call(20)
    before, history = agent.num_tokens, len(agent.messages)
    times = [agent.call(20) for _ in range(repetitions)]
    whole = median([agent.encode_all() for _ in range(3)])
    return {
        "history_tokens": before,
        "messages": history,
        "new_tokens": (agent.num_tokens - before) // repetitions,
        "ms_per_call": 1000 * median(times),
        "ms_encode_all": 1000 * whole,
        "times": whole / median(times),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument(
        "--template", type=Path, metavar="FILE", help="a chat template, in place of the model's own"
    )
    add_json_option(parser)
    options = parser.parse_args(argv)
    template = options.template.read_text(encoding="utf-8") if options.template else None
    with console_for(options.json).status("whole lists"):
        rows = [_row(length, options.repetitions, template) for length in options.lengths]
    longest = rows[-1]
    name = f"ms per call at {longest['history_tokens']:,} tokens of history"
    result = Result(
        name="bench/agents/complete",
        rows=rows,
        ratios={
            f"{row['history_tokens']:,}: encoding all over a call": row["times"] for row in rows
        },
        goals=[Goal(name, longest["ms_per_call"], GOAL_MS)],
        settings={"repetitions": options.repetitions, "template": str(options.template)},
    )
    return emit(result, COLUMNS, options.json)


if __name__ == "__main__":
    sys.exit(main())
