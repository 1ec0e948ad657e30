"""What a LangGraph agent costs: prompt tokens computed over ten turns, and time beside the engine.

First an agent on the embedded model: ten questions, each answered by a tool call and a text, of
which the engine has to compute what is new. The next two rows have a template that leaves out the
thinking of replies before the last question. Where each question has one reply, that reply, less
its thinking, is all that is computed again: computed are at most the new messages and one reply a
question. Where a question has several replies, with results of tools between them, every token
after the first thinking that was left out has another history than it had, and no exact cache can
know it: there, new is what follows the longest beginning that was known, and at most one reply a
question may be computed beside that. Then the same kind of agent on a model of two thin
layers, which nobody waits for long, with a short and with a long history behind it: processor time
of the calling thread from the middleware's entry to its return, so messages, digests, rendering and
tokenising, and nothing of the engine. It is told in three parts. LangChain alone: the same agent
with a chat model and a middleware that do nothing. New text: what a call's new tokens take, by what
a call with many more of them takes longer. Rest: what is left, so what chat model and middleware
take whatever is said. The goal is for all but the new text, with LangChain's own part and without.
Compared with rendering and encoding the whole list. Of times the least is taken, since other work
slows a processor down; medians are in the JSON. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph.checkpoint.memory import InMemorySaver
from transformers import AutoTokenizer, GraniteMoeHybridConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit, median
from benchkit.shown import count, millis

from agentcache.config import CacheConfig
from agentcache.engine.loader import load_model
from agentcache.engine.tiny_hybrid import build, hybrid_path, tiny_hybrid_config
from agentcache.integrations._langchain.messages import openai_messages
from agentcache.integrations.langchain_chat import ChatAgentCache
from agentcache.integrations.langgraph_session import AgentCacheMiddleware
from agentcache.runtime import Runtime
from agentcache.tree.key import common_prefix_len

if TYPE_CHECKING:
    from collections.abc import Sequence

    from langchain_core.messages import BaseMessage

GOAL_TOKENS, GOAL_S = 1.01, 0.002
GOAL_DROPPED = 1.0
SHORT_WORDS, LONG_WORDS = 20, 200
"""Words of a question, and of one that tells what new text takes."""

_NO_TIMES = dict.fromkeys(
    ("overhead_s", "floor_s", "new_text_s", "rest_s", "encode_all_s"), float("nan")
)
MOST_LONG = 20
"""Calls with long questions: a model's context has an end."""

THREAD: Any = {"configurable": {"thread_id": "bench"}}
COLUMNS = (
    Column("agent", "agent"),
    Column("model calls", "calls", count),
    Column("messages", "messages", count),
    Column("history", "history_tokens", count),
    Column("new", "new_tokens", count),
    Column("computed", "computed_tokens", count),
    Column("overhead", "overhead_s", millis),
    Column("LangChain", "floor_s", millis),
    Column("new text", "new_text_s", millis),
    Column("rest", "rest_s", millis),
    Column("encoding all", "encode_all_s", millis),
)


class Watch(AgentMiddleware):
    """Around all others: what is asked and answered, and processor time of this thread in between.

    Random weights choose nothing: with `calls`, a grammar makes them answer a question by a call.
    """

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self._calls = calls
        self.seconds: list[float] = []
        self.replies: list[AIMessage] = []

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        """Call the model, by the watch."""
        if self._calls and isinstance(request.messages[-1], HumanMessage):
            request = request.override(tool_choice="any")
        begun = time.thread_time()
        response = handler(request)
        self.seconds.append(time.thread_time() - begun)
        self.replies += response.result
        return response


class PassOn(AgentMiddleware):
    """A middleware that does nothing."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        """Call the model."""
        return handler(request)


class Mute(BaseChatModel):
    """A chat model that does nothing."""

    @property
    def _llm_type(self) -> str:
        return "mute"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """The model, bound as any other one is."""
        return self.bind(tools=[], **kwargs)

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage("yes"))])


class Words:
    """Texts of the README's words, the same in every run."""

    def __init__(self) -> None:
        readme = Path(__file__).resolve().parents[2] / "README.md"
        self._words = readme.read_text(encoding="utf-8").split()
        self._draw = random.Random(0)

    def text(self, num: int) -> str:
        """That many of them."""
        return " ".join(self._draw.choice(self._words) for _ in range(num))


