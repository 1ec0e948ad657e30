"""A LangGraph agent with two tools: each turn computes what is new, whatever the graph sends."""

from collections.abc import Callable
from typing import Annotated, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import Field

from agentcache.integrations.langchain_chat import ChatAgentCache
from agentcache.integrations.langgraph_session import AgentCacheMiddleware, closing_sessions


@tool
def list_files(folder: Literal["src", "tests"]) -> str:
    """List the files of a folder."""
    return f"{folder}/fields.py {folder}/validators.py {folder}/urls.py"


@tool
def run_test(number: Annotated[int, Field(ge=1, le=99)]) -> str:
    """Run one of the tests."""
    return f"test {number} failed: the validator accepts a newline at the end"


@wrap_model_call
def one_call_per_question(
    request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
) -> ModelResponse:
    """The embedded model has random weights: what it does not choose, the grammar does."""
    is_question = isinstance(request.messages[-1], HumanMessage)
    return handler(request.override(tool_choice="any" if is_question else "none"))


with ChatAgentCache(model="tiny-hybrid", max_tokens=48) as chat:
    saver = closing_sessions(InMemorySaver(), chat)
    agent = create_agent(
        chat,
        [list_files, run_test],
        system_prompt="You repair programs.",
        middleware=[AgentCacheMiddleware(tool_time="10s"), one_call_per_question],
        checkpointer=saver,
    )
    thread = {"configurable": {"thread_id": "1"}}
    for question in ("What is there?", "Does it work?", "And now?"):
        state = agent.invoke({"messages": [("user", question)]}, thread)
    for reply in (m for m in state["messages"] if isinstance(m, AIMessage)):
        usage = reply.usage_metadata
        assert usage is not None
        calls = [f"{call['name']}({call['args']})" for call in reply.tool_calls]
        cached = usage["input_token_details"]["cache_read"]
        print(f"{cached:4} of {usage['input_tokens']:4} tokens cached", *calls or ["a text"])
    assert sum(bool(m.tool_calls) for m in state["messages"] if isinstance(m, AIMessage)) == 3
    saver.delete_thread("1")  # which ends the thread's session, too
