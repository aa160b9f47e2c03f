"""Streams of KV: who may use them, what is refused, and what a broken or silent one costs."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.api import Grant, Lease, OpenStream, Priority, Stale, StreamPort
from kvcache_pool.segment import checksum
from kvcache_pool.segment_service import SegmentService
from kvcache_pool.streams import CONNECTIONS_MAX, Streams
from kvcache_pool.transfer.copiers import HOP_BYTES, INLINE_BYTES, Copiers
from kvcache_pool.transfer.copies import Span
from kvcache_pool.transfer.mover import PoolMover, Reach
from kvcache_pool.transfer.stream import StreamRoute, stream_host
from kvcache_pool.transfer.tcp import TcpRoute
from kvcache_pool.transfer.wire import ANSWER, ASK, GRANT, MAGIC, TOKEN_BYTES, Answer, Ask, Status, first, past
from protocol.blocks import BlockLayout
from protocol.errors import BadMessage, PeerLost
from protocol.rpc import Client, Server
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import LAYOUT, Pool, a_place, a_pool, a_segment, an_ask, random_runs

LARGE = BlockLayout(1, 8, 128, 64, "float32")
"""Runs of half a MiB: four are too many for the event loop, and one hop."""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 12) as pool:
        yield pool


async def a_lease(pool: Pool, unnamed: int = 6) -> Lease:
    return await pool.directory.acquire(an_ask([], unnamed=unnamed))


@contextmanager
def connected(port: StreamPort, opening: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port.port), timeout=5.0) as sock:
        sock.sendall(opening)
        yield sock


def has_ended(sock: socket.socket) -> bool:
    """What was sent and never read makes the end a reset."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def cut(streams: Streams) -> None:
    """End all connections; one whose other side was faster has ended already."""
    for sock in streams.connections:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def streams_of(folder: Path) -> Iterator[tuple[Streams, StreamPort]]:
    segment = a_segment(4, "streamed", folder)
    segment.memory.put(1, 2, 7, random_runs(1)[0])
    streams = Streams(segment.memory, "127.0.0.1")
    try:
        yield streams, streams.port()
    finally:
        streams.close()
        segment.close()


def test_who_does_not_show_the_token_is_not_served(tmp_path: Path) -> None:
    ask = ASK.pack(False, 1, 1, 1) + GRANT.pack(2, 7)
    with streams_of(tmp_path) as (_, port):
        with connected(port, MAGIC + port.token + ask) as sock:
            assert Answer.unpack(sock.recv(ANSWER.size, socket.MSG_WAITALL), 1) == Answer(Status.GOOD, 1)
        for opening in (MAGIC + bytes(TOKEN_BYTES), b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n"):
            with connected(port, opening + ask) as sock:
                assert has_ended(sock)


@pytest.mark.parametrize(
    ("write", "first_layer", "width", "units", "says"),
    [
        (False, 3, 1, 1, "3 layers"),
        (True, 0, 4, 1, "3 layers"),
        (False, 1, 0, 1, "3 layers"),
        (False, 2**32 - 1, 2, 1, "3 layers"),
        (True, 0, 1, 0, "0 slots"),
        (True, 0, 3, 2**32 - 1, "in one ask"),
    ],
)
def test_an_ask_of_another_shape_ends_the_connection(
    tmp_path: Path, write: bool, first_layer: int, width: int, units: int, says: str
) -> None:
    with streams_of(tmp_path) as (_, port):
        ask = ASK.pack(write, first_layer, width, units)
        with connected(port, MAGIC + port.token + ask) as sock:
            head = sock.recv(ANSWER.size, socket.MSG_WAITALL)
            answer = Answer.unpack(head, 0)
            assert answer.status is Status.REFUSED
            assert says in answer.text
            assert has_ended(sock)


def test_a_generation_that_no_directory_gives_is_refused(tmp_path: Path) -> None:
    with streams_of(tmp_path) as (_, port), connected(port, MAGIC + port.token) as sock:
        sock.sendall(ASK.pack(True, 1, 1, 1) + GRANT.pack(2, 2**64 - 1))
        assert Answer.unpack(sock.recv(ANSWER.size, socket.MSG_WAITALL), 1).status is Status.REFUSED


def test_a_write_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    run = random_runs(1, seed=5)[0]
    segment = a_segment(4, "streamed", tmp_path)
    segment.memory.put(1, 2, 7, random_runs(1)[0])
    before = [
        table.copy() for table in (segment.memory.runs, segment.memory.generations, segment.memory.checksums)
    ]
    streams = Streams(segment.memory, "127.0.0.1")
    port = streams.port()
    try:
        with connected(port, MAGIC + port.token) as sock:
            for slot, generation, status in ((2, 6, Status.STALE), (9, 9, Status.STALE), (2, 9, Status.CORRUPT)):
                wrong = checksum(run, generation) ^ (status is Status.CORRUPT)
                sock.sendall(ASK.pack(True, 1, 1, 1) + GRANT.pack(slot, generation) + struct.pack("<Q", wrong))
                sock.sendall(run)
                assert Answer.unpack(sock.recv(ANSWER.size, socket.MSG_WAITALL), 1).status is status
            after = (segment.memory.runs, segment.memory.generations, segment.memory.checksums)
            assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
            sock.sendall(ASK.pack(True, 1, 1, 1) + GRANT.pack(2, 9) + struct.pack("<Q", checksum(run, 9)))
            sock.sendall(run)
            assert Answer.unpack(sock.recv(ANSWER.size, socket.MSG_WAITALL), 1) == Answer(Status.GOOD, 1)
            assert np.array_equal(segment.memory.runs[2, 1], run)
    finally:
        streams.close()
        segment.close()


def test_closing_ends_connections_and_may_come_twice(tmp_path: Path) -> None:
    with streams_of(tmp_path) as (streams, port):
        with connected(port, MAGIC + port.token + ASK.pack(False, 1, 1, 1) + GRANT.pack(2, 7)) as sock:
            assert sock.recv(ANSWER.size, socket.MSG_WAITALL)
            streams.close()
            while sock.recv(1 << 20):
                pass
            streams.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.port), timeout=5.0)


