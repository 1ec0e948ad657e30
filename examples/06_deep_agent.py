"""A deep agent hands work to two sub-agents; each has a session, which ends with its work."""

from collections.abc import Callable

from deepagents import create_deep_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from agentcache.integrations.langchain_chat import ChatAgentCache
from agentcache.integrations.langgraph_session import AgentCacheMiddleware

Handler = Callable[[ModelRequest], ModelResponse]
USED = {"task", "height", "calculator"}


@tool
def height(name: str) -> str:
    """Height of a mountain in metres."""
    return {"Etna": "3403", "Fuji": "3776"}.get(name, "error: not found")


@tool
def calculator(expression: str) -> str:
    """Add two numbers, as in 3 + 4."""
    return f"{sum(map(float, expression.split('+'))):g}"


@wrap_model_call
def short(request: ModelRequest, handler: Handler) -> ModelResponse:
    """The pages that deep agents are told, and their tools for files, say nothing to a toy."""
    tools = [tool for tool in request.tools if getattr(tool, "name", "") in USED]
    prompt = SystemMessage("You answer with tools.")
    return handler(request.override(tools=tools, system_message=prompt))


helpers = [
    {
        "name": name,
        "description": f"Answers with {helper.name}.",
        "system_prompt": "You answer with tools.",
        "tools": [helper],
        "middleware": [AgentCacheMiddleware(), short],
    }
    for name, helper in (("finder", height), ("counter", calculator))
]
with ChatAgentCache(model="tiny-agent", max_tokens=64) as chat:
    middleware = [AgentCacheMiddleware(tool_time={"task": "5m"}), short]
    memory = InMemorySaver()
    agent = create_deep_agent(chat, subagents=helpers, middleware=middleware, checkpointer=memory)
    asked = ("user", "Ask the finder: How high is Etna? Ask the counter: What is 3 + 4?")
    state = agent.invoke({"messages": [asked]}, {"configurable": {"thread_id": "1"}})
    answer = state["messages"][-1].content
    print(answer)
    assert answer == "The height of Etna is 3403. 3 + 4 is 7."
    assert chat.engine.stats()["sessions"]["open"] == 1  # those of the sub-agents are over
