"""What Prometheus scrapes: requests, tokens and times, and what the runtime holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from agentcache import Runtime, Turn
    from agentcache.integrations.server.admission import Admission

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """One server's own registry. Counting happens on the event loop, `text` on any thread."""

    def __init__(self, runtime: Runtime, admission: Admission) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests answered", "path", "status")
        self._tokens = self._counter("tokens", "Tokens of finished calls", "kind")
        self._ttft = self._histogram("ttft_seconds", "Time to first token")
        self._duration = self._histogram("request_seconds", "Time from request to end of response")
        self.registry.register(_RuntimeCollector(runtime, lambda: admission.num_calls))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"agentcache_server_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"agentcache_server_{name}", text, buckets=_SECONDS, registry=self.registry
        )

    def note_request(self, path: str, status: int, seconds: float) -> None:
        """A request was answered; `path` is the route's, not what the client wrote."""
        self._requests.labels(path, str(status)).inc()
        self._duration.observe(seconds)

    def note_turn(self, turn: Turn) -> None:
        """A call finished."""
        usage = turn.usage
        self._tokens.labels("prompt").inc(usage.prompt_tokens)
        self._tokens.labels("cached").inc(usage.cached_tokens)
        self._tokens.labels("output").inc(usage.output_tokens)
        self._ttft.observe(usage.ttft_s)

    def text(self) -> bytes:
        """Everything in Prometheus' text form; waits for the engine."""
        return generate_latest(self.registry)


class _RuntimeCollector:
    """`Runtime.stats()` at the moment of the scrape."""

    def __init__(self, runtime: Runtime, num_calls: Callable[[], int]) -> None:
        self._runtime = runtime
        self._num_calls = num_calls

    def describe(self) -> list[Metric]:
        """Nothing, so that the engine need not be asked when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._runtime.stats()
        yield _gauge("calls", "Calls under way, waiting ones included", self._num_calls())
        yield _gauge("running_requests", "Requests that hold memory", stats["running"]["requests"])
        yield _gauge("open_sessions", "Open sessions", stats["sessions"]["open"])
        yield _gauge("tips", "Tips of open sessions", stats["sessions"]["tips"])
        yield _gauge("budget_bytes", "The byte budget", stats["budget"])
        used = {kind: sizes["used"] for kind, sizes in stats["bytes"].items()}
        yield _labelled(GaugeMetricFamily, "used_bytes", "Bytes in use by kind", used)
        yield _labelled(GaugeMetricFamily, "entries", "Cache entries by kind", stats["entries"])
        for name, text in (
            ("evictions", "Evicted by kind"),
            ("filed", "Filed by kind"),
            ("reused", "Reused by kind"),
        ):
            yield _labelled(CounterMetricFamily, name, text, stats[name])
        yield _labelled(CounterMetricFamily, "passes", "Forward passes", stats["passes"])
        yield _labelled(
            CounterMetricFamily, "hits", "Prompt tokens, and cached ones", stats["hits"]
        )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentcache_{name}", text, value)


def _labelled(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    values: dict[Any, float],
) -> Metric:
    metric = family(f"agentcache_{name}", text, labels=["kind"])
    for kind, value in values.items():
        metric.add_metric([str(kind)], value)
    return metric
