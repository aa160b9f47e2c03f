"""Bodies in and plain answers out, with deadlines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from conductor.intake import json_response, send_whole
from conductor.sse import ClientGone


@asynccontextmanager
async def a_server(size: int, gone: asyncio.Future[bool]) -> AsyncIterator[int]:
    """Answers with `size` letters, and tells whether the client took them."""

    async def handle(http: web.Request) -> web.StreamResponse:
        response = json_response({"text": "x" * size})
        try:
            await send_whole(http, response, within_s=0.3)
            gone.set_result(False)
        except ClientGone:
            gone.set_result(True)
        return response

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("size", [10, 50 << 20])
async def test_an_answer_waits_for_its_reader_only_so_long(size: int) -> None:
    gone: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    async with a_server(size, gone) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(5):
            assert await gone is (size > 10)
            whole = await reader.read()
        assert whole.endswith(b'"}') is (size == 10)
        writer.close()
