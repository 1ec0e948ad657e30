"""What `/v1/responses` remembers, so that a later one may go on from it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache.integrations.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ResponseStore", "StoredResponse"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """A finished response and where its session stood after it.

    messages: what it added to the conversation, the reply included.
    """

    id: str
    tenant: str | None
    session_id: str
    tip: int | None
    index: int
    messages: tuple[dict[str, Any], ...]
    previous: StoredResponse | None
    body: dict[str, Any]

    def path(self) -> Iterator[StoredResponse]:
        """This one and those it goes on from, latest first."""
        each: StoredResponse | None = self
        while each is not None:
            yield each
            each = each.previous

    def conversation(self) -> list[dict[str, Any]]:
        """All messages up to here, but for instructions."""
        return [m for each in reversed(list(self.path())) for m in each.messages]


class ResponseStore:
    """The last `limit` responses. On the event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def add(self, response: StoredResponse) -> None:
        """Keep one; the oldest goes where there are too many."""
        self._stored[response.id] = response
        if len(self._stored) > self._limit:
            self._stored.popitem(last=False)

    def find(self, tenant: str | None, id: str, param: str | None = None) -> StoredResponse:
        """One of the tenant's. Raises ApiError 404."""
        found = self._stored.get(id)
        if found is None or found.tenant != tenant:
            raise ApiError(404, f"no response {id[:80]!r}", param=param, code="response_not_found")
        return found

    def remove(self, tenant: str | None, id: str) -> None:
        """Forget one; others that go on from it keep what they need. Raises ApiError 404."""
        del self._stored[self.find(tenant, id).id]

    def later(self, response: StoredResponse) -> Iterator[StoredResponse]:
        """Those of the same session that go on from it, latest first."""
        for each in reversed(self._stored.values()):
            is_of_session = (each.tenant, each.session_id) == (
                response.tenant,
                response.session_id,
            )
            if is_of_session and each is not response and response in each.path():
                yield each
