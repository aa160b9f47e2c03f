"""Server-sent events to one client: whole events, in order, each written within a deadline."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from aiohttp import web

WRITE_WITHIN_S = 60.0
"""A client that reads nothing for so long is taken for gone: its decode slot and blocks are wanted elsewhere."""

COMMENT = b": keep-alive\n\n"
"""Ignored by every client; keeps intermediaries from cutting a silent line."""

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


class ClientGone(Exception):
    """The client closed the connection, or stopped reading. Nothing more can be told to it."""


class EventStream:
    """One streamed response. Headers go out with the first event, so that a refusal before it has its own status.

    Several choices write to one stream: a lock keeps events whole. After ClientGone no write succeeds.
    """

    def __init__(
        self, http: web.Request, now: Callable[[], float], write_within_s: float = WRITE_WITHIN_S
    ) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._http = http
        self._now = now
        self._write_within_s = write_within_s
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()
        self._wrote_at = now()

    @property
    def started(self) -> bool:
        """Whether the client has a status and headers already."""
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        """Write whole events. Waits while the client reads slowly; raises ClientGone."""
        try:
            async with asyncio.timeout(self._write_within_s), self._turn:
                if not self.response.prepared:
                    await self.response.prepare(self._http)
                await self.response.write(data)
        except (TimeoutError, ConnectionError) as error:
            self._abort()
            raise ClientGone(str(error)) from error
        self._wrote_at = self._now()

    async def keep_alive(self, every_s: float) -> None:
        """Send a comment whenever nothing was sent for so long, until `end`. Raises ClientGone."""
        while not self._ended.is_set():
            left_s = self._wrote_at + every_s - self._now()
            if left_s <= 0:
                await self.send(COMMENT)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._ended.wait()

    def end(self) -> None:
        """No more comments."""
        self._ended.set()

    def _abort(self) -> None:
        """Without this, closing would wait for a client that does not read."""
        if self._http.transport is not None:
            self._http.transport.abort()
