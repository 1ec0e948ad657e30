"""Server-sent events: one stream of them, kept alive while nothing comes."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web

from agentcache.integrations.server.errors import ApiError, is_anthropic, translate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

__all__ = ["EventStream", "event_stream"]


class EventStream:
    """The open response; nothing may be sent after its context ends.

    tell: sends an error as its event; forms that have events of their own put theirs here.
    """

    def __init__(self, response: web.StreamResponse, *, anthropic: bool = False) -> None:
        self.response = response
        self.tell: Callable[[ApiError], Awaitable[None]] = self._tell
        self._anthropic = anthropic
        self._sent = False

    async def send(self, data: Any, event: str | None = None) -> None:
        """One event; `data` is a text as it is, or a value to be put as JSON."""
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
        name = "" if event is None else f"event: {event}\n"
        self._sent = True
        await self.response.write(f"{name}data: {text}\n\n".encode())

    async def _tell(self, error: ApiError) -> None:
        event = "error" if self._anthropic else None
        await self.send(error.to_json(anthropic=self._anthropic), event)

    async def keep_alive(self, every_s: float) -> None:
        """Send a comment whenever nothing else was sent for so long; runs until cancelled."""
        while True:
            self._sent = False
            await asyncio.sleep(every_s)
            if not self._sent:
                await self.response.write(b": waiting\n\n")


@asynccontextmanager
async def event_stream(request: web.Request, ping_s: float) -> AsyncIterator[EventStream]:
    """Begin the response, and end it however the block is left.

    An error in the block is told as an event, since the status has been sent; where the client has
    gone, nobody is told.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    with suppress(ConnectionError):
        await response.prepare(request)
        stream = EventStream(response, anthropic=is_anthropic(request))
        ping = asyncio.create_task(stream.keep_alive(ping_s))
        try:
            yield stream
        except ConnectionError:
            raise
        except Exception as error:  # of a call; the client is to learn of it, whatever it is
            await stream.tell(translate(error))
        finally:
            ping.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await ping
        await response.write_eof()
