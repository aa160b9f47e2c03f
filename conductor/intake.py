"""The plain half of HTTP: the bytes of a body, within limits of size and time, and answers that are no streams."""

import asyncio
from typing import Any

from aiohttp import web

from conductor.problem import Problem, invalid
from conductor.shapes import dumps
from conductor.sse import WRITE_WITHIN_S, ClientGone

BODY_BYTES_MAX = 8 << 20
"""A million token ids as text are 7 MB; more is no prompt for any context that we serve."""

BODY_WITHIN_S = 30.0
"""A body that takes longer is refused: a client that trickles must not hold its memory for ever."""

LARGE_BODY_BYTES = 256 << 10
"""Prompts of up to some 50,000 tokens are smaller than this."""


def is_large(http: web.Request) -> bool:
    """Whether a body is, or may become, so large that only a few may be held at once."""
    return http.content_length is None or http.content_length > LARGE_BODY_BYTES


async def read_body(http: web.Request) -> bytes:
    """The body's bytes, refused before they are read where the headers allow it. Raises Problem."""
    _require_body(http)
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            return await http.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large() from None
    except web.RequestPayloadError as error:
        raise invalid(f"The body cannot be read: {error}", code="invalid_body") from None
    except TimeoutError:
        raise Problem(408, "The body did not arrive in time.", code="request_timeout") from None


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
