"""OpenAI's `/v1/responses`: conversations that the server remembers, one session each."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentcache import SessionError
from agentcache.integrations.server.app import Server, server_of
from agentcache.integrations.server.calls import Work
from agentcache.integrations.server.errors import ApiError
from agentcache.integrations.server.response_store import ResponseStore, StoredResponse
from agentcache.integrations.server.responses_input import (
    ResponsesRequest,
    read_input,
    read_response_call,
)
from agentcache.integrations.server.responses_output import (
    ResponseEvents,
    blank_response,
    filled_response,
)
from agentcache.integrations.server.routes import Route, answer_of
from agentcache.integrations.server.sse import event_stream

if TYPE_CHECKING:
    from agentcache import Session, TurnStream
    from agentcache.integrations._openai import Call
    from agentcache.integrations.server.calls import RunningCall

__all__ = ["routes"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a response goes on: the session, and the tip the last one left, if it still stands."""

    session_id: str | None
    tip: int | None = None


class _Responses:
    """The handlers, over one store."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._store = ResponseStore(limit, max_bytes)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Reply to what is new, after the conversation that led there."""
        server = server_of(request)
        body, values = await server.read(request, ResponsesRequest)
        server.check_model(body.model)
        tenant, previous = server.tenant(request), None
        if body.previous_response_id is not None:
            previous = self._store.find(tenant, body.previous_response_id, "previous_response_id")
        earlier = [] if previous is None else previous.conversation()

        def read() -> tuple[Call, list[dict[str, Any]]]:
            new, places = read_input(body.input)
            grammar = server.runtime.tool_call_grammar
            return read_response_call(body, earlier, new, places, grammar, server.defaults), new

        call, new = await server.read_call(request, read)
        id = f"resp_{uuid.uuid4().hex}"
        own = None if body.store is False else id
        session_id = server.session_id(request, values)
        place = await _place(server, own, session_id, previous, self._store)
        work = Work(
            operation="chat",
            start=lambda session: _start(session, call, place.tip),
            tenant=tenant,
            session_id=place.session_id,
            parameters=call.options,
        )
        async with server.calls.run(work, request.headers) as running:
            blank = blank_response(id, server.config.model, body)
            if body.stream:
                async with event_stream(request, server.config.ping_s) as events:
                    said = ResponseEvents(events)
                    await said.begin(blank)
                    whole = await _say(said, call, running, blank)
                    self._keep(whole, new, call, running, tenant, previous)
                    await said.end(whole)
                return events.response
            whole = await _say(ResponseEvents(), call, running, blank)
            self._keep(whole, new, call, running, tenant, previous)
            return web.json_response(whole)

    def _keep(
        self,
        whole: dict[str, Any],
        new: list[dict[str, Any]],
        call: Call,
        running: RunningCall,
        tenant: str | None,
        previous: StoredResponse | None,
    ) -> None:
        """Remember a finished response, unless its caller did not want that."""
        if not whole["store"]:
            return
        turn = running.turn
        self._store.add(
            StoredResponse(
                id=whole["id"],
                tenant=tenant,
                session_id=running.session_id,
                tip=turn.tip,
                index=turn.index,
                messages=(*new, call.form.message(turn)),
                previous=previous,
            ),
            whole,
        )

    async def get(self, request: web.Request) -> web.Response:
        """A stored response."""
        tenant, id = server_of(request).tenant(request), request.match_info["id"]
        return web.json_response(self._store.body(tenant, id))

    async def delete(self, request: web.Request) -> web.Response:
        """Forget a stored response."""
        tenant, id = server_of(request).tenant(request), request.match_info["id"]
        self._store.remove(tenant, id)
        return web.json_response({"id": id, "object": "response", "deleted": True})


async def _place(
    server: Server,
    own: str | None,
    session_id: str | None,
    previous: StoredResponse | None,
    store: ResponseStore,
) -> _Place:
    """The session of the response before, at the tip it left; without one, `own`.

    Where others have gone on from that tip already, a fork that is taken back to it. Where nothing
    of it is left, a session of its own: the conversation is in the store.
    """
    if previous is None or session_id not in (None, previous.session_id):
        return _Place(session_id or own)
    try:
        session = server.sessions.find(previous.tenant, previous.session_id)
        if previous.tip in session.tips:
            return _Place(session.id, previous.tip)
        later = [each for each in store.later(previous) if each.tip in session.tips]
        if not later:
            return _Place(session.id)

        def branch() -> Session:
            forked = session.fork(tip=later[0].tip)
            try:
                forked.rewind(previous.index)
            except BaseException:
                forked.close(wait=False)
                raise
            return forked

        forked = await server.threads.make(branch, lambda made: made.close(wait=False))
    except (ApiError, SessionError):
        return _Place(own)
    server.sessions.adopt(previous.tenant, forked)
    return _Place(forked.id)


def _start(session: Session, call: Call, tip: int | None) -> TurnStream:
    """Begin at the tip, if it still stands: a call of the same moment may have moved on from it."""
    tip = tip if tip in session.tips else None
    return session.complete(call.messages, tools=call.tools, tip=tip, stream=True, **call.options)


async def _say(
    said: ResponseEvents, call: Call, running: RunningCall, blank: dict[str, Any]
) -> dict[str, Any]:
    """Take the turn as it comes; the finished response."""
    reader = call.form.reader()
    async for delta in running.deltas():
        await said.add(reader.push(delta))
    await said.add(reader.finish())
    turn = running.turn
    is_cut = turn.finish_reason in ("length", "prefill")
    await said.close(is_cut=is_cut)
    return filled_response(blank, said.items, turn.usage, is_cut=is_cut)


def routes(limit: int, max_bytes: int) -> list[Route]:
    """What this module answers; the last `limit` responses are remembered, in `max_bytes`."""
    handlers = _Responses(limit, max_bytes)
    answer = answer_of(id="string", object="string", output="array", status="string")
    deleted = answer_of(id="string", deleted="boolean")
    return [
        Route(
            "POST",
            "/v1/responses",
            handlers.create,
            "Reply in a conversation that is remembered (OpenAI)",
            body=ResponsesRequest,
            answer=answer,
            streams=True,
        ),
        Route("GET", "/v1/responses/{id}", handlers.get, "A response", answer=answer),
        Route("DELETE", "/v1/responses/{id}", handlers.delete, "Forget a response", answer=deleted),
    ]
