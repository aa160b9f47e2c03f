"""Calls over real sockets: answers, streams, cancels, deadlines, lost peers, and guests with no word of it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
import pytest
import zmq
import zmq.asyncio

from protocol.call import Answer
from protocol.cluster import PROTOCOL_VERSION
from protocol.errors import Abandoned, BadMessage, Broken, DeadlineExceeded, PeerLost, RemoteError
from protocol.frames import Kind, decode, encode
from protocol.message import Message
from protocol.rpc import CALLS_MAX, CONNECT_S, SILENT_S, Ask, Client, Server, at_once, handler, items
from protocol.zmq_transport import FRAME_BYTES_MAX, ZmqTransport

ROOT = Path(__file__).resolve().parents[2]


class Echo(Message):
    text: str


class Echoed(Message):
    text: str


class Count(Message):
    to: int


class Number(Message):
    number: int


class Hang(Message):
    """Never answered."""


class Fail(Message):
    how: str


class Recall(Message):
    """Answered at once, from memory; or that fails."""

    fails: bool = False


class Unserved(Message):
    """No server knows this one."""


class Teapot(RemoteError):
    kind = "teapot"


class Unknown(RemoteError):
    kind = "kind_to_be_forgotten"


@dataclass
class Service:
    """What the tests call, and what has become of its calls."""

    hanging: int = 0
    cancelled: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def echo(self, message: Echo, ask: Ask) -> Answer:
        return Answer(Echoed(message.text), ask.buffers)

    async def count(self, message: Count, ask: Ask) -> Number:
        for number in range(message.to):
            await ask.send(Number(number), bytes([number]))
        return Number(message.to)

    async def hang(self, message: Hang, ask: Ask) -> Echoed:
        self.hanging += 1
        self.changed.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.changed.set()
            raise
        return Echoed("never")

    async def fail(self, message: Fail, ask: Ask) -> Echoed:
        match message.how:
            case "teapot":
                raise Teapot("short and stout")
            case "unknown":
                raise Unknown("nobody knows me there")
            case "lost":
                raise PeerLost("a peer of mine")
        raise ZeroDivisionError("a fault of ours")

    def recall(self, message: Recall) -> Number:
        if message.fails:
            raise Teapot("forgotten")
        return Number(self.hanging)

    async def until(self, condition: Callable[[], bool], within_s: float = 2.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@dataclass
class World:
    transport: ZmqTransport
    service: Service
    server: Server
    client: Client


@contextlib.asynccontextmanager
async def running(server: Server) -> AsyncIterator[None]:
    task = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def serve(transport: ZmqTransport, address: str, service: Service) -> Server:
    rows = [
        handler(Echo, service.echo),
        handler(Count, service.count),
        handler(Hang, service.hang),
        handler(Fail, service.fail),
        at_once(Recall, service.recall),
    ]
    return Server(transport.bind(address), dict(rows))


@pytest.fixture(params=["tcp", "ipc"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    address = "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/s"
    transport, service = ZmqTransport(), Service()
    server = serve(transport, address, service)
    try:
        async with running(server), Client(transport, server.address) as client:
            yield World(transport, service, server, client)
    finally:
        transport.close()


only_tcp = pytest.mark.parametrize("world", ["tcp"], indirect=True)


async def echoes(client: Client, text: str = "still there?") -> bool:
    return (await client.call(Echo(text), Echoed, within_s=2)).text == text


async def test_call_with_buffers(world: World) -> None:
    answer = await world.client.call_raw(Echo("hello"), b"ab", bytes(200_000), within_s=2)
    assert answer.message == Echoed("hello")
    assert [bytes(buffer) for buffer in answer.buffers] == [b"ab", bytes(200_000)]
    assert world.server.calls == 0


async def test_calls_at_the_same_time_get_their_own_answers(world: World) -> None:
    answers = await asyncio.gather(*(world.client.call(Echo(str(n)), Echoed, within_s=5) for n in range(200)))
    assert [answer.text for answer in answers] == [str(n) for n in range(200)]


async def test_stream_in_order(world: World) -> None:
    async with world.client.stream(Count(200), within_s=5) as stream:
        assert [item async for item in items(stream)] == [Number(n) for n in range(201)]
    async with world.client.stream(Count(3), within_s=5) as stream:
        assert [answer.buffers for answer in [item async for item in stream]] == [[b"\0"], [b"\1"], [b"\2"], []]


async def test_leaving_a_stream_cancels_the_servers_task(world: World) -> None:
    async with world.client.stream(Hang(), within_s=5):
        await world.service.until(lambda: world.service.hanging == 1)
    await world.service.until(lambda: world.service.cancelled == 1)
    assert await echoes(world.client)
    assert world.server.calls == 0


async def test_cancelling_the_caller_cancels_the_servers_task(world: World) -> None:
    task = asyncio.create_task(world.client.call(Hang(), Echoed, within_s=5))
    await world.service.until(lambda: world.service.hanging == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await world.service.until(lambda: world.service.cancelled == 1)


async def test_deadline_ends_both_sides(world: World) -> None:
    with pytest.raises(DeadlineExceeded, match=r"Hang at .* took over 0\.2 s"):
        await world.client.call(Hang(), Echoed, within_s=0.2)
    await world.service.until(lambda: world.service.cancelled == 1)
    assert await echoes(world.client)


async def test_errors_arrive_as_what_they_were(world: World) -> None:
    call = world.client.call
    with pytest.raises(Teapot, match="short and stout"):
        await call(Fail("teapot"), Echoed, within_s=2)
    with pytest.raises(Broken, match=r"^Fail failed$"):
        await call(Fail("fault"), Echoed, within_s=2)
    with pytest.raises(RemoteError, match="PeerLost: a peer of mine"):
        await call(Fail("lost"), Echoed, within_s=2)
    assert await echoes(world.client)


async def test_what_is_answered_at_once_comes_like_any_other_answer(world: World) -> None:
    hanging = asyncio.create_task(world.client.call(Hang(), Echoed, within_s=5))
    await world.service.until(lambda: world.service.hanging == 1)
    asked = (world.client.call(Recall(), Number, within_s=2) for _ in range(50))
    assert await asyncio.gather(*asked) == [Number(1)] * 50
    with pytest.raises(Teapot, match="forgotten"):
        await world.client.call(Recall(fails=True), Number, within_s=2)
    assert world.server.calls == 1, "the one that hangs"
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)


async def test_an_error_of_unknown_kind_keeps_its_text(world: World) -> None:
    known = RemoteError.kinds.pop("kind_to_be_forgotten")  # as in a process that never imported it
    try:
        with pytest.raises(RemoteError, match="nobody knows me there") as caught:
            await world.client.call(Fail("unknown"), Echoed, within_s=2)
        assert type(caught.value) is RemoteError
    finally:
        RemoteError.kinds["kind_to_be_forgotten"] = known


async def test_what_is_not_served_and_what_is_not_expected(world: World) -> None:
    with pytest.raises(RemoteError, match="'Unserved' is not served here"):
        await world.client.call(Unserved(), Echoed, within_s=2)
    with pytest.raises(BadMessage, match="answered Echoed, not Number"):
        await world.client.call(Echo("x"), Number, within_s=2)
    assert world.server.bad_frames == 1


async def test_nobody_listens(tmp_path: Path) -> None:
    transport = ZmqTransport()
    try:
        async with Client(transport, f"ipc://{tmp_path}/nobody") as client:
            with pytest.raises(PeerLost, match="nobody listens"):
                await client.call(Echo("x"), Echoed, within_s=CONNECT_S + 5)
            with pytest.raises(DeadlineExceeded):
                await client.call(Echo("x"), Echoed, within_s=0.1)
    finally:
        transport.close()


@only_tcp
async def test_an_address_in_use_is_an_os_error(world: World) -> None:
    with pytest.raises(OSError, match=f"cannot listen at {world.server.address}"):
        world.transport.bind(world.server.address)


async def test_closing_the_client_fails_what_is_open(world: World) -> None:
    async with Client(world.transport, world.server.address) as other:
        task = asyncio.create_task(other.call(Hang(), Echoed, within_s=5))
        await world.service.until(lambda: world.service.hanging == 1)
    with pytest.raises(PeerLost, match="was closed"):
        await task


async def test_closing_the_client_fails_what_has_not_found_its_server_yet(tmp_path: Path) -> None:
    """As PeerLost: a cancellation that nobody asked for would end the caller's task without a word."""
    transport = ZmqTransport()
    try:
        async with Client(transport, f"ipc://{tmp_path}/nobody") as client:
            task = asyncio.create_task(client.call(Echo("x"), Echoed, within_s=5))
            await asyncio.sleep(0.05)
        with pytest.raises(PeerLost, match="was closed"):
            await task
        assert not task.cancelled()
    finally:
        transport.close()