def make_agent(chat: BaseChatModel, words: Words, *middleware: AgentMiddleware) -> Any:
    """An agent with two tools that answer at length."""

    @tool
    def run(command: str) -> str:
        """Run a command."""
        return f"{command}\n{words.text(200)}"

    @tool
    def read(path: str) -> str:
        """Read a file."""
        return f"{path}\n{words.text(200)}"

    return create_agent(
        chat,
        [run, read],
        system_prompt=words.text(100),
        middleware=middleware,
        checkpointer=InMemorySaver(),
    )


def ten_turns(num: int) -> dict[str, Any]:
    """Tokens over an agent's turns on the embedded model."""
    words, watch = Words(), Watch(calls=True)
    with Runtime.load("tiny-hybrid", cache=CacheConfig(budget="512MiB")) as runtime:
        # what ends texts in JSON, which random weights would go on with
        ending = {runtime.tokenizer.encode_plain(sign)[0]: 12.0 for sign in '"},'}
        chat = ChatAgentCache(model=runtime, max_tokens=40, logit_bias=ending)
        agent = make_agent(chat, words, watch, AgentCacheMiddleware())
        for _ in range(num):
            state = agent.invoke({"messages": [HumanMessage(words.text(40))]}, THREAD)
    usages: list[Any] = [reply.usage_metadata for reply in watch.replies]
    prompts = [usage["input_tokens"] for usage in usages]
    known = [0, *(usage["total_tokens"] for usage in usages[:-1])]
    return {
        "agent": "ten turns",
        "calls": len(usages),
        "messages": len(state["messages"]),
        "history_tokens": usages[-1]["total_tokens"],
        "new_tokens": sum(prompts) - sum(known),
        "computed_tokens": sum(u["input_token_details"]["cache_creation"] for u in usages),
        **_NO_TIMES,
        "overhead_s": median(watch.seconds),
    }


class Thinker(Watch):
    """The same, of replies that begin with thinking: a call first where there are tools, then text.

    appended: tokens of the messages that are new in each call. unknown: tokens of each prompt after
    the longest beginning that any call before left. repeated: tokens of the last reply before each
    question.
    """

    def __init__(self, runtime: Runtime, *, calls: bool) -> None:
        super().__init__(calls=calls)
        self._runtime = runtime
        self._known: list[Any] = []
        self.appended = 0
        self.unknown = 0
        self.repeated = 0

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        """Call the model, by the watch."""
        asked = isinstance(request.messages[-1], HumanMessage)
        if asked and self.replies:
            usage: Any = self.replies[-1].usage_metadata
            self.repeated += usage["output_tokens"]
        lark = self._grammar(request.tools if self._calls and asked else ())
        response = handler(request.override(model_settings={"lark": lark}))
        self.replies += response.result
        self._count(request, response.result[-1])
        return response

    def _grammar(self, tools: Sequence[Any]) -> str:
        ids = self._runtime.tokenizer.special_ids
        rules = ["THOUGHT: /[a-z ]{40,60}/", "SAID: /[a-z ]{20,40}/"]
        if tools:
            schemas = [convert_to_openai_tool(each) for each in tools]
            written = self._runtime.tool_call_grammar(schemas)
            rules.append(written.replace("start:", "calls:", 1))
        then = "calls" if tools else "SAID"
        thought = f"<[{ids['<think>']}]> THOUGHT <[{ids['</think>']}]>"
        return "\n".join([f"start: {thought} {then}", *rules])

    def _count(self, request: Any, reply: AIMessage) -> None:
        usage: Any = reply.usage_metadata
        session = request.model.sessions.session(reply.response_metadata["agentcache"]["session"])
        prompt = session.ids[: usage["input_tokens"]]
        known = [common_prefix_len(prompt, before) for before in self._known]
        self.unknown += len(prompt) - max(known, default=0)
        self._known.append(session.ids.copy())
        said = openai_messages(request.messages)
        new = [*takewhile(lambda message: message["role"] != "assistant", reversed(said))][::-1]
        form = self._runtime.chat_format
        first = len(new) == len(said)
        self.appended += len(prompt if first else form.encode(form.render(new).segments).ids)


