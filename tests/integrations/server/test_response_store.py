"""What `/v1/responses` remembers: as many as it may, and no tenant at the cost of another."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")
from agentcache.integrations.server.errors import ApiError
from agentcache.integrations.server.response_store import ResponseStore, StoredResponse

KB = "x" * 1000


def keep(
    store: ResponseStore,
    id: str,
    tenant: str | None = None,
    previous: StoredResponse | None = None,
    said: str = "",
    body: str = "",
) -> StoredResponse:
    response = StoredResponse(
        id=id,
        tenant=tenant,
        session_id="s",
        tip=1,
        index=1,
        messages=({"role": "user", "content": said},),
        previous=previous,
    )
    store.add(response, {"id": id, "body": body})
    return response


def kept(store: ResponseStore, tenant: str | None, *ids: str) -> str:
    """Those of the ids that are still there."""

    def has(id: str) -> bool:
        try:
            store.find(tenant, id)
        except ApiError:
            return False
        return True

    return "".join(id for id in ids if has(id))


@pytest.mark.parametrize("part", ["said", "body"])
def test_the_oldest_go_where_they_take_too_many_bytes(part):
    store = ResponseStore(100, 3500)
    for id in "abcd":
        keep(store, id, **{part: KB})

    assert kept(store, None, *"abcd") == "bcd"
    assert store.body(None, "d")["id"] == "d"


def test_one_that_is_too_large_by_itself_is_not_kept():
    store = ResponseStore(100, 1000)
    keep(store, "a", body=KB)
    keep(store, "b")

    assert kept(store, None, "a", "b") == "b"


@pytest.mark.parametrize(("limit", "max_bytes"), [(4, 10**6), (100, 4500)])
def test_the_tenant_that_holds_most_loses_its_oldest(limit, max_bytes):
    store = ResponseStore(limit, max_bytes)
    keep(store, "q", "quiet", body=KB)
    for id in "abcdef":
        keep(store, id, "loud", body=KB)

    assert kept(store, "quiet", "q") == "q"
    assert kept(store, "loud", *"abcdef") == "def"


def test_messages_that_another_one_needs_stay_and_count():
    store = ResponseStore(100, 3500)
    first = keep(store, "a", said=KB)
    second = keep(store, "b", previous=first, said=KB)
    store.remove(None, "a")
    keep(store, "c", body=KB)
    assert [m["content"] for m in second.conversation()] == [KB, KB]
    assert kept(store, None, "b", "c") == "bc"

    keep(store, "d", body=KB)
    assert kept(store, None, "b", "c", "d") == "cd"
    keep(store, "e", body=KB)
    assert kept(store, None, "c", "d", "e") == "cde"


def test_one_may_go_on_from_what_was_dropped_meanwhile():
    store = ResponseStore(1, 10**6)
    first = keep(store, "a", said="one")
    keep(store, "b")
    third = keep(store, "c", previous=first, said="two")
    store.remove(None, "c")

    assert [m["content"] for m in third.conversation()] == ["one", "two"]
    assert kept(store, None, "a", "b", "c") == ""


def test_later_ones_are_found_through_those_that_are_gone():
    store = ResponseStore(100, 10**6)
    root = keep(store, "a")
    middle = keep(store, "b", previous=root)
    last = keep(store, "c", previous=middle)
    other = keep(store, "d")
    keep(store, "e", previous=other)
    store.remove(None, "b")

    assert list(store.later(root)) == [last]
