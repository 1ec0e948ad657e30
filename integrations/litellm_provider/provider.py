"""The provider among litellm's: which models it serves, and litellm's handler for them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import litellm
from litellm.llms.custom_llm import CustomLLM

from agentcache import AgentCacheError, ConfigError, ModelNotFound, Runtime
from agentcache.integrations.litellm_provider.call import Running, begin, translated
from agentcache.integrations.litellm_provider.chunks import AsyncChunks, Chunks
from agentcache.integrations.litellm_provider.models import PROVIDER, Model, Sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from litellm.types.utils import ModelResponse

__all__ = ["AgentCacheLLM", "register", "unregister"]


def register(
    runtime: Runtime | Callable[[], Runtime] | None = None,
    *,
    model: str = "tiny-agent",
    tenant: str | None = None,
    max_sessions: int = 1024,
    idle_s: float = 3600.0,
    clock: Callable[[], float] = time.monotonic,
    **defaults: Any,
) -> AgentCacheLLM:
    """Serve a model as `agentcache/<model>`, and return litellm's handler for it.

    runtime: one that the caller keeps, or a function that makes one when it is first needed; None
    is `Runtime.load(model)`. tenant: of all sessions; a request cannot name one. Sessions are kept
    between calls, the `max_sessions` used last, and each until it was idle for `idle_s` seconds on
    `clock`. defaults: options of `Session.complete` for requests that say nothing else.

    A name that is taken keeps what it has, unless another runtime is given for it: that raises
    ConfigError.
    """
    if max_sessions < 1:
        raise ConfigError(f"max_sessions is {max_sessions}; give at least 1")
    handler = _registered()
    if handler is None:
        handler = AgentCacheLLM()
        litellm.custom_provider_map.append({"provider": PROVIDER, "custom_handler": handler})
    sessions = Sessions(tenant, max_sessions, idle_s, clock)
    handler.add(Model(model, runtime, sessions, defaults))
    litellm.utils.custom_llm_setup()  # type: ignore[no-untyped-call]
    return handler


def unregister(model: str | None = None) -> None:
    """Stop serving a model, or all. Their sessions are closed, and runtimes that were made here."""
    handler = _registered()
    if handler is None:
        return
    for name in handler.models if model is None else [model]:
        handler.remove(name)
    if not handler.models:
        litellm.custom_provider_map[:] = [
            item for item in litellm.custom_provider_map if item["custom_handler"] is not handler
        ]


def _registered() -> AgentCacheLLM | None:
    handlers = (item["custom_handler"] for item in litellm.custom_provider_map)
    return next((handler for handler in handlers if isinstance(handler, AgentCacheLLM)), None)


class AgentCacheLLM(CustomLLM):
    """litellm's handler of the provider; made by `register`."""

    def __init__(self) -> None:
        super().__init__()
        self._models: dict[str, Model] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models, without the provider's."""
        return tuple(self._models)

    def add(self, model: Model) -> None:
        """Serve one more model. Raises ConfigError where its name stands for another runtime."""
        known = self._models.get(model.name)
        if known is None:
            self._models[model.name] = model
            litellm.register_model({f"{PROVIDER}/{model.name}": model.describe()})
        elif model.source not in (None, known.source):
            raise ConfigError(
                f"{PROVIDER}/{model.name} is registered with another runtime; unregister it first"
            )

    def remove(self, name: str) -> None:
        """Stop serving a model, if it is there."""
        model = self._models.pop(name, None)
        if model is not None:
            litellm.model_cost.pop(f"{PROVIDER}/{name}", None)
            model.close()

    def completion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """A whole reply."""
        return self._begin(kwargs).answer(kwargs["model_response"])

    async def acompletion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """A whole reply. The prompt is made on a thread, so that the loop goes on."""
        running = await asyncio.to_thread(self._begin, kwargs)
        return await running.aanswer(kwargs["model_response"])

    def streaming(self, *args: Any, **kwargs: Any) -> Chunks:
        """A reply in chunks."""
        return Chunks(self._begin(kwargs))

    def astreaming(  # type: ignore[override]  # litellm calls it without await
        self, *args: Any, **kwargs: Any
    ) -> AsyncChunks:
        """A reply in chunks. litellm calls this on a thread: the prompt is made there."""
        return AsyncChunks(self._begin(kwargs))

    def _begin(self, kwargs: Mapping[str, Any]) -> Running:
        name = kwargs["model"]
        try:
            model = self._models.get(name)
            if model is None:
                known = ", ".join(self._models)
                raise ModelNotFound(f"{PROVIDER}/{name} is not registered; there are {known}")
            return begin(model, kwargs)
        except AgentCacheError as error:
            raise translated(error, name) from error
