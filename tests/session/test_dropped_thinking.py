"""What a template costs that leaves the thinking of earlier turns out, with little memory too."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from testkit.models import micro_model, tokenizer

from agentcache.config import CacheConfig
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from agentcache.session import Session

LAST_QUESTION = """
{%- set ns = namespace(last_question=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last_question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
"""
CALL = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>'
HEADER_LEN = 5
"""Tokens of the reply header, behind the checkpoint at the end of a prompt."""


def forgetful_runtime(budget: str) -> Runtime:
    """Thinking stays while tools are called, and is gone once the user says more."""
    source = copy.deepcopy(tokenizer())
    thinks = "message.role == 'assistant' and message.reasoning_content"
    later = source.chat_template.replace(thinks, f"{thinks} and loop.index0 > ns.last_question")
    source.chat_template = LAST_QUESTION + later
    cache = CacheConfig(budget=budget, page_size=4, prefill_chunk=64)
    return Runtime(micro_model(), source, cache=cache)


class Agent:
    """Answers each question after some calls of a tool, with thinking in every reply."""

    def __init__(self, session: Session, calls: int) -> None:
        self.session = session
        self.calls = calls
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You repair programs. " * 8}
        ]
        self.start = 0

    def ask(self, number: int) -> int:
        """Ask, and be answered; how many tokens before the first reply to the last question were
        not reused."""
        self.messages.append({"role": "user", "content": f"Question {number} of {self.session.id}"})
        missing, start = self.reply(f"<think>why {number}</think>{CALL if self.calls else 'So.'}")
        self.start = start
        for call in range(self.calls):
            asked = self.messages[-1]["tool_calls"][0]["id"]
            result = {"role": "tool", "tool_call_id": asked, "content": "line " * 20}
            self.messages.append(result)
            said = "So." if call + 1 == self.calls else CALL
            within, _ = self.reply(f"<think>and {call}</think>{said}")
            assert within < 0  # within the loop thinking stays
        return missing

    def reply(self, said: str) -> tuple[int, int]:
        """How far reuse fell short of the start of the last loop, and the prompt's length."""
        turn = self.session.complete(self.messages, replay=said)
        self.messages.append(turn.message)
        return self.start - turn.usage.cached_tokens, turn.usage.prompt_tokens


@pytest.mark.parametrize("calls", [0, 3], ids=["one reply", "tool loop"])
@pytest.mark.parametrize("budget", ["64MiB", "2MiB"])
def test_a_question_computes_nothing_before_the_first_reply_to_the_last_one(
    budget: str, calls: int
) -> None:
    with forgetful_runtime(budget) as runtime:
        agents = [Agent(runtime.session(f"agent {n}"), calls) for n in range(3)]
        missing = [agent.ask(number) for number in range(4) for agent in agents]
        evicted = sum(runtime.stats()["evictions"].values())

    # Before the first question of each there was none.
    assert max(missing[len(agents) :]) <= HEADER_LEN
    assert (evicted > 0) == (budget == "2MiB" and calls > 0)