_LAST_QUESTION = """
{%- set ns = namespace(last_question=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last_question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
"""


def thinking_dropped(num: int, *, calls: bool) -> dict[str, Any]:
    """Tokens over an agent's turns with a template that leaves thinking out of earlier turns."""
    loaded = load_model("tiny-hybrid")
    own = loaded.tokenizer.chat_template
    thinks = "message.role == 'assistant' and message.reasoning_content"
    later = own.replace(thinks, f"{thinks} and loop.index0 > ns.last_question")
    loaded.tokenizer.chat_template = _LAST_QUESTION + later
    words = Words()
    with Runtime(loaded.model, loaded.tokenizer, cache=CacheConfig(budget="512MiB")) as runtime:
        watch = Thinker(runtime, calls=calls)
        ending = {runtime.tokenizer.encode_plain(sign)[0]: 12.0 for sign in '"},'}
        chat = ChatAgentCache(model=runtime, max_tokens=120, logit_bias=ending)
        agent = make_agent(chat, words, watch, AgentCacheMiddleware())
        for _ in range(num):
            state = agent.invoke({"messages": [HumanMessage(words.text(40))]}, THREAD)
    usages: list[Any] = [reply.usage_metadata for reply in watch.replies]
    return {
        "agent": f"thinking dropped, {'replies and tools' if calls else 'one reply a question'}",
        "calls": len(usages),
        "messages": len(state["messages"]),
        "history_tokens": usages[-1]["total_tokens"],
        "new_tokens": watch.unknown if calls else watch.appended,
        "appended_tokens": watch.appended,
        "repeated_tokens": watch.repeated,
        "computed_tokens": sum(u["input_token_details"]["cache_creation"] for u in usages),
        **_NO_TIMES,
    }


def thin_runtime() -> Runtime:
    """The embedded tokenizer and template on two thin layers."""
    settings: dict[str, Any] = {
        **tiny_hybrid_config().to_dict(),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "mamba_n_heads": 2,
        "mamba_d_state": 8,
    }
    model = build(GraniteMoeHybridConfig(**settings))
    tokenizer = AutoTokenizer.from_pretrained(hybrid_path("tiny-hybrid"))
    return Runtime(model, tokenizer, cache=CacheConfig(budget="512MiB"))


