"""One stream of events to one client: whole events, deadlines, comments."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from conductor.sse import COMMENT, ClientGone, EventStream

Body = Callable[[EventStream], Awaitable[None]]


@asynccontextmanager
async def a_server(body: Body, write_within_s: float = 5.0) -> AsyncIterator[int]:
    """Streams whatever `body` sends, on any free port."""

    async def handle(http: web.Request) -> web.StreamResponse:
        stream = EventStream(http, asyncio.get_running_loop().time, write_within_s)
        await body(stream)
        return stream.response

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def fetch(port: int) -> tuple[str, bytes]:
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/") as response:
        return response.headers["Content-Type"], await response.read()


async def flood(stream: EventStream) -> None:
    while True:
        await stream.send(b"data: " + b"x" * (1 << 20) + b"\n\n")


async def test_headers_go_out_with_the_first_event() -> None:
    seen: list[bool] = []

    async def body(stream: EventStream) -> None:
        seen.append(stream.started)
        await stream.send(b"data: 1\n\n")
        seen.append(stream.started)

    async with a_server(body) as port:
        assert await fetch(port) == ("text/event-stream; charset=utf-8", b"data: 1\n\n")
    assert seen == [False, True]


async def test_choices_that_write_at_once_do_not_tear_events() -> None:
    async def body(stream: EventStream) -> None:
        await asyncio.gather(*(stream.send(f"data: {number}\n\n".encode()) for number in range(50)))

    async with a_server(body) as port:
        _, data = await fetch(port)
    assert sorted(data.split(b"\n\n")[:-1]) == sorted(f"data: {number}".encode() for number in range(50))


async def test_comments_fill_silence_only() -> None:
    async def body(stream: EventStream) -> None:
        beat = asyncio.ensure_future(stream.keep_alive(0.2))
        for _ in range(10):
            await stream.send(b"data: 1\n\n")
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        stream.end()
        await beat

    async with a_server(body) as port:
        _, data = await fetch(port)
    assert data == b"data: 1\n\n" * 10 + COMMENT * data.count(COMMENT)
    assert 1 <= data.count(COMMENT) <= 2


async def test_a_client_that_does_not_read_is_given_up() -> None:
    ended: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    async def body(stream: EventStream) -> None:
        began = loop.time()
        with pytest.raises(ClientGone):
            await flood(stream)
        ended.set_result(loop.time() - began)

    async with a_server(body, write_within_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(3):
            assert 0.1 < await ended < 2
            assert not (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()
