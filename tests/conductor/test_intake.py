"""Bodies in and plain answers out, with deadlines."""

import asyncio
import logging
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from conductor.intake import (
    LARGE_BODIES_MAX,
    LARGE_BODY_BYTES,
    Intake,
    ServerLog,
    error_response,
    json_response,
    send_whole,
)
from conductor.problem import Problem
from conductor.sse import ClientGone
from engine.tokenizer import Tokenizer
from tests.conductor.edge import an_edge


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


# --- bodies ---

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"


@asynccontextmanager
async def a_reader(intake: Intake) -> AsyncIterator[int]:
    """Says how many bytes a body has and whether it is large; one that begins with `w` is held until cancelled."""

    async def handle(http: web.Request) -> web.Response:
        try:
            async with intake.body(http) as body:
                if body.data.startswith(b"w"):
                    await asyncio.Event().wait()
                return json_response({"bytes": len(body.data), "large": body.large})
        except Problem as problem:
            return error_response(problem)

    app = web.Application()
    app.router.add_post("/", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


class Sender:
    """One connection that sends what it is told, and no more."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, port: int, length: int | None, path: bytes = b"/") -> "Sender":
        sender = cls(*await asyncio.open_connection("127.0.0.1", port))
        framing = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
        sender._writer.write(HEAD.replace(b"/", path, 1) + framing + b"\r\n\r\n")
        return sender

    def send(self, data: bytes) -> "Sender":
        self._writer.write(data)
        return self

    async def answer(self) -> bytes:
        """Status line and body."""
        async with asyncio.timeout(5):
            head = await self._reader.readuntil(b"\r\n\r\n")  # not to the end: a refused body is still drained
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None
            body = await self._reader.readexactly(int(length[1]))
        self._writer.close()
        return head.split(b"\r\n")[0] + b" " + body

    def close(self) -> None:
        self._writer.close()


@pytest.mark.parametrize("length", [None, 5000])
async def test_who_sends_nothing_takes_no_slot(length: int | None) -> None:
    async with a_reader(Intake(large_bytes=1000, large_max=1)) as port:
        idle = [await Sender.to(port, length) for _ in range(5)]
        idle[0].send(b"1\r\nx\r\n" if length is None else b"x" * 1000)
        assert b'{"bytes":5000,"large":true}' in await (await Sender.to(port, 5000)).send(b"x" * 5000).answer()
        assert (
            b'{"bytes":3,"large":false}'
            in await (await Sender.to(port, None)).send(b"3\r\nabc\r\n0\r\n\r\n").answer()
        )
        for sender in idle:
            sender.close()


@pytest.mark.parametrize("sent", [0, 500, 3000])
async def test_a_body_that_stalls_is_refused_and_its_slot_is_free_again(sent: int) -> None:
    async with a_reader(Intake(large_bytes=1000, large_max=1, within_s=0.2)) as port:
        stalled = (await Sender.to(port, 5000)).send(b"x" * sent)
        assert b" 408 " in await stalled.answer()
        assert b" 200 " in await (await Sender.to(port, 5000)).send(b"x" * 5000).answer()


async def test_large_bodies_wait_for_a_slot_and_small_ones_do_not() -> None:
    """Waiting for it is longer than a body may take to arrive: that clock stands still meanwhile."""
    async with a_reader(Intake(large_bytes=1000, large_max=1, within_s=0.2)) as port:
        first = (await Sender.to(port, 5000)).send(b"w" * 5000)
        await asyncio.sleep(0.1)
        second = asyncio.create_task((await Sender.to(port, 5000)).send(b"x" * 5000).answer())
        assert b'"large":false' in await (await Sender.to(port, 3)).send(b"abc").answer()
        await asyncio.sleep(0.4)
        assert not second.done()
        first.close()
        assert b'"large":true' in await second


async def test_a_small_request_does_not_queue_behind_large_ones(tokenizer: Tokenizer) -> None:
    gate = threading.Event()

    class Slow(Tokenizer):
        """A real tokenizer that takes as long as the test wants for a text of much size."""

        def __init__(self) -> None:
            vars(self).update(vars(tokenizer))

        def encode(self, text: str, **how: Any) -> list[int]:
            if len(text) > LARGE_BODY_BYTES:
                assert gate.wait(5)
            return super().encode(text, **how)

    large = b'{"prompt": "%s"}' % (b"word " * (LARGE_BODY_BYTES // 4))
    async with an_edge(Slow()) as edge:
        senders = [await Sender.to(edge.port, len(large), b"/v1/completions") for _ in range(6)]
        answers = [asyncio.create_task(sender.send(large).answer()) for sender in senders]
        await asyncio.sleep(0.1)
        assert (await edge.complete(max_tokens=2))[0] == 200
        assert not any(answer.done() for answer in answers)
        gate.set()
        assert all(b"context_length_exceeded" in told for told in await asyncio.gather(*answers))


@pytest.mark.parametrize("length", [None, 8 << 20])
async def test_idle_senders_delay_nobody(tokenizer: Tokenizer, length: int | None) -> None:
    async with an_edge(tokenizer) as edge:
        idle = [await Sender.to(edge.port, length, b"/v1/completions") for _ in range(LARGE_BODIES_MAX + 1)]
        await asyncio.sleep(0.1)
        padding = "x" * LARGE_BODY_BYTES
        async with asyncio.timeout(3):
            assert (await edge.complete(max_tokens=2, padding=padding))[0] == 200
        for sender in idle:
            sender.close()


# --- what is logged ---


@pytest.mark.parametrize(
    "request_",
    [
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
async def test_a_malformed_request_is_one_line_at_info(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, request_: bytes
) -> None:
    caplog.set_level(logging.DEBUG, "conductor")
    caplog.set_level(logging.DEBUG, "aiohttp")
    async with an_edge(tokenizer) as edge:
        assert b" 400 " in (await edge.raw(request_)).split(b"\r\n")[0]
    (record,) = caplog.records
    assert record.levelno <= logging.INFO
    assert "\n" not in caplog.text.strip()
    assert record.exc_info is None
    assert len(record.getMessage()) < 300


async def test_our_own_faults_are_logged_as_errors_with_their_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_http: web.Request) -> web.Response:
        raise RuntimeError("a fault of ours")

    app = web.Application()
    app.router.add_get("/", broken)
    runner = web.AppRunner(app, logger=ServerLog(logging.getLogger("conductor"), {}))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b" 500 " in (await reader.read()).split(b"\r\n")[0]
    writer.close()
    await runner.cleanup()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "RuntimeError: a fault of ours" in caplog.text
