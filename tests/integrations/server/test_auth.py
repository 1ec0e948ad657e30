"""Keys, tenants and hosts: who may ask, and what one tenant learns of another."""

from __future__ import annotations

import json

import pytest

from agentcache import ConfigError
from agentcache.integrations.server.auth import (
    ApiKeys,
    is_loopback,
    is_loopback_origin,
    names_loopback,
)
from agentcache.integrations.server.config import ServerConfig

LONG = "Between us: " + "a secret of many words " * 20


@pytest.fixture(scope="module")
def keyed(start):
    keys = ApiKeys.parse(["ann=red", "bob=blue", "amy=red", "own", "other"], admin="root")
    with start(keys=keys) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def usage(answer) -> dict[str, int]:
    assert answer.status_code == 200, answer.text
    found = answer.json()["usage"]
    return {
        "prompt": found["prompt_tokens"],
        "cached": found["prompt_tokens_details"]["cached_tokens"],
    }


@pytest.mark.parametrize("headers", [{}, bearer("eve"), {"Authorization": "Basic ann"}])
def test_nobody_gets_in_without_a_key(keyed, headers):
    answer = keyed.chat(headers=headers)

    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_anthropic_form_of_a_missing_key(keyed):
    answer = keyed.post("/v1/messages", {})

    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"


def test_a_key_may_come_as_x_api_key(keyed):
    assert keyed.chat(headers={"x-api-key": "ann"}).status_code == 200


def test_a_tenant_hits_its_own_prefixes_and_nobody_elses(keyed):
    keyed.chat(LONG, headers=bearer("ann"))
    same = usage(keyed.chat(LONG, headers=bearer("amy")))
    foreign = usage(keyed.chat(LONG, headers=bearer("bob")))

    assert same["cached"] >= same["prompt"] - 8
    assert foreign["cached"] == 0


def test_keys_without_a_tenant_are_tenants_of_their_own(keyed):
    keyed.chat(LONG, headers=bearer("own"))

    assert usage(keyed.chat(LONG, headers=bearer("other")))["cached"] == 0
    assert usage(keyed.chat(LONG, headers=bearer("own")))["cached"] > 0


@pytest.mark.parametrize("field", ["tenant", "user", "cache_salt", "prompt_cache_key"])
def test_nothing_in_a_body_says_whose_it_is(keyed, field):
    secret = f"{field}, {LONG}"
    keyed.chat(secret, headers=bearer("ann"))
    answer = keyed.chat(secret, headers=bearer("other"), **{field: "red"})

    assert answer.status_code == 400 or usage(answer)["cached"] == 0


def test_sessions_of_other_tenants_do_not_exist(keyed):
    keyed.chat(session_id="shared name", headers=bearer("ann"))

    assert keyed.get("/v1/sessions/shared%20name", headers=bearer("amy")).status_code == 200
    assert keyed.get("/v1/sessions/shared%20name", headers=bearer("bob")).status_code == 404
    listed = keyed.get("/v1/sessions", headers=bearer("bob")).json()["data"]
    assert "shared name" not in [session["id"] for session in listed]


def test_responses_of_other_tenants_do_not_exist(keyed):
    body = {"model": "tiny-hybrid", "input": "Hello", "max_output_tokens": 1}
    id = keyed.post("/v1/responses", body, headers=bearer("ann")).json()["id"]

    assert keyed.get(f"/v1/responses/{id}", headers=bearer("ann")).status_code == 200
    assert keyed.get(f"/v1/responses/{id}", headers=bearer("bob")).status_code == 404
    more = {**body, "previous_response_id": id}
    refused = keyed.post("/v1/responses", more, headers=bearer("bob"))
    assert refused.status_code == 404
    assert refused.json()["error"]["param"] == "previous_response_id"


def test_what_shows_all_tenants_is_for_the_admin(keyed):
    assert keyed.get("/metrics", headers=bearer("ann")).status_code == 403
    assert keyed.get("/metrics", headers=bearer("root")).status_code == 200
    assert keyed.get("/metrics").status_code == 401


def test_health_and_document_need_no_key(keyed):
    assert keyed.get("/health").status_code == 200
    assert keyed.get("/openapi.json").status_code == 200


def test_a_page_elsewhere_that_names_itself_this_machine_is_refused(served_here):
    assert served_here.chat(headers={"Host": "evil.example"}).status_code == 403
    assert served_here.chat(headers={"Host": "localhost:1"}).status_code == 200


def test_a_form_of_another_page_is_refused(served_here):
    body = b'{"model": "tiny-hybrid", "messages": []}'
    answer = served_here.post(
        "/v1/chat/completions", content=body, headers={"content-type": "text/plain"}
    )

    assert answer.status_code == 415


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost.evil", "null"])
def test_a_page_elsewhere_cannot_act_without_a_body(served_here, origin):
    served_here.chat(session_id="not theirs")
    refused = served_here.post("/v1/sessions/not%20theirs/close", headers={"Origin": origin})

    assert refused.status_code == 403
    assert served_here.get("/v1/sessions/not%20theirs").status_code == 200


def test_the_servers_own_page_may_ask(served_here):
    asked = served_here.get("/state", headers={"Origin": served_here.url})

    assert asked.status_code == 200


def test_where_there_are_keys_pages_elsewhere_may_use_them(keyed):
    headers = {**bearer("ann"), "Origin": "https://app.example"}

    assert keyed.chat(headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost", True),
        ("https://127.0.0.1:8443", True),
        ("http://[::1]:8000", True),
        ("http://evil.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("file://localhost", False),
        ("http://[::1", False),
        ("localhost", False),
        ("null", False),
        ("", False),
    ],
)
def test_origins_of_this_machine(origin, expected):
    assert is_loopback_origin(origin) is expected


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "example.org", ""])
def test_an_address_others_reach_needs_a_key(host):
    with pytest.raises(ConfigError, match="API key"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, keys=ApiKeys.parse(["k"])).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_none(host):
    assert is_loopback(host)
    assert ServerConfig(host=host).is_open


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("LOCALHOST:1", True),
        ("localhost.evil.example", False),
        ("evil.example:80", False),
        ("", False),
    ],
)
def test_names_of_this_machine(header, expected):
    assert names_loopback(header) is expected


def test_keys_come_from_a_file(tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"a=b": "team", "c": None}))
    keys = ApiKeys.parse(file=file)

    assert keys.identity("a=b").tenant == "team"
    assert keys.identity("c").tenant.startswith("key-")
    assert keys.identity("a") is None


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', '{"": "t"}', '{"a": ""}'])
def test_a_file_of_anything_else_is_refused(tmp_path, text):
    file = tmp_path / "keys.json"
    file.write_text(text)

    with pytest.raises(ConfigError):
        ApiKeys.parse(file=file)


@pytest.mark.parametrize("text", ["", "=tenant", "key=", "c2VjcmV0MQ==", "key==="])
def test_half_a_key_is_refused(text):
    with pytest.raises(ConfigError, match=r"KEY=TENANT.*--api-keys"):
        ApiKeys.parse([text])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        ApiKeys.parse(file=tmp_path / "nowhere")


def test_the_admin_key_is_nobody_elses():
    with pytest.raises(ConfigError, match="admin"):
        ApiKeys.parse(["k"], admin="k")