def past(words: Words, tokens: int, messages: int) -> list[BaseMessage]:
    """A thread as it comes from a checkpointer: tool calls and their results."""
    rounds = max(1, messages // 3)
    per_result = max(1, int(tokens / rounds / 2.4) - 30)  # tokens to a word of the README
    out: list[BaseMessage] = []
    for n in range(rounds):
        args = {"command": words.text(8), "timeout": n}
        call = {"name": "run", "args": args, "id": f"past{n}", "type": "tool_call"}
        out.append(HumanMessage(words.text(10)))
        out.append(AIMessage("", tool_calls=[call]))
        out.append(ToolMessage(words.text(per_result), tool_call_id=f"past{n}", name="run"))
    return out


def overhead(tokens: int, messages: int, repetitions: int) -> dict[str, Any]:
    """Time beside the engine with a history of about that many tokens."""
    words, watch, floor = Words(), Watch(calls=False), Watch(calls=False)
    with thin_runtime() as runtime:
        chat = ChatAgentCache(model=runtime, max_tokens=1)
        agent = make_agent(chat, words, watch, AgentCacheMiddleware())
        bare = make_agent(Mute(), words, floor, PassOn())
        history = [*past(words, tokens, messages), AIMessage(words.text(5))]
        for each in (agent, bare):
            each.invoke({"messages": [*history, HumanMessage(words.text(SHORT_WORDS))]}, THREAD)
        watch.seconds.clear()
        floor.seconds.clear()
        for _ in range(repetitions):
            asked = {"messages": [HumanMessage(words.text(SHORT_WORDS))]}
            state = agent.invoke(asked, THREAD)
            bare.invoke(asked, THREAD)
        said = openai_messages(state["messages"])
        encode_all = min(_encode_all(runtime, said) for _ in range(3))
        times, num_new, usage = [*watch.seconds], *_new_tokens(watch)
        watch.seconds.clear()
        for _ in range(min(repetitions, MOST_LONG)):
            agent.invoke({"messages": [HumanMessage(words.text(LONG_WORDS))]}, THREAD)
        per_token = (min(watch.seconds) - min(times)) / (_new_tokens(watch)[0] - num_new)
    new_text = num_new * per_token
    return {
        "agent": "history",
        "calls": len(times),
        "messages": len(said),
        "history_tokens": usage["input_tokens"],
        "new_tokens": num_new,
        "computed_tokens": usage["input_token_details"]["cache_creation"],
        "overhead_s": min(times),
        "median_overhead_s": median(times),
        "floor_s": min(floor.seconds),
        "new_text_s": new_text,
        "rest_s": min(times) - min(floor.seconds) - new_text,
        "encode_all_s": encode_all,
    }


def _new_tokens(watch: Watch) -> tuple[int, Any]:
    """Tokens of the last call that follow the call before it, and its usage."""
    before, usage = (reply.usage_metadata for reply in watch.replies[-2:])
    assert before is not None
    assert usage is not None
    return usage["input_tokens"] - before["total_tokens"], usage


def _encode_all(runtime: Runtime, messages: list[dict[str, Any]]) -> float:
    """Processor time of rendering and encoding the whole list with a template nobody has used."""
    from agentcache.engine.chat import ChatFormat

    form = ChatFormat(runtime.tokenizer)
    begun = time.thread_time()
    form.encode(form.render(messages).segments)
    return time.thread_time() - begun


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = console_for(options.json)
    with console.status("an agent of ten turns"):
        turns = ten_turns(options.turns)
        dropped = [thinking_dropped(options.turns, calls=calls) for calls in (False, True)]
    with console.status(f"histories of {options.short} and {options.long} tokens"):
        short = overhead(options.short, 12, options.repetitions)
        long = overhead(options.long, options.messages, options.repetitions)
    ratio = turns["computed_tokens"] / turns["new_tokens"]
    grown = long["overhead_s"] - short["overhead_s"]
    result = Result(
        name="bench/agents/langgraph",
        rows=[turns, *dropped, short, long],
        ratios={
            "computed_over_new": ratio,
            "overhead_over_encoding_all": long["overhead_s"] / long["encode_all_s"],
        },
        goals=[
            Goal("tokens computed over new ones in ten turns", ratio, GOAL_TOKENS),
            *(
                Goal(
                    f"tokens computed over new ones and a reply a question, {row['agent']}",
                    row["computed_tokens"] / (row["new_tokens"] + row["repeated_tokens"]),
                    GOAL_DROPPED,
                )
                for row in dropped
            ),
            Goal(
                "seconds of a call with a long history, new text aside",
                long["overhead_s"] - long["new_text_s"],
                GOAL_S,
            ),
            Goal("the same, LangChain aside", long["rest_s"], GOAL_S),
            Goal("seconds that a long history adds to a call", grown, GOAL_S),
        ],
        settings={"repetitions": options.repetitions},
    )
    return emit(result, COLUMNS, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10, help="questions to the first agent")
    parser.add_argument("--short", type=int, default=1000, help="tokens of the short history")
    parser.add_argument("--long", type=int, default=100_000, help="tokens of the long history")
    parser.add_argument("--messages", type=int, default=200, help="messages of the long history")
    parser.add_argument("--repetitions", type=int, default=25, help="calls with each history")
    parser.add_argument("--threads", type=int, help="torch threads; by default what torch takes")
    add_json_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
