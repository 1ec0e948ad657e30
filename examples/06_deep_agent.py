"""A deep agent hands work to two sub-agents; each has a session, which ends with its work."""

from collections.abc import Callable
from typing import Literal

from deepagents import create_deep_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from agentcache.integrations.langchain_chat import ChatAgentCache
from agentcache.integrations.langgraph_session import AgentCacheMiddleware

Handler = Callable[[ModelRequest], ModelResponse]


@tool
def search(folder: Literal["src", "tests"]) -> str:
    """Search a folder."""
    return f"{folder}/validators.py: 2 matches"


@wrap_model_call
def plan(request: ModelRequest, handler: Handler) -> ModelResponse | AIMessage:
    """Random weights make no plan, so the first reply is written here."""
    if not isinstance(request.messages[-1], HumanMessage):
        return handler(request)
    tasks = [{"description": f"Search {f}", "subagent_type": "finder"} for f in ("src", "tests")]
    calls = [{"name": "task", "args": args, "id": f"task{n}"} for n, args in enumerate(tasks)]
    return AIMessage("", tool_calls=calls)


@wrap_model_call
def work(request: ModelRequest, handler: Handler) -> ModelResponse:
    """Call the tool once, then answer."""
    is_task = isinstance(request.messages[-1], HumanMessage)
    response = handler(request.override(tool_choice="search" if is_task else "none"))
    (reply,) = response.result
    usage, place = reply.usage_metadata, reply.response_metadata["agentcache"]  # type: ignore[union-attr]
    print(place["session"], usage["input_token_details"], "of", usage["input_tokens"], "tokens")
    return response


finder = {
    "name": "finder",
    "description": "Finds things.",
    "system_prompt": "You find things.",
    "tools": [search],
    "middleware": [AgentCacheMiddleware(), work],
}
with ChatAgentCache(model="tiny-hybrid", max_tokens=24) as chat:
    middleware = [AgentCacheMiddleware(tool_time={"task": "5m"}), plan]
    agent = create_deep_agent(
        chat, subagents=[finder], middleware=middleware, checkpointer=InMemorySaver()
    )
    agent.invoke({"messages": [("user", "Find it.")]}, {"configurable": {"thread_id": "1"}})
    print(chat.engine.stats()["sessions"], "after the run")
    assert chat.engine.stats()["sessions"]["open"] == 1
