"""B46: what strangers send to the pool's sockets, and a client that reads nothing. The others notice nothing."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgpack
import psutil
import pytest
import zmq
import zmq.asyncio

from kvcache_pool.api import GetStats, ReadLayer
from protocol.cluster import PROTOCOL_VERSION
from protocol.frames import Kind, encode
from protocol.zmq_transport import FRAME_BYTES_MAX, QUEUE_FRAMES_MAX
from tests.kvcache_pool.builders import Pool, a_pool, an_ask, names

MEMORY_MAX = 96 << 20
"""Bytes that guests may cost this process for a while: far less than the largest thing that they send."""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 6) as pool:
        yield pool


@asynccontextmanager
async def a_guest(address: str, **limits: int) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket of ZeroMQ's without any of our manners."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    for name, value in limits.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close(0)
        context.destroy(linger=0)


async def works(pool: Pool, number: int) -> None:
    """A block goes in and is found, within its deadline."""
    async with asyncio.timeout(5.0):
        lease = await pool.directory.acquire(an_ask(names(number)))
        await pool.directory.commit(lease.lease, [0], names(number)) if lease.targets else None
        await pool.directory.release(lease.lease)
        assert (await pool.directory.lookup(names(number))).reach == 1


async def test_a_client_that_reads_nothing_costs_the_others_nothing(pool: Pool) -> None:
    pool.segments[0].memory.claim(0, 1)
    large = ReadLayer(0, [0] * 8, [1] * 8)
    async with a_guest(pool.address, RCVHWM=1, RCVBUF=4096) as guest:
        for number in range(1, 2 * QUEUE_FRAMES_MAX):
            message = large if number % 8 else GetStats()
            await guest.send_multipart([encode(Kind.CALL, number, message, 5.0)])
            if number % 1000 == 0:
                await works(pool, number)
    await works(pool, 1)
    assert (await pool.directory.stats()).leases == 0


def a_pickle(marker: Path) -> bytes:
    """What would make a file, were it unpickled. Written out: nobody here imports the module."""
    path = str(marker).encode()
    call = b"cbuiltins\nopen\n(V" + path + b"\nVw\ntR."
    return call


def frames_of_strangers(marker: Path) -> list[list[bytes]]:
    whole = encode(Kind.CALL, 1, an_ask(names(1)), 5.0)
    acquire = msgpack.unpackb(whole)
    wrong = [
        {**acquire[5], "blocks": "text"},
        {**acquire[5], "blocks": [1, 2]},
        {**acquire[5], "lease": None},
        {**acquire[5], "reuse": 1.5},
        {**acquire[5], "lease_s": "long"},
        {**acquire[5], "more": 1},
        {},
        [],
        None,
    ]
    headers = [msgpack.packb([PROTOCOL_VERSION, 1, 2, 5.0, "Acquire", fields]) for fields in wrong]
    grants = msgpack.packb([PROTOCOL_VERSION, 1, 2, 5.0, "Discard", {"grants": [["kv-0", 0], ["kv-0", 0, 1, 2]]}])
    return [
        [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"],
        [os.urandom(100)],
        [os.urandom(50) for _ in range(20)],
        *([whole[:cut]] for cut in range(0, len(whole), 7)),
        *([header] for header in headers),
        [grants],
        [a_pickle(marker)],
        [whole[:-1] + a_pickle(marker)],
        [msgpack.packb([PROTOCOL_VERSION, 1, 2, 5.0, "Acquire", msgpack.ExtType(1, a_pickle(marker))])],
        [b"\xdd\xff\xff\xff\xff"],  # a list of four billion entries
        [b"\xdf\xff\xff\xff\xff"],
        [b"\xc6\xff\xff\xff\xff"],
    ]


async def test_frames_of_strangers_are_dropped_and_change_nothing(pool: Pool, tmp_path: Path) -> None:
    await works(pool, 1)
    before = await pool.directory.stats()
    marker, memory = tmp_path / "marker", psutil.Process().memory_info().rss
    async with a_guest(pool.address) as guest:
        for frames in frames_of_strangers(marker):
            await guest.send_multipart(frames)
        for number in (11, 12):
            await guest.send_multipart([encode(Kind.CALL, number, GetStats(), 5.0)])
        async with asyncio.timeout(5.0):
            while msgpack.unpackb((await guest.recv_multipart())[0])[:3] != [PROTOCOL_VERSION, Kind.REPLY, 12]:
                pass  # what was refused by name is answered so
    await works(pool, 2)
    assert not marker.exists()
    after = await pool.directory.stats()
    assert (after.leases, after.reserved, after.cached) == (before.leases, before.reserved, before.cached + 1)
    assert psutil.Process().memory_info().rss - memory < MEMORY_MAX


async def test_plain_bytes_and_a_frame_too_large_are_cut_off(pool: Pool) -> None:
    """On the bare connection: HTTP; and ZeroMQ's own greeting, then a frame of 200 MB."""
    host, port = pool.address.removeprefix("tcp://").rsplit(":", 1)
    memory = psutil.Process().memory_info().rss
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * 1000)
    await works(pool, 1)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    async with a_guest(pool.address) as guest:
        size = 200_000_000
        assert size > FRAME_BYTES_MAX
        large = b"\0" * size
        await guest.send_multipart([large], copy=False)
        del large
        await works(pool, 2)
    await works(pool, 3)
    assert psutil.Process().memory_info().rss - memory < MEMORY_MAX + size  # ours, as the sender of it


LISTENERS = """
import asyncio, json, sys, tempfile
from pathlib import Path
import psutil
from tests.kvcache_pool.builders import a_pool
from kvcache_pool.config import KVCacheConfig

async def main():
    with tempfile.TemporaryDirectory() as folder:
        async with a_pool(Path(folder), 4, listen=KVCacheConfig.listen):
            found = psutil.Process().net_connections(kind="inet")
            addresses = [one.laddr[0] for one in found if one.status == psutil.CONN_LISTEN]
            sys.stdout.write(json.dumps(addresses))

asyncio.run(main())
"""


async def test_by_default_nothing_listens_beyond_loopback() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LISTENERS, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(process.communicate(), 30.0)
    listening = json.loads(said)
    assert set(listening) == {"127.0.0.1"}
