"""OpenTelemetry spans by its conventions for generative AI, where it is installed."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from agentcache import Turn
    from agentcache.integrations.server.calls import Work

__all__ = ["CallSpan", "Tracing"]

_PARAMETERS = {
    "max_new_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}


class CallSpan:
    """The span of one call; without OpenTelemetry it takes notes for nobody."""

    def __init__(self, span: Any, model: str) -> None:
        self._span = span
        self._model = model

    def note(self, turn: Turn) -> None:
        """What came of it."""
        if self._span is None:
            return
        usage = turn.usage
        self._span.set_attributes(
            {
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [turn.finish_reason],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
        )


class Tracing:
    """Makes spans with a provider of the host's; by default the one that the process has set.

    Without `opentelemetry-api` nothing is traced.
    """

    def __init__(self, model: str, provider: Any = None) -> None:
        self._model = model
        self._tracer: Any = None
        if find_spec("opentelemetry") is not None:
            from opentelemetry import trace

            self._tracer = trace.get_tracer("agentcache.server", tracer_provider=provider)

    @contextmanager
    def span(
        self, work: Work, session_id: str, headers: Mapping[str, str] | None
    ) -> Iterator[CallSpan]:
        """A span around a call, under the trace that the request's headers name."""
        if self._tracer is None:
            yield CallSpan(None, self._model)
            return
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind

        attributes = {
            "gen_ai.operation.name": work.operation,
            "gen_ai.provider.name": "agentcache",
            "gen_ai.request.model": self._model,
            "gen_ai.conversation.id": session_id,
        }
        for name, value in (work.parameters or {}).items():
            if name in _PARAMETERS and value is not None:
                attributes[_PARAMETERS[name]] = value
        with self._tracer.start_as_current_span(
            f"{work.operation} {self._model}",
            context=propagate.extract(headers or {}),
            kind=SpanKind.SERVER,
            attributes=attributes,
        ) as span:
            yield CallSpan(span, self._model)
