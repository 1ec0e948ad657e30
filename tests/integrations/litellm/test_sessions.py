"""Which session a litellm call belongs to, and how long sessions are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import litellm
import pytest

from agentcache.integrations import litellm_provider

if TYPE_CHECKING:
    from agentcache import Runtime

MODEL = "agentcache/tiny-agent"
HELLO = [{"role": "user", "content": "Which files are there?"}]

PLACES: list[tuple[str, dict[str, Any]]] = [
    ("from-session-id", {"session_id": "from-session-id"}),
    ("from-extra-body", {"extra_body": {"session_id": "from-extra-body"}}),
    ("from-metadata", {"metadata": {"session_id": "from-metadata"}}),
    ("from-litellm", {"litellm_session_id": "from-litellm"}),
    ("from-header", {"extra_headers": {"X-Session-ID": "from-header"}}),
    ("from-cache-key", {"prompt_cache_key": "from-cache-key"}),
]
"""Where an id may stand, the place that counts most first."""


def ask(messages: list[Any] = HELLO, **params: Any) -> Any:
    """A short reply."""
    return litellm.completion(MODEL, messages, **{"max_tokens": 4, **params})


def open_ids(runtime: Runtime) -> set[str]:
    return {record.id for record in runtime.registry if not record.closed}


@pytest.mark.parametrize(("name", "place"), PLACES, ids=[name for name, _ in PLACES])
def test_an_id_from_each_place_names_the_session(
    runtime: Runtime, name: str, place: dict[str, Any]
) -> None:
    ask(**place)
    assert open_ids(runtime) == {name}


@pytest.mark.parametrize("first", range(len(PLACES)))
def test_the_earlier_place_counts(runtime: Runtime, first: int) -> None:
    given: dict[str, Any] = {}
    for _, place in PLACES[first:]:
        given.update(place)
    ask(**given)
    assert open_ids(runtime) == {PLACES[first][0]}


def test_a_header_that_a_proxy_received_names_the_session(runtime: Runtime) -> None:
    ask(proxy_server_request={"headers": {"x-session-id": "through-the-proxy"}})
    assert open_ids(runtime) == {"through-the-proxy"}


def test_a_call_without_an_id_leaves_no_session_and_shares_by_content(runtime: Runtime) -> None:
    first, second = ask(), ask()
    assert open_ids(runtime) == set()
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_the_second_call_of_a_session_hits_in_full(runtime: Runtime) -> None:
    first = ask(session_id="thread")
    said = first.choices[0].message
    second = ask([*HELLO, said, {"role": "user", "content": "And now?"}], session_id="thread")
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    # the last sampled token was never computed
    assert second.usage.prompt_tokens_details.cached_tokens >= known - 1


def test_the_tenant_is_the_hosts_and_no_request_names_one(runtime: Runtime) -> None:
    litellm_provider.register(runtime, model="theirs", tenant="them")
    ask(session_id="a")
    theirs = litellm.completion(
        "agentcache/theirs", HELLO, max_tokens=4, session_id="a", metadata={"tenant": None}
    )
    assert theirs.usage.prompt_tokens_details.cached_tokens == 0
    assert {record.tenant for record in runtime.registry if not record.closed} == {None, "them"}
    with pytest.raises(litellm.UnsupportedParamsError, match="tenant"):
        ask(tenant="them")


def test_only_the_last_used_sessions_are_kept(runtime: Runtime) -> None:
    litellm_provider.unregister()
    litellm_provider.register(runtime, max_sessions=2)
    for name in ("a", "b", "a", "c"):
        ask(session_id=name)
    assert open_ids(runtime) == {"a", "c"}


def test_an_idle_session_is_closed(runtime: Runtime) -> None:
    now = [0.0]
    litellm_provider.unregister()
    litellm_provider.register(runtime, idle_s=60, clock=lambda: now[0])
    ask(session_id="old")
    now[0] = 61.0
    ask(session_id="new")
    assert open_ids(runtime) == {"new"}


def test_a_session_that_the_host_closed_is_opened_again(runtime: Runtime) -> None:
    ask(session_id="a")
    runtime.session("a").close()
    ask(session_id="a")
    assert open_ids(runtime) == {"a"}
