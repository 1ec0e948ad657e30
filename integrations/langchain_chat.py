"""A LangChain chat model on a runtime in this process; calls belong to sessions.

>>> chat = ChatAgentCache(model="tiny-agent", max_tokens=64)               # doctest: +SKIP
>>> chat.invoke("Hello", config={"configurable": {"session_id": "a"}})      # doctest: +SKIP
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from agentcache import InvalidRequest, Runtime
from agentcache.integrations._langchain.calls import (
    OPTIONS,
    Call,
    Pieces,
    Readers,
    abegun,
    afinish,
    begun,
    finish,
    make_call,
    reply_of,
)
from agentcache.integrations._langchain.errors import ContextOverflow, translated
from agentcache.integrations._langchain.grammar import ReplyForms
from agentcache.integrations._langchain.messages import digests, openai_messages
from agentcache.integrations._langchain.reading import MessageReader, ToolReader
from agentcache.integrations._langchain.sessions import SessionBook, Visit
from agentcache.integrations._langchain.structured import structured_output

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
    from langchain_core.runnables import Runnable, RunnableConfig
    from langchain_core.tools import BaseTool

    from agentcache import Session

__all__ = ["ChatAgentCache", "ContextOverflow"]

_SESSION: ContextVar[tuple[object, str] | None] = ContextVar("agentcache_session", default=None)
"""The chat model and the session's id inside a `with chat.session(id)` block."""


