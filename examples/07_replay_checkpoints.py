"""Replay the threads in a LangGraph checkpointer: what would a session have saved?"""

import json
import tempfile
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver

from agentcache.integrations.langgraph_session import recorded_calls
from agentcache.replay.trace import read_paths
from agentcache.replayer import Replayer, ReplayOptions

SYSTEM = "You repair programs. " * 20

# Threads of another model; a SqliteSaver or PostgresSaver of your own takes the place of this one.
saver = InMemorySaver()
answers = (AIMessage(f"Answer {n}: the validator has to use a full match.") for n in range(6))
agent = create_agent(
    GenericFakeChatModel(messages=answers), system_prompt=SYSTEM, checkpointer=saver
)
for thread in ("red", "blue"):
    for question in ("What is wrong?", "Why?", "How is it repaired?"):
        config = {"configurable": {"thread_id": thread}}
        agent.invoke({"messages": [("user", question)]}, config)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "threads.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for call in recorded_calls(saver, system=SYSTEM):
            file.write(json.dumps(call) + "\n")
    result = Replayer("tiny-hybrid", read_paths(path), ReplayOptions(concurrency=2)).run()

for call in result.calls:
    print(
        f"{call.trajectory:5} call {call.call}: {call.cached_tokens} of {call.prompt_tokens} cached"
    )
print(f"hit rate {result.tokens.hit_rate:.1%} of an ideal {result.ideal_hit_rate:.1%}")
assert len(result.calls) == 6
