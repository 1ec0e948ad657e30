"""What is seen from outside: Prometheus' text and OpenTelemetry's spans."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families
from testkit.waiting import until

MODEL = "tiny-hybrid"


def scrape(served_here) -> dict[tuple[str, tuple], float]:
    """Values by name and labels."""
    answer = served_here.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_parse_and_count_requests_and_tokens(served_here):
    before = scrape(served_here)
    usage = served_here.chat("What is counted?").json()["usage"]
    served_here.chat(temperature=9)
    assert until(served_here.idle)
    after = scrape(served_here)

    def added(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    tokens = "agentcache_server_tokens_total"
    assert added(tokens, kind="prompt") == usage["prompt_tokens"]
    assert added(tokens, kind="output") == usage["completion_tokens"]
    assert added(tokens, kind="cached") == usage["prompt_tokens_details"]["cached_tokens"]
    assert added("agentcache_server_ttft_seconds_count") == 1
    path = "/v1/chat/completions"
    assert added("agentcache_server_requests_total", path=path, status="200") == 1
    assert added("agentcache_server_requests_total", path=path, status="400") == 1
    assert added("agentcache_hits_total", kind="prompt_tokens") == usage["prompt_tokens"]


def test_metrics_show_what_the_runtime_holds(served_here):
    served_here.chat(session_id="measured")
    assert until(served_here.idle)
    found = scrape(served_here)
    stats = served_here.runtime.stats()

    assert found["agentcache_calls", ()] == 0
    assert found["agentcache_running_requests", ()] == 0
    assert found["agentcache_open_sessions", ()] == stats["sessions"]["open"] >= 1
    assert found["agentcache_budget_bytes", ()] == stats["budget"]
    used = found["agentcache_used_bytes", (("kind", "state"),)]
    assert used == stats["bytes"]["state"]["used"] > 0


def test_paths_of_clients_do_not_become_labels(served_here):
    served_here.get("/v1/sessions/some-name")
    served_here.get("/some/path/of/their/own")
    text = served_here.get("/metrics").text

    assert "some-name" not in text
    assert "their/own" not in text
    assert 'path="/v1/sessions/{id}",status="404"' in text
    assert 'path="other",status="404"' in text


class Recorder:
    """A tracer provider that keeps what its spans are told."""

    def __init__(self) -> None:
        self.spans: list[dict] = []

    def get_tracer(self, *_args, **_kwargs) -> Recorder:
        return self

    @contextmanager
    def start_as_current_span(self, name, *, context, kind, attributes):
        self.spans.append({"name": name, "kind": kind, "context": context, **attributes})
        yield self

    def set_attributes(self, attributes) -> None:
        self.spans[-1].update(attributes)


def test_calls_are_traced_by_the_conventions_for_generative_ai(start):
    trace = pytest.importorskip("opentelemetry.trace")
    recorder = Recorder()
    with start(tracer_provider=recorder) as server:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {"traceparent": parent}
        answer = server.chat(session_id="traced", temperature=0.5, seed=1, headers=headers)
        assert until(server.idle)

    (span,) = recorder.spans
    usage = answer.json()["usage"]
    assert span["name"] == f"chat {MODEL}"
    assert span["gen_ai.operation.name"] == "chat"
    assert span["gen_ai.request.model"] == span["gen_ai.response.model"] == MODEL
    assert span["gen_ai.request.max_tokens"] == 2
    assert span["gen_ai.request.temperature"] == 0.5
    assert span["gen_ai.conversation.id"] == "traced"
    assert span["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert span["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert span["gen_ai.usage.cache_read.input_tokens"] >= 0
    assert span["gen_ai.response.finish_reasons"] == ["length"]
    linked = trace.get_current_span(span["context"]).get_span_context()
    assert f"{linked.trace_id:032x}" == parent.split("-")[1]
