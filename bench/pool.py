"""A pool in a process of its own: one segment, its directory and service, as a KVCache instance has them.

`python -m bench.pool` is that process. It needs no Conductor, since the layout is told to it, so that objects of
any size can be measured. It ends when its input is closed.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvcache_pool.announcing import place_of
from kvcache_pool.api import Acquire, Announce, Announced, Directory, Lease, new_lease
from kvcache_pool.geometry import Geometry
from kvcache_pool.index import Index
from kvcache_pool.segment import Segment
from kvcache_pool.segment_service import SegmentService
from kvcache_pool.service import DirectoryService
from kvcache_pool.transfer.mooncake_engine import MooncakeSettings
from protocol.blocks import BlockLayout
from protocol.ids import BlockHash, SegmentId
from protocol.instance import new_incarnation
from protocol.process import run_process
from protocol.rpc import Client, Server
from protocol.zmq_transport import ZmqTransport

LISTEN = "tcp://127.0.0.1:0"
MOONCAKE = MooncakeSettings() if MooncakeSettings().is_here() else None
"""Mooncake's engine, where it is installed."""
HOST = "bench"
LEASE_S = 600.0
"""Longer than any of these benchmarks."""

START_S = 60.0
STOP_S = 10.0


class PoolFailed(Exception):
    """The process did not come up."""


@dataclass(frozen=True)
class Pool:
    """A running pool, as its clients see it."""

    transport: ZmqTransport
    client: Client

    @property
    def address(self) -> str:
        """Of the directory."""
        return self.client.address

    @property
    def directory(self) -> Directory:
        return Directory(self.client)

    async def lease(self, blocks: list[BlockHash], unnamed: int = 0) -> Lease:
        """What is cached of `blocks`, and room for `unnamed` more; for longer than anything here takes."""
        reuse = len(blocks)
        ask = Acquire(new_lease(), "bench", blocks, reuse, unnamed, None, lease_s=LEASE_S)
        return await self.directory.acquire(ask)


@asynccontextmanager
async def pool(layout: BlockLayout, slots: int) -> AsyncIterator[Pool]:
    """Start one, with so many slots. Raises PoolFailed."""
    extents = [layout.layers, layout.kv_heads, layout.head_dim, layout.block_tokens, layout.kv_type]
    shape = {"layout": extents, "slots": slots}
    argv = [sys.executable, "-m", "bench.pool", json.dumps(shape)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise PoolFailed("the pool's process ended before it had begun; what it said is above")
        transport = ZmqTransport()
        try:
            async with Client(transport, address) as client:
                yield Pool(transport, client)
        finally:
            transport.close()
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _serve(layout: BlockLayout, slots: int) -> None:
    transport = ZmqTransport()
    segment = Segment(SegmentId("bench"), new_incarnation(), Geometry(layout, slots))
    service, directory = SegmentService(segment, LISTEN, MOONCAKE), DirectoryService(Index())
    try:
        server = Server(transport.bind(LISTEN), directory.handlers() | service.handlers())
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve())
            announcing = tasks.create_task(_announce(transport, segment, server.address))
            sys.stdout.write(f"{await announcing}\n")
            sys.stdout.flush()
            beat = tasks.create_task(_beat(transport, segment, server.address))
            await asyncio.to_thread(sys.stdin.read)
            serving.cancel()
            beat.cancel()
    finally:
        service.close()
        segment.close()
        transport.close()


async def _announce(transport: ZmqTransport, segment: Segment, address: str) -> str:
    async with Client(transport, address) as client:
        await client.call(Announce(place_of(segment, address, HOST), 0), Announced, within_s=5.0)
    return address


async def _beat(transport: ZmqTransport, segment: Segment, address: str) -> None:
    """The directory gives up what is silent; nobody sweeps here, so that nothing else runs while one measures."""
    while True:
        await asyncio.sleep(60.0)
        await _announce(transport, segment, address)


def main() -> None:
    """The process."""
    shape = json.loads(sys.argv[1])
    run_process(_serve(BlockLayout(*shape["layout"]), shape["slots"]))


if __name__ == "__main__":
    main()