@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["in the loop", "in threads"])
async def test_a_connection_that_has_ended_is_replaced(tmp_path: Path, layout: BlockLayout) -> None:
    service: SegmentService
    async with a_pool(tmp_path, 6, layout=layout) as pool:
        service = pool.services[0]
        lease = await a_lease(pool, 4)
        mover = PoolMover(pool.transport, "elsewhere", Reach.TCP)
        mover.know(lease.places)
        try:
            source, out = random_runs(4, layout=layout), np.zeros((4, layout.run_bytes), np.uint8)
            await mover.write(0, lease.targets, source, range(4), Priority.STORE)
            cut(service.streams)
            assert await mover.read(0, lease.targets, out, range(4), Priority.LOAD) == 4
            assert np.array_equal(out, source)
            cut(service.streams)
            await mover.write(0, lease.targets, source, range(4), Priority.STORE)
        finally:
            await mover.aclose()


async def test_hops_that_find_no_stream_any_more_go_by_the_service(tmp_path: Path) -> None:
    async with a_pool(tmp_path, 14, layout=LARGE) as pool:
        lease = await a_lease(pool, 12)
        mover = PoolMover(pool.transport, "elsewhere", Reach.TCP)
        mover.know(lease.places)
        source, out = random_runs(12, layout=LARGE), np.zeros((12, LARGE.run_bytes), np.uint8)
        assert source.nbytes > 2 * HOP_BYTES
        try:
            await mover.write(0, lease.targets, source, range(12), Priority.STORE)
            await asyncio.to_thread(pool.services[0].streams.close)
            assert await mover.read(0, lease.targets, out, range(12), Priority.LOAD) == 12
            assert np.array_equal(out, source)
            await mover.write(0, lease.targets, source[::-1].copy(), range(12), Priority.STORE)
            assert await mover.read(0, lease.targets, out, range(12), Priority.LOAD) == 12
            assert np.array_equal(out, source[::-1])
        finally:
            await mover.aclose()


async def test_where_no_stream_is_taken_the_service_carries_the_runs(tmp_path: Path) -> None:
    segment = a_segment(4, "kv", tmp_path)
    nowhere = SegmentService(
        segment, "tcp://203.0.113.1:1"
    )  # an address of no interface: nothing can listen there
    transport = ZmqTransport()
    server = Server(transport.bind("tcp://127.0.0.1:0"), nowhere.handlers())
    serving = asyncio.create_task(server.serve())
    mover = PoolMover(transport, "elsewhere")
    try:
        async with Client(transport, server.address) as client:
            with pytest.raises(Exception, match="streams cannot be taken"):
                await client.call(OpenStream(), StreamPort, within_s=5.0)
        place = replace(a_place("kv", 4), address=server.address)
        mover.know([place])
        grants = [Grant(place.segment, slot, 1) for slot in range(4)]
        source, out = random_runs(4), np.zeros((4, LAYOUT.run_bytes), np.uint8)
        await mover.write(0, grants, source, range(4), Priority.STORE)
        assert await mover.read(0, grants, out, range(4), Priority.LOAD) == 4
        assert np.array_equal(out, source)
    finally:
        await mover.aclose()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        nowhere.close()
        segment.close()
        transport.close()


