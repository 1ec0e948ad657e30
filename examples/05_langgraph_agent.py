"""A LangGraph agent with two tools: it calls them, reads what they give back, and remembers."""

import operator

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from agentcache.integrations.langchain_chat import ChatAgentCache
from agentcache.integrations.langgraph_session import AgentCacheMiddleware, closing_sessions

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@tool
def calculator(expression: str) -> str:
    """Compute with two numbers, such as 12 + 7."""
    left, sign, right = expression.split()
    return f"{SIGNS[sign](float(left), float(right)):g}"


@tool
def population(city: str) -> str:
    """How many thousand people live in a city."""
    return {"Oslo": "717", "Bern": "137"}.get(city, "error: not found")


def text_of(state: dict[str, list[AIMessage]]) -> str:
    """What the agent answered at the end of a run."""
    return str(state["messages"][-1].content)


with ChatAgentCache(model="tiny-agent", max_tokens=64) as chat:
    saver = closing_sessions(InMemorySaver(), chat)
    agent = create_agent(
        chat,
        [calculator, population],
        system_prompt="You answer with tools. The code word is Heron.",
        middleware=[AgentCacheMiddleware(tool_time="10s")],
        checkpointer=saver,
    )
    thread = {"configurable": {"thread_id": "1"}}
    for question, answer in (
        ("What is the population of Oslo?", "The population of Oslo is 717."),
        ("Add 137 to that.", "717 + 137 is 854."),
        ("What is the code word?", "The code word is Heron."),
    ):
        state = agent.invoke({"messages": [("user", question)]}, thread)
        print(question, "->", text_of(state))
        assert text_of(state) == answer
    for reply in (m for m in state["messages"] if isinstance(m, AIMessage)):
        calls = [f"{call['name']}({call['args']})" for call in reply.tool_calls]
        cached = reply.usage_metadata["input_token_details"]["cache_read"]
        print(f"{cached:4} of {reply.usage_metadata['input_tokens']:4} cached:", *calls or ["text"])
    saver.delete_thread("1")  # which ends the thread's session, too