@pytest.mark.parametrize("address", ["foo", "tcp://127.0.0.1", "ipc://", "tcp://127.0.0.1:x", "tcp://\udcff:1"])
async def test_an_address_that_is_none_is_a_peer_that_is_not_there(address: str) -> None:
    transport = ZmqTransport()
    try:
        with pytest.raises(PeerLost, match="is no address to connect to"):
            Client(transport, address).start()
    finally:
        transport.close()


SERVER = """
import asyncio, sys
from tests.protocol.test_rpc import Service, serve
from protocol.zmq_transport import ZmqTransport

async def main():
    server = serve(ZmqTransport(), sys.argv[1], Service())
    sys.stdout.write("listening\\n")
    sys.stdout.flush()
    await server.serve()

asyncio.run(main())
"""


@contextlib.contextmanager
def server_process(address: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SERVER, address], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"listening\n"
        yield process.pid
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
async def test_a_killed_server_fails_all_open_calls_at_once_and_its_successor_serves(
    scheme: str, tmp_path: Path, unused_tcp_port: int
) -> None:
    address = f"tcp://127.0.0.1:{unused_tcp_port}" if scheme == "tcp" else f"ipc://{tmp_path}/s"
    transport, loop = ZmqTransport(), asyncio.get_running_loop()
    try:
        async with Client(transport, address) as client:
            with server_process(address) as pid:
                assert await echoes(client)
                calls = [asyncio.create_task(client.call(Hang(), Echoed, within_s=30)) for _ in range(5)]
                assert await echoes(client)  # sent after the others: those have arrived too
                os.kill(pid, signal.SIGKILL)
                killed = loop.time()
                results = await asyncio.gather(*calls, return_exceptions=True)
                assert [type(result) for result in results] == [PeerLost] * 5
                assert loop.time() - killed < 1.0
            with server_process(address):
                assert await echoes(client)
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def raw_dealer(address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(address)
        yield socket
    finally:
        socket.close(0)
        context.term()


async def answer_of(socket: zmq.asyncio.Socket) -> tuple[Kind, int, str, object]:
    async with asyncio.timeout(5):
        header, _ = decode(await socket.recv_multipart())
    return header.kind, header.call, header.tag, header.fields


GARBAGE = [
    [b""],
    [b"GET / HTTP/1.1"],
    [b"\xc1" * 1000, b"x" * 1000],
    [msgpack.packb([PROTOCOL_VERSION, 1, 1, None, "Echo"])],
    [msgpack.packb([99, 1, 1, None, "Echo", {"text": "x"}])],
    [msgpack.packb([PROTOCOL_VERSION, 1, 1, float("nan"), "Echo", {"text": "x"}])],
    [msgpack.packb([PROTOCOL_VERSION, 1, 1, None, "Message", {}])],
    [msgpack.packb([PROTOCOL_VERSION, 1, 1, None, "Echo", {"text": 5}])],
    [msgpack.packb([PROTOCOL_VERSION, 1, 1, None, "Echo", {"text": "x", "y": 1}])],
    [b"\x91" * 100_000],
]


async def test_garbage_is_dropped_and_counted_and_the_next_call_works(world: World) -> None:
    async with raw_dealer(world.server.address) as socket:
        for frames in GARBAGE:
            await socket.send_multipart(frames)
        await socket.send_multipart([encode(Kind.CALL, 9, Echo("after all"), 1.0)])
        answers = [await answer_of(socket) for _ in range(4)]
    assert [(kind, tag) for kind, _, tag, _ in answers[:3]] == [(Kind.ERROR, "bad_message")] * 3
    assert answers[3] == (Kind.REPLY, 9, "Echoed", {"text": "after all"})
    assert world.server.bad_frames == len(GARBAGE)
    assert await echoes(world.client)


async def test_cancels_and_answers_of_no_call_are_ignored(world: World) -> None:
    async with raw_dealer(world.server.address) as socket:
        for kind in (Kind.CANCEL, Kind.ALIVE, Kind.REPLY, Kind.ITEM, Kind.ERROR):
            await socket.send_multipart([encode(kind, 77, Echo("x"))])
        await socket.send_multipart([encode(Kind.CALL, 1, Echo("y"), 1.0)])
        assert (await answer_of(socket))[3] == {"text": "y"}
    assert world.server.bad_frames == 0


async def test_a_stranger_cannot_cancel_anothers_call(world: World) -> None:
    task = asyncio.create_task(world.client.call(Hang(), Echoed, within_s=5))
    await world.service.until(lambda: world.service.hanging == 1)
    async with raw_dealer(world.server.address) as socket:
        for number in range(10):
            await socket.send_multipart([encode(Kind.CANCEL, number)])
        await socket.send_multipart([encode(Kind.CALL, 1, Echo("y"), 1.0)])
        await answer_of(socket)
    assert (world.server.calls, world.service.cancelled) == (1, 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_call_that_comes_twice_runs_once_and_is_answered_once(world: World) -> None:
    async with raw_dealer(world.server.address) as socket:
        for number in (1, 2, 2, 1, 3):
            await socket.send_multipart([encode(Kind.CALL, number, Echo(str(number)), 5.0)])
        answers = [await answer_of(socket) for _ in range(3)]
    assert [(kind, number) for kind, number, _, _ in answers] == [(Kind.REPLY, number) for number in (1, 2, 3)]
    assert world.server.bad_frames == 2


async def test_answers_are_numbered(world: World) -> None:
    async with raw_dealer(world.server.address) as socket:
        await socket.send_multipart([encode(Kind.CALL, 1, Count(2), 5.0)])
        async with asyncio.timeout(5):
            headers = [decode(await socket.recv_multipart())[0] for _ in range(3)]
    assert [header.kind for header in headers] == [Kind.ITEM, Kind.ITEM, Kind.REPLY]
    assert [header.amount for header in headers] == [0, 1, 2]


@contextlib.asynccontextmanager
async def scripted(answers: list[bytes], told: list[Kind]) -> AsyncIterator[Client]:
    """A client of a server that answers the first call with these frames; `told` gets what it hears."""
    transport = ZmqTransport()
    port = transport.bind("tcp://127.0.0.1:0")

    async def serve() -> None:
        while True:
            peer, frames = await port.receive()
            told.append(decode(frames)[0].kind)
            if told == [Kind.CALL]:
                for answer in answers:
                    await port.send(peer, [answer])

    task = asyncio.create_task(serve())
    try:
        async with Client(transport, port.address) as client:
            yield client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        port.close()
        transport.close()


def counted(kind: Kind, number: int) -> bytes:
    return encode(kind, 1, Number(number), number)


async def test_an_answer_that_comes_twice_is_taken_once() -> None:
    numbers = [(Kind.ITEM, 0), (Kind.ITEM, 0), (Kind.ITEM, 1), (Kind.ITEM, 0), (Kind.ITEM, 1), (Kind.REPLY, 2)]
    told: list[Kind] = []
    async with (
        scripted([counted(*each) for each in numbers], told) as client,
        client.stream(Count(2), within_s=5) as stream,
    ):
        assert [item async for item in items(stream)] == [Number(0), Number(1), Number(2)]
    assert told == [Kind.CALL]


@pytest.mark.parametrize("after", [Kind.ITEM, Kind.REPLY])
async def test_a_call_of_whose_answers_one_is_lost_ends_there_and_the_server_is_told(after: Kind) -> None:
    told: list[Kind] = []
    async with scripted([counted(Kind.ITEM, 0), counted(after, 2), counted(Kind.ITEM, 1)], told) as client:
        async with client.stream(Count(2), within_s=5) as stream:
            answers = items(stream)
            assert await anext(answers) == Number(0)
            with pytest.raises(PeerLost, match="lost on its way"):
                await anext(answers)
        async with asyncio.timeout(5):
            while told != [Kind.CALL, Kind.CANCEL]:  # noqa: ASYNC110 - a socket tells no event
                await asyncio.sleep(0.01)


async def test_answers_without_a_number_are_not_trusted() -> None:
    async with scripted([encode(Kind.REPLY, 1, Echoed("x"))], []) as client:
        with pytest.raises(PeerLost):
            await client.call(Echo("x"), Echoed, within_s=5)


@only_tcp
async def test_a_web_browser_is_no_trouble(world: World) -> None:
    host, port = world.server.address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(1000))
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            await reader.read()  # until the other side hangs up
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert await echoes(world.client)


@only_tcp
async def test_a_frame_too_large_breaks_its_own_connection_only(world: World) -> None:
    async with Client(world.transport, world.server.address) as other:
        with pytest.raises(PeerLost):
            await other.call(Echo("x"), Echoed, bytes(FRAME_BYTES_MAX + 1), within_s=5)
        assert await echoes(world.client)
        assert await echoes(other)


@only_tcp
async def test_open_calls_are_bounded(world: World) -> None:
    async with raw_dealer(world.server.address) as socket:
        for number in range(CALLS_MAX + 1):
            await socket.send_multipart([encode(Kind.CALL, number, Hang(), 30.0)])
        kind, call, tag, _ = await answer_of(socket)
        assert (kind, call, tag) == (Kind.ERROR, CALLS_MAX, "busy")
        assert world.server.calls == CALLS_MAX
        with pytest.raises(RemoteError, match="calls are open"):
            await world.client.call(Echo("x"), Echoed, within_s=2)
        await socket.send_multipart([encode(Kind.CANCEL, 0)])
        await world.service.until(lambda: world.service.cancelled == 1)
        assert await echoes(world.client)


@only_tcp
async def test_a_silent_clients_calls_are_cancelled_and_a_patient_ones_are_not(world: World) -> None:
    patient = asyncio.create_task(world.client.call(Hang(), Echoed, within_s=30))
    await world.service.until(lambda: world.service.hanging == 1)
    async with raw_dealer(world.server.address) as socket:
        await socket.send_multipart([encode(Kind.CALL, 1, Hang(), 30.0)])
        await world.service.until(lambda: world.service.hanging == 2)
        await world.service.until(lambda: world.service.cancelled == 1, within_s=SILENT_S + 3)
        header, _ = decode([bytes(frame) for frame in await socket.recv_multipart()])
        assert (header.kind, header.call, header.tag) == (
            Kind.ERROR,
            1,
            Abandoned.kind,
        )
    assert world.server.calls == 1
    assert not patient.done()
    patient.cancel()
    await asyncio.gather(patient, return_exceptions=True)


@only_tcp
async def test_a_call_whose_deadline_is_over_is_cancelled_though_its_caller_does_not_say_so(world: World) -> None:
    async with raw_dealer(world.server.address) as socket:
        await socket.send_multipart([encode(Kind.CALL, 1, Hang(), 0.1)])
        await world.service.until(lambda: world.service.cancelled == 1, within_s=SILENT_S - 1)
        kind, call, tag, _ = await answer_of(socket)
        assert (kind, call, tag) == (Kind.ERROR, 1, Abandoned.kind)
    assert world.server.calls == 0


async def test_stopping_the_server_cancels_its_calls() -> None:
    transport, service = ZmqTransport(), Service()
    server = serve(transport, "tcp://127.0.0.1:0", service)
    try:
        async with Client(transport, server.address) as client:
            async with running(server):
                task = asyncio.create_task(client.call(Hang(), Echoed, within_s=5))
                await service.until(lambda: service.hanging == 1)
            assert (service.cancelled, server.calls) == (1, 0)
            with pytest.raises(PeerLost):
                await task
    finally:
        transport.close()


@only_tcp
async def test_closing_a_client_is_whole_even_if_whoever_closes_it_is_cancelled(world: World) -> None:
    client = Client(world.transport, world.server.address).start()
    call = asyncio.create_task(client.call(Hang(), Echoed, within_s=30))
    await world.service.until(lambda: world.service.hanging == 1)
    closing = asyncio.create_task(client.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(2):
        with pytest.raises(PeerLost, match="closed"):
            await call
        await asyncio.gather(*client._tasks, return_exceptions=True)