@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["in the loop", "in threads"])
async def test_a_cancelled_read_of_a_silent_segment_ends_at_once(tmp_path: Path, layout: BlockLayout) -> None:
    async with a_pool(tmp_path, 6, layout=layout) as pool:
        lease = await a_lease(pool, 4)
        mover = PoolMover(pool.transport, "elsewhere", Reach.TCP)
        mover.know(lease.places)
        source, out = random_runs(4, layout=layout), np.zeros((4, layout.run_bytes), np.uint8)
        await mover.write(0, lease.targets, source, range(4), Priority.STORE)
        streams = pool.services[0].streams
        with socket.create_server(("127.0.0.1", 0)) as silent:  # whoever connects there is never answered
            cut(streams)
            route = mover._routes[lease.targets[0].segment]
            real, route._port = route._port, StreamPort(silent.getsockname()[1], bytes(TOKEN_BYTES))  # type: ignore[attr-defined]
            reading = asyncio.create_task(mover.read(0, lease.targets, out, range(4), Priority.LOAD))
            await asyncio.sleep(0.2)
            assert not reading.done()
            reading.cancel()
            async with asyncio.timeout(2.0):
                await asyncio.gather(reading, return_exceptions=True)
            assert reading.cancelled()
        route._port = real  # type: ignore[attr-defined]
        try:
            assert await mover.read(0, lease.targets, out, range(4), Priority.LOAD) == 4
            assert np.array_equal(out, source)
        finally:
            await mover.aclose()


async def test_what_a_segment_refuses_is_heard_and_the_connection_stays(pool: Pool) -> None:
    lease = await a_lease(pool)
    mover = PoolMover(pool.transport, "elsewhere", Reach.TCP)
    mover.know(lease.places)
    try:
        source = random_runs(6)
        await mover.write(0, lease.targets, source, range(6), Priority.STORE)
        before = set(pool.services[0].streams.connections)
        old = [grant._replace(generation=grant.generation - 1) for grant in lease.targets]
        with pytest.raises(Stale, match="generation"):
            await mover.write(0, old, source, range(6), Priority.STORE)
        assert await mover.read(0, old, source.copy(), range(6), Priority.LOAD) == 0
        assert set(pool.services[0].streams.connections) == before
    finally:
        await mover.aclose()


def test_the_host_of_streams_is_the_services() -> None:
    assert stream_host("tcp://10.0.0.5:8003") == "10.0.0.5"
    assert stream_host("tcp://[::1]:0") == "::1"
    assert stream_host("ipc:///run/x") == stream_host("") == "127.0.0.1"


def test_views_are_cut_by_bytes() -> None:
    views = [memoryview(b"abc"), memoryview(b"de"), memoryview(b"fgh")]
    whole = b"abcdefgh"
    for count in range(9):
        assert b"".join(past(views, count)) == whole[count:]
        assert b"".join(first(views, count)) == whole[:count]


def test_heads_that_lie_are_refused() -> None:
    with pytest.raises(BadMessage):
        Answer.unpack(ANSWER.pack(9, 0, b""), 1)
    with pytest.raises(BadMessage):
        Answer.unpack(ANSWER.pack(0, 2, b""), 1)
    assert Ask.unpack(ASK.pack(False, 0, 1, 4), 3, HOP_BYTES // 4).units == 4
    with pytest.raises(BadMessage):
        Ask.unpack(ASK.pack(False, 0, 1, 5), 3, HOP_BYTES // 4)
    assert INLINE_BYTES < 4 * LARGE.run_bytes <= HOP_BYTES


async def test_who_finds_no_stream_left_is_served_by_the_service(pool: Pool) -> None:
    lease = await a_lease(pool, 3)
    async with Client(pool.transport, pool.address) as client:
        port = await client.call(OpenStream(), StreamPort, within_s=5.0)
    mover = PoolMover(pool.transport, "elsewhere", Reach.TCP)
    mover.know(lease.places)
    source, out = random_runs(3), np.zeros((3, LAYOUT.run_bytes), np.uint8)
    with ExitStack() as strangers:
        for _ in range(CONNECTIONS_MAX):
            strangers.enter_context(connected(port, MAGIC + port.token))
        async with asyncio.timeout(20.0):
            await mover.write(0, lease.targets, source, [0, 1, 2], Priority.STORE)
            assert await mover.read(0, lease.targets, out, [0, 1, 2], Priority.LOAD) == 3
    assert np.array_equal(out, source)
    await mover.aclose()


async def test_a_way_that_is_closed_under_a_read_ends_it(pool: Pool) -> None:
    """And does not hold the event loop: the segment's side may be silent for long."""
    lease = await a_lease(pool, 3)
    silent = socket.create_server(("127.0.0.1", 0))
    service = TcpRoute(lease.places[0], Copiers(), pool.transport)
    route = StreamRoute(lease.places[0], service)
    route._port = StreamPort(silent.getsockname()[1], bytes(TOKEN_BYTES))
    units = np.zeros((3, 1, LAYOUT.run_bytes), np.uint8)
    reading = asyncio.create_task(route.read(Span(0, 1), lease.targets, units, [0, 1, 2], Priority.LOAD))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(5.0):
        await route.aclose()
        with pytest.raises(PeerLost):
            await reading
    silent.close()