@dataclass(slots=True)
class _State:
    """What all copies of one chat model share."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    runtime: Runtime | None = None
    is_own: bool = False
    book: SessionBook | None = None
    forms: ReplyForms | None = None
    readers: Readers | None = None
    tools: ToolReader = field(default_factory=ToolReader)


class ChatAgentCache(BaseChatModel):
    """A chat model that keeps what it has computed of each conversation.

    model: name of a model for `Runtime.load`, which happens at the first call, or a Runtime, which
    stays the caller's. The other fields are defaults of calls, as for `CallOptions`; `max_tokens`
    is `max_new_tokens`, `timeout` the seconds after which a call is cancelled. load_options: more
    arguments for `Runtime.load`. tenant: for `Runtime.session`; to be set by the host program.

    The session of a call is, in this order: the argument `session_id`; `session_id` in
    `config["configurable"]`; that of a `with chat.session(id)` block; in a LangGraph graph that of
    its thread and node; `thread_id` in `config["configurable"]`; else one found by what the
    messages say.
    """

    model_config = ConfigDict(
        populate_by_name=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()
    )

    model_name: str = Field(default="tiny-agent", alias="model")
    runtime: Any = Field(default=None, exclude=True, repr=False)
    load_options: dict[str, Any] = Field(default_factory=dict)
    tenant: str | None = None
    max_sessions: int = Field(default=256, ge=1)
    max_branches: int = Field(default=16, ge=1)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    exact: bool | None = None
    verify: bool | float | None = None
    timeout: float | None = None
    streaming: bool = False

    _state: _State = PrivateAttr(default_factory=_State)

    @model_validator(mode="before")
    @classmethod
    def _take_runtime(cls, values: Any) -> Any:
        """A Runtime may stand in the place of a model's name."""
        if isinstance(values, dict) and isinstance(values.get("model"), Runtime):
            values = dict(values)
            values["runtime"] = values.pop("model")
            values.setdefault("model_name", "agentcache")
        return values

    @property
    def _llm_type(self) -> str:
        return "agentcache"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        names = ("model_name", "max_tokens", "stop", *OPTIONS)
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Unless it was given a runtime, a chat model can be saved and loaded."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["agentcache", "integrations", "langchain_chat"]

    def to_json(self) -> Any:
        return super().to_json() if self.runtime is None else self.to_json_not_implemented()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "agentcache"
        params["ls_model_name"] = kwargs.get("model", self.model_name)
        return params

    def _resolve_model_profile(self) -> ModelProfile:
        profile = ModelProfile(
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            tool_calling=True,
            tool_choice=True,
            structured_output=True,
        )
        if self.runtime is not None:
            profile["max_input_tokens"] = self.runtime.max_len
        return profile

    @property
    def engine(self) -> Runtime:
        """The runtime; loads the model if that has not happened yet."""
        state = self._state
        with state.lock:
            if state.runtime is None:
                state.is_own = self.runtime is None
                state.runtime = self.runtime or Runtime.load(self.model_name, **self.load_options)
                state.book = self._new_book(state.runtime)
            return state.runtime

    def _new_book(self, runtime: Runtime) -> SessionBook:
        def open_session(id: str | None, parent: str | None) -> Session:
            return runtime.session(id, tenant=self.tenant, parent=parent)

        return SessionBook(
            open_session,
            digests,
            max_sessions=self.max_sessions,
            max_branches=self.max_branches,
        )

    @property
    def sessions(self) -> SessionBook:
        """The sessions that calls have opened."""
        state = self._state
        if state.book is None:
            _ = self.engine
        assert state.book is not None
        return state.book

    @contextmanager
    def session(self, id: str) -> Iterator[None]:
        """Calls inside the block belong to that session, which ends with it."""
        token = _SESSION.set((self._state, id))
        try:
            yield
        finally:
            _SESSION.reset(token)
            self.forget(id)

    def forget(self, thread_id: str) -> int:
        """A thread was deleted, or a session is over: close what belongs to it; how many it was.

        >>> chat.forget("thread-1")                                         # doctest: +SKIP
        1
        """
        book, readers = self._state.book, self._state.readers
        if readers is not None:
            readers.messages.forget(str(thread_id))
        return 0 if book is None else book.forget(str(thread_id))

    def close(self) -> None:
        """Close the sessions, and the runtime if it was loaded here. Later calls fail."""
        if self._state.book is not None:
            self._state.book.close()
        if self._state.runtime is not None and self._state.is_own:
            self._state.runtime.close()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy on the same runtime and sessions."""
        return self.model_copy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def get_token_ids(self, text: str) -> list[int]:
        return list(self.engine.tokenizer.encode_plain(text))

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[Any] | None = None,
    ) -> int:
        """Tokens of the whole prompt, as the model's template writes it."""
        form = self.engine.chat_format
        schemas = [convert_to_openai_tool(tool) for tool in tools or ()]
        return len(form.encode(form.render(openai_messages(messages), schemas).segments).ids)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Tools the model may call.

        tool_choice: "auto", "none", "any" or "required", or a tool's name; enforced by a grammar,
        as is strict=True, with which calls that the model makes of its own follow their schemas.
        parallel_tool_calls=True lets a reply that a grammar forces hold several calls.
        """
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        return self.bind(tools=[self._state.tools.schema(tool) for tool in tools], **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Replies of a schema, enforced by a grammar.

        method: "json_schema", "function_calling" (as a call of a tool), or "json_mode" (any JSON
        object). strict: grammars always are; accepted for code that sets it.
        """
        if kwargs:
            raise InvalidRequest(f"with_structured_output knows no argument {min(kwargs)!r}")
        return structured_output(self, schema, method, include_raw)

    # LangChain hands the config to these four, and not to `_generate` and its like.

    def invoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        return super().invoke(input, config, **_named(config, kwargs))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        return await super().ainvoke(input, config, **_named(config, kwargs))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        return super().stream(input, config, **_named(config, kwargs))

    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        return super().astream(input, config, **_named(config, kwargs))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with translated():
            call, visit = self._prepare(messages, stop, kwargs)
            with visit:
                if call.timeout is None:
                    turn = visit.session.complete(call.messages, tools=call.tools, **call.options)
                else:
                    with begun(call, visit) as stream:
                        turn = stream.turn
                finish(call, visit, turn)
                return ChatResult(generations=[ChatGeneration(message=reply_of(call, visit, turn))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with translated():
            call, visit = await self._aprepare(messages, stop, kwargs)
            with visit:
                async with asyncio.timeout(call.timeout):
                    turn: Any = await visit.session.acomplete(
                        call.messages, tools=call.tools, **call.options
                    )
                await afinish(call, visit, turn)
                return ChatResult(generations=[ChatGeneration(message=reply_of(call, visit, turn))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with translated():
            call, visit = self._prepare(messages, stop, kwargs)
            with visit, begun(call, visit) as stream:
                pieces = Pieces()
                for delta in stream:
                    yield from pieces.chunks(delta)
                finish(call, visit, stream.turn)
                yield pieces.last(call, visit, stream.turn)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with translated():
            call, visit = await self._aprepare(messages, stop, kwargs)
            with visit:
                async with abegun(call, visit) as stream:
                    pieces = Pieces()
                    async for delta in stream:
                        for chunk in pieces.chunks(delta):
                            yield chunk
                    await afinish(call, visit, stream.turn)
                    yield pieces.last(call, visit, stream.turn)

    def _prepare(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[Call, Visit]:
        """The call and the branch it is made on. May load the model, or wait for the engine."""
        sessions = self.sessions
        inside = _SESSION.get()
        if inside is not None and inside[0] is self._state:
            kwargs.setdefault("session_id", inside[1])
        arguments = self._defaults(stop) | kwargs
        decode = self.engine.tokenizer.decode
        call = make_call(
            self.model_name, messages, arguments, self._readers, self._reply_forms, decode
        )
        return call, sessions.enter(call.place, call.given, call.lead)

    async def _aprepare(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[Call, Visit]:
        work = asyncio.ensure_future(asyncio.to_thread(self._prepare, messages, stop, kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The thread goes on, and what it enters nobody else would leave.
            work.add_done_callback(_leave)
            raise

    def _defaults(self, stop: list[str] | None) -> dict[str, Any]:
        names = ("max_tokens", "timeout", *OPTIONS)
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        stops = self.stop if stop is None else stop
        return given | ({"stop": stops} if stops else {})

    @property
    def _readers(self) -> Readers:
        state = self._state
        with state.lock:
            if state.readers is None:
                state.readers = Readers(MessageReader(self.max_sessions), state.tools)
            return state.readers

    def _reply_forms(self) -> ReplyForms:
        if self._state.forms is None:
            self._state.forms = ReplyForms.of(self.engine)
        return self._state.forms


def _named(config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments with the ids that the config gives."""
    configurable = ensure_config(config).get("configurable") or {}
    given = {name: configurable.get(name) for name in ("session_id", "thread_id")}
    return {name: value for name, value in given.items() if value is not None} | kwargs


def _leave(prepared: asyncio.Future[tuple[Call, Visit]]) -> None:
    if not prepared.cancelled() and prepared.exception() is None:
        prepared.result()[1].close()
