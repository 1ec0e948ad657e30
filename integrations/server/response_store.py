"""What `/v1/responses` remembers, so that a later one may go on from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentcache.integrations.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ResponseStore", "StoredResponse"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """What a finished response left: where its session stood after it, and what was said.

    messages: what it added to the conversation, the reply included.
    """

    id: str
    tenant: str | None
    session_id: str
    tip: int | None
    index: int
    messages: tuple[dict[str, Any], ...]
    previous: StoredResponse | None

    def path(self) -> Iterator[StoredResponse]:
        """This one and those it goes on from, latest first."""
        each: StoredResponse | None = self
        while each is not None:
            yield each
            each = each.previous

    def conversation(self) -> list[dict[str, Any]]:
        """All messages up to here, but for instructions."""
        return [m for each in reversed(list(self.path())) for m in each.messages]


@dataclass(slots=True)
class _Shelf:
    """What is kept of one tenant's, oldest first, each with its body and that one's size."""

    kept: dict[str, tuple[StoredResponse, dict[str, Any], int]] = field(default_factory=dict)
    num_bytes: int = 0


class ResponseStore:
    """The last `limit` responses in at most `max_bytes`, as far as JSON tells. On the event loop.

    Where it is full, the tenant that holds most loses its oldest. The messages of one that is gone
    stay, and count, as long as another one goes on from it.
    """

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._shelves: dict[str | None, _Shelf] = {}
        self._holders: dict[StoredResponse, list[int]] = {}
        """How many hold a response's messages: itself, those that go on from it; and their size."""

    def add(self, response: StoredResponse, body: dict[str, Any]) -> None:
        """Keep one; others go where there are too many."""
        shelf = self._shelves.setdefault(response.tenant, _Shelf())
        size = _size(body)
        shelf.kept[response.id] = (response, body, size)
        shelf.num_bytes += size
        self._hold(response)
        while sum(len(each.kept) for each in self._shelves.values()) > self._limit:
            self._drop_oldest(lambda shelf: len(shelf.kept))
        while sum(each.num_bytes for each in self._shelves.values()) > self._max_bytes:
            self._drop_oldest(lambda shelf: shelf.num_bytes)

    def find(self, tenant: str | None, id: str, param: str | None = None) -> StoredResponse:
        """One of the tenant's. Raises ApiError 404."""
        return self._found(tenant, id, param)[0]

    def body(self, tenant: str | None, id: str) -> dict[str, Any]:
        """The answer that one was. Raises ApiError 404."""
        return self._found(tenant, id)[1]

    def remove(self, tenant: str | None, id: str) -> None:
        """Forget one; others that go on from it keep what they need. Raises ApiError 404."""
        response, _, size = self._found(tenant, id)
        shelf = self._shelves[tenant]
        del shelf.kept[id]
        shelf.num_bytes -= size
        self._release(response)
        if not shelf.kept:
            del self._shelves[tenant]

    def later(self, response: StoredResponse) -> Iterator[StoredResponse]:
        """Those of the same session that go on from it, latest first."""
        shelf = self._shelves.get(response.tenant)
        leads = {response: True}
        for each, _, _ in reversed([] if shelf is None else list(shelf.kept.values())):
            goes_on = each is not response and _leads(each, leads)
            if goes_on and each.session_id == response.session_id:
                yield each

    def _found(
        self, tenant: str | None, id: str, param: str | None = None
    ) -> tuple[StoredResponse, dict[str, Any], int]:
        shelf = self._shelves.get(tenant)
        found = None if shelf is None else shelf.kept.get(id)
        if found is None:
            raise ApiError(404, f"no response {id[:80]!r}", param=param, code="response_not_found")
        return found

    def _drop_oldest(self, held: Callable[[_Shelf], int]) -> None:
        tenant = max(self._shelves, key=lambda tenant: held(self._shelves[tenant]))
        self.remove(tenant, next(iter(self._shelves[tenant].kept)))

    def _hold(self, response: StoredResponse) -> None:
        for each in response.path():
            if each in self._holders:
                self._holders[each][0] += 1
                return
            size = _size(each.messages)
            self._holders[each] = [1, size]
            self._shelves[response.tenant].num_bytes += size

    def _release(self, response: StoredResponse) -> None:
        for each in response.path():
            self._holders[each][0] -= 1
            if self._holders[each][0]:
                return
            self._shelves[response.tenant].num_bytes -= self._holders.pop(each)[1]


def _size(value: Any) -> int:
    return len(json.dumps(value))


def _leads(response: StoredResponse, known: dict[StoredResponse, bool]) -> bool:
    """Whether its path holds one that is known to; what is found out becomes known."""
    passed = []
    answer = False
    for each in response.path():
        if each in known:
            answer = known[each]
            break
        passed.append(each)
    known.update(dict.fromkeys(passed, answer))
    return answer
