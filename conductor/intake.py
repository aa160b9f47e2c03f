"""The plain half of HTTP: the bytes of a body, within limits of size and time, and answers that are no streams."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from conductor.problem import Problem, invalid
from conductor.shapes import dumps
from conductor.sse import WRITE_WITHIN_S, ClientGone

BODY_BYTES_MAX = 8 << 20
"""A million token ids as text are 7 MB; more is no prompt for any context that we serve."""

BODY_WITHIN_S = 30.0
"""A body that takes longer is refused: a client that trickles must not hold its memory for ever."""

LARGE_BODY_BYTES = 256 << 10
"""Prompts of up to some 50,000 tokens are smaller than this."""

LARGE_BODIES_MAX = 16
"""Large bodies held at once, from their first bytes too many to tokens: 128 MB. The rest of others stays in
their sockets."""


MALFORMED_CHARS_MAX = 200
"""Of what was wrong with a malformed request, in the log: the rest is the client's own bytes."""


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """What the HTTP server logs. A client that does not speak HTTP gets a line at info; our faults stay errors."""

    def log(self, level: int, msg: object, *args: object, **more: Any) -> None:
        """Log something; every other method of a logger ends here."""
        error = more.get("exc_info")
        if isinstance(error, HttpProcessingError):
            first = error.message.strip().partition("\n")[0][:MALFORMED_CHARS_MAX]
            super().log(min(level, logging.INFO), "malformed request: %s: %r", type(error).__name__, first)
        else:
            super().log(level, msg, *args, **more)


@dataclass(frozen=True)
class Body:
    """All bytes of one body, and whether they are so many that only a few such may be held at once."""

    data: bytes
    large: bool


class Intake:
    """Reads bodies; owns the slots that large ones need.

    A body is large once it has proved it, by more than `large_bytes` that arrived: a client that promises much
    and sends nothing takes no slot.
    """

    def __init__(
        self,
        *,
        large_bytes: int = LARGE_BODY_BYTES,
        large_max: int = LARGE_BODIES_MAX,
        within_s: float = BODY_WITHIN_S,
    ) -> None:
        self._large_bytes = large_bytes
        self._slots = asyncio.Semaphore(large_max)
        self._within_s = within_s

    @asynccontextmanager
    async def body(self, http: web.Request) -> AsyncIterator[Body]:
        """A body, and its slot for as long as it is worked on. Raises Problem, before reading where it can.

        `within_s` is for reading alone: waiting for a slot is not the client's fault.
        """
        _require_body(http)
        clock = asyncio.get_running_loop().time
        began = clock()
        data = bytearray()
        if await self._read(http, data, self._large_bytes, self._within_s):
            yield Body(bytes(data), large=False)
            return
        left_s = self._within_s - (clock() - began)
        async with self._slots:
            await self._read(http, data, BODY_BYTES_MAX, left_s)
            yield Body(bytes(data), large=True)

    async def _read(self, http: web.Request, data: bytearray, most: int, within_s: float) -> bool:
        """Read on until the end, or until `data` is larger than `most`; whether it was the end. Raises Problem."""
        try:
            async with asyncio.timeout(within_s):
                while piece := await http.content.readany():
                    data += piece
                    if len(data) > BODY_BYTES_MAX:
                        raise _too_large()
                    if len(data) > most:
                        return False
        except web.RequestPayloadError as error:
            raise invalid(f"The body cannot be read: {error}", code="invalid_body") from None
        except TimeoutError:
            raise Problem(408, "The body did not arrive in time.", code="request_timeout") from None
        return True


def _require_body(http: web.Request) -> None:
    if http.content_type != "application/json":
        message = "The Content-Type must be application/json."
        raise Problem(415, message, code="unsupported_media_type")
    if (http.content_length or 0) > BODY_BYTES_MAX:
        raise _too_large()


async def expect(http: web.Request) -> web.StreamResponse | None:
    """Answers `Expect: 100-continue` only for a body that will be read."""
    try:
        _require_body(http)
    except Problem as problem:
        return error_response(problem)
    assert http.transport is not None
    http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


def _too_large() -> Problem:
    return Problem(413, f"The body is larger than {BODY_BYTES_MAX} bytes.", code="request_too_large")


async def send_whole(http: web.Request, response: web.Response, within_s: float = WRITE_WITHIN_S) -> None:
    """Send a complete response. Raises ClientGone if the client does not take it in time."""
    try:
        async with asyncio.timeout(within_s):
            await response.prepare(http)
            await response.write_eof()
    except (TimeoutError, ConnectionError) as error:
        if http.transport is not None:
            http.transport.abort()
        raise ClientGone(str(error)) from error


def error_response(problem: Problem) -> web.Response:
    """A problem as a response of its own."""
    return json_response(problem.body(), problem.status, problem.headers)


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A body in strict JSON."""
    return web.Response(text=dumps(body), status=status, headers=headers, content_type="application/json")
