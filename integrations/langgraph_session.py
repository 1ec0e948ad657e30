"""LangGraph agents on sessions: a middleware for `create_agent`, threads deleted or replayed.

A `ChatAgentCache` finds the session of its calls in any graph by itself, by thread and node. What
only the agent knows, the middleware tells: that it waits for a tool, and that a run is over.

>>> agent = create_agent(                                                   # doctest: +SKIP
...     chat, tools, middleware=[AgentCacheMiddleware()], checkpointer=saver
... )
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from langchain.agents.middleware import AgentMiddleware, AgentState
from langchain_core.messages import AIMessage, SystemMessage

from agentcache import SessionClosed, UnsupportedOption
from agentcache.integrations._langchain.messages import message_digest, openai_messages
from agentcache.integrations._langchain.sessions import namespace_without_ids
from agentcache.integrations.langchain_chat import ChatAgentCache

if TYPE_CHECKING:
    from langchain.agents.middleware import ModelRequest, ModelResponse
    from langchain.agents.middleware.types import ModelCallResult
    from langchain_core.messages import BaseMessage, ToolMessage
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import BaseCheckpointSaver
    from langgraph.prebuilt.tool_node import ToolCallRequest
    from langgraph.runtime import Runtime as GraphRuntime
    from langgraph.types import Command

    from agentcache import Session

__all__ = ["AgentCacheMiddleware", "closing_sessions", "recorded_calls", "session_at"]

Seconds = float | str


class AgentCacheMiddleware(AgentMiddleware[AgentState[Any], Any, Any]):
    """Tells the sessions of an agent's chat model what the agent does. One for each agent.

    model: a chat model that takes the place of the agent's own. tool_time: how long a tool takes,
    as a number of seconds or "30s", "5m"; or by the tool's name, "" standing for all others.
    turn_gap: how long it takes until the user says more; None says nothing. A run of a sub-agent
    ends its session: what it computed stays in the cache like anything else that nobody waits for.
    """

    def __init__(
        self,
        model: ChatAgentCache | None = None,
        *,
        tool_time: Seconds | Mapping[str, Seconds] = "30s",
        turn_gap: Seconds | None = "5m",
    ) -> None:
        super().__init__()
        self._model = model
        self._chat = model
        self._tool_time = tool_time if isinstance(tool_time, Mapping) else {"": tool_time}
        self._turn_gap = turn_gap

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelCallResult[Any]:
        """Call the chat model; its session follows from the graph's thread and node."""
        return handler(self._own(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelCallResult[Any]:
        """The same, for async agents."""
        return await handler(self._own(request))

    def wrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]],
    ) -> ToolMessage | Command[Any]:
        """Call a tool; the session that asked for it waits."""
        self._wait(request)
        return handler(request)

    async def awrap_tool_call(
        self,
        request: ToolCallRequest,
        handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]],
    ) -> ToolMessage | Command[Any]:
        """The same, for async agents."""
        self._wait(request)
        return await handler(request)

    def after_agent(self, state: AgentState[Any], runtime: GraphRuntime[Any]) -> None:
        """The run is over: the session waits for the user, or ends with its sub-agent."""
        session = self._session_of(_last_reply(state["messages"]))
        if session is None or self._chat is None:
            return
        if _is_sub_agent(runtime):
            self._chat.sessions.release(session.id)
        elif self._turn_gap is not None:
            _idle(session, self._turn_gap)

    async def aafter_agent(self, state: AgentState[Any], runtime: GraphRuntime[Any]) -> None:
        """The same, for async agents."""
        await asyncio.to_thread(self.after_agent, state, runtime)

    def _own(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if self._model is not None:
            return request.override(model=self._model)
        if not isinstance(request.model, ChatAgentCache):
            raise UnsupportedOption(
                f"the agent's model is a {type(request.model).__name__}; make the agent with a "
                "ChatAgentCache, or give one to AgentCacheMiddleware(model=...)"
            )
        self._chat = request.model
        return request

    def _wait(self, request: ToolCallRequest) -> None:
        state, call = request.state, request.tool_call
        messages = state.get("messages", ()) if isinstance(state, Mapping) else ()
        session = self._session_of(_asking(messages, call["id"]))
        expect = self._tool_time.get(call["name"], self._tool_time.get(""))
        if session is not None and expect is not None:
            _idle(session, expect)

    def _session_of(self, reply: AIMessage | None) -> Session | None:
        """The session that a reply came from, if it is still open."""
        if reply is None or self._chat is None:
            return None
        id = reply.response_metadata.get("agentcache", {}).get("session")
        return None if id is None else self._chat.sessions.session(id)


def _idle(session: Session, expect: Seconds) -> None:
    with suppress(SessionClosed):  # a thread may be deleted at any time
        session.idle(expect=expect)


def _last_reply(messages: Sequence[BaseMessage]) -> AIMessage | None:
    return next((m for m in reversed(messages) if isinstance(m, AIMessage)), None)


def _asking(messages: Sequence[BaseMessage], call_id: str | None) -> AIMessage | None:
    """The reply that asked for a tool."""
    replies = (m for m in reversed(messages) if isinstance(m, AIMessage))
    return next((m for m in replies if any(c["id"] == call_id for c in m.tool_calls)), None)


def _is_sub_agent(runtime: GraphRuntime[Any]) -> bool:
    """Whether the run was started by a task of another graph, and ends with it. Graphs that keep a
    memory of their own between the runs have a namespace without that task's id."""
    info = runtime.execution_info
    outer = info.checkpoint_ns.split("|")[:-1] if info is not None else []
    return bool(outer) and ":" in outer[-1]


def closing_sessions(
    saver: BaseCheckpointSaver[Any], *chats: ChatAgentCache
) -> BaseCheckpointSaver[Any]:
    """The checkpointer, which from now on ends the sessions of a thread when it deletes it.

    >>> saver = closing_sessions(InMemorySaver(), chat)                     # doctest: +SKIP
    """
    delete_thread, adelete_thread = saver.delete_thread, saver.adelete_thread

    def delete(thread_id: str) -> None:
        delete_thread(thread_id)
        for chat in chats:
            chat.forget(thread_id)

    async def adelete(thread_id: str) -> None:
        await adelete_thread(thread_id)
        for chat in chats:
            await asyncio.to_thread(chat.forget, thread_id)

    saver.delete_thread, saver.adelete_thread = delete, adelete  # type: ignore[method-assign]
    return saver


def session_at(chat: ChatAgentCache, config: RunnableConfig) -> tuple[Session, int] | None:
    """The session of the model's call that was made from a checkpoint, and the number of its turn.

    config: of a state snapshot, as `graph.get_state_history` gives it. None where no call was made
    from that checkpoint, or its session is over.

    >>> session, turn = session_at(chat, snapshot.config)                   # doctest: +SKIP
    >>> session.rewind(to_turn=turn)                                        # doctest: +SKIP
    """
    return chat.sessions.at_checkpoint(str(config["configurable"].get("checkpoint_id")))


def recorded_calls(
    saver: BaseCheckpointSaver[Any],
    *,
    system: str | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """The model's calls that a checkpointer's threads recorded, oldest first, forks included.

    Each is a line of the calls format that `agentcache replay` reads: `trajectory`, `at`,
    `messages`, `answer`, and `tools` where given. system: the system prompt, which `create_agent`
    does not record; tools: nor their schemas. Raises InvalidRequest for messages that are no text.

    >>> for call in recorded_calls(saver, system="You repair programs."):    # doctest: +SKIP
    ...     file.write(json.dumps(call) + "\\n")
    """
    lead = [] if system is None else [SystemMessage(system)]
    seen: set[tuple[str, int]] = set()
    for saved in sorted(saver.list(None), key=lambda saved: saved.checkpoint["ts"]):
        messages = saved.checkpoint["channel_values"].get("messages") or ()
        if not any(isinstance(message, AIMessage) for message in messages):
            continue
        configurable = saved.config["configurable"]
        namespace = namespace_without_ids(configurable.get("checkpoint_ns") or "")
        trajectory = ":".join(filter(None, (str(configurable["thread_id"]), namespace)))
        said = openai_messages([*lead, *messages])
        path = 0
        for index, message in enumerate(said):
            path = hash((path, message_digest(message)))
            if message["role"] != "assistant" or index <= len(lead) or (trajectory, path) in seen:
                continue
            seen.add((trajectory, path))
            yield {
                "trajectory": trajectory,
                "at": datetime.fromisoformat(saved.checkpoint["ts"]).timestamp(),
                "messages": said[:index],
                "answer": message,
                **({} if tools is None else {"tools": list(tools)}),
            }
