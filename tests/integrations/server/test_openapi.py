"""The OpenAPI document describes the server, and whatever it allows is answered as it says."""

from __future__ import annotations

import json

import pytest

schemathesis = pytest.importorskip("schemathesis")
from hypothesis import HealthCheck, Phase, settings  # noqa: E402 - after the check that there is one
from schemathesis import checks  # noqa: E402
from schemathesis.specs.openapi import checks as openapi_checks  # noqa: E402

from agentcache.integrations.server.config import ServerConfig  # noqa: E402
from agentcache.integrations.server.lifecycle import all_routes  # noqa: E402
from agentcache.integrations.server.schema import document  # noqa: E402

MODEL = "tiny-hybrid"
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]


schema = schemathesis.openapi.from_dict(document(all_routes(ServerConfig(model=MODEL))))
schema.config.phases.coverage.enabled = False  # hundreds of cases for each operation
thorough = schemathesis.openapi.from_dict(document(all_routes(ServerConfig(model=MODEL))))


@pytest.fixture(scope="module")
def served_briefly(start):
    with start(max_tokens=2, max_sessions=20) as server:
        yield server


def settings_of(max_examples: int) -> settings:
    """The same examples every time, however long they take."""
    return settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )


def check(case, url: str) -> None:
    """Send a case, past the name of the model and without a long wait for a reply."""
    if isinstance(case.body, dict):
        if isinstance(case.body.get("model"), str):
            case.body["model"] = MODEL
        for name in LENGTHS:
            if isinstance(case.body.get(name), int) and case.body[name] > 2:
                case.body[name] = 2
    case.call_and_validate(base_url=url, checks=CHECKS, timeout=60)


@schema.parametrize()
@settings_of(6)
def test_what_the_document_allows_is_answered_as_it_says(served_briefly, case):
    check(case, served_briefly.url)


@pytest.mark.slow
@thorough.parametrize()
@settings_of(60)
def test_every_corner_of_the_document_is_answered_as_it_says(served_briefly, case):
    check(case, served_briefly.url)


def test_every_route_is_in_the_document(served_here):
    document = served_here.get("/openapi.json").json()
    routes = [route for route in served_here.server.routes if route.is_listed]
    described = sum(len(operations) for operations in document["paths"].values())

    assert described == len(routes) >= 20
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/sessions/{id}/fork"):
        assert path in document["paths"]


def test_every_reference_of_the_document_leads_somewhere(served_here):
    document = served_here.get("/openapi.json").json()
    known = document["components"]["schemas"]
    text = json.dumps(document)

    for part in text.split('"$ref": "')[1:]:
        assert part.partition('"')[0].removeprefix("#/components/schemas/") in known
    ids = [
        operation["operationId"]
        for operations in document["paths"].values()
        for operation in operations.values()
    ]
    assert len(ids) == len(set(ids))
