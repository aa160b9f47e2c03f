"""Small builders for the pool's tests: names of blocks, places, and a pool of real services in this process."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvcache_pool.announcing import announce, place_of
from kvcache_pool.api import Acquire, Announce, Announced, Directory, Lease, Note, Place, new_lease
from kvcache_pool.events import Recorder
from kvcache_pool.geometry import Geometry
from kvcache_pool.index import Index
from kvcache_pool.segment import SHM, Bytes, Segment
from kvcache_pool.segment_service import SegmentService
from kvcache_pool.service import DirectoryService
from kvcache_pool.slots import DEFAULT_SHARES, Shares
from kvcache_pool.transfer.mooncake_engine import MooncakeSettings
from protocol.blocks import BlockLayout
from protocol.ids import NO_TENANT, BlockHash, Incarnation, SegmentId, TenantId
from protocol.rpc import Client, Server
from protocol.zmq_transport import ZmqTransport

LAYOUT = BlockLayout(layers=3, kv_heads=2, head_dim=16, block_tokens=16, kv_type="bfloat16")
"""Runs of 2,048 bytes."""

HOST = "here"
incarnations = itertools.count()


def names(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(32, "big")) for number in numbers]


def a_place(segment: str = "kv", slots: int = 4, incarnation: str = "a", layout: BlockLayout = LAYOUT) -> Place:
    return Place(SegmentId(segment), Incarnation(incarnation), "tcp://nowhere", HOST, "", slots, layout)


class Blank:
    """A segment that notes nothing down, and says that it has."""

    generation = 0
    draining = False

    def note(self, note: Note) -> None:
        pass

    def noted(self) -> list[Note]:
        return []


def an_index(
    *,
    copies_share: float = 0.5,
    hard_pins_share: float = 0.5,
    eviction: str = "lru",
    watermark: float = 1.0,
    watermark_step: float = 0.05,
    tenant_share: float = 1.0,
    recorder: Recorder | None = None,
    **slots: int,
) -> Index:
    """With these segments."""
    shares = Shares(copies_share, hard_pins_share, eviction, watermark, watermark_step, tenant_share)
    index = Index(shares, recorder=recorder)
    for segment, count in (slots or {"kv": 4}).items():
        index.announce(a_place(segment, count), 0, 0.0)
    return index


def an_ask(
    blocks: list[BlockHash],
    *,
    unnamed: int = 0,
    near: str | None = None,
    lease_s: float = 30.0,
    reuse: int = 10**6,
    copies: int = 0,
    moves: bool = False,
    tenant: TenantId = NO_TENANT,
) -> Acquire:
    home = None if near is None else SegmentId(near)
    return Acquire(new_lease(), "request", blocks, reuse, unnamed, home, lease_s, copies, moves, tenant)


def cache(
    index: Index, *numbers: int, now: float = 0.0, near: str | None = None, tenant: TenantId = NO_TENANT
) -> Lease:
    """As a request does: lease, write, commit, release. Returns the lease that was."""
    blocks = names(*numbers)
    lease = index.acquire(an_ask(blocks, near=near, tenant=tenant), now)
    done = len(lease.sources)
    index.commit(lease.lease, list(range(len(lease.targets))), blocks[done:], now)
    index.release(lease.lease)
    return lease


def copy(
    index: Index,
    *numbers: int,
    near: str,
    copies: int = 10**6,
    now: float = 0.0,
    tenant: TenantId = NO_TENANT,
) -> Lease:
    """As a request does that finds its blocks, and copies to `near` what it lacks. Returns the lease that was."""
    blocks = names(*numbers)
    lease = index.acquire(an_ask(blocks, near=near, copies=copies, tenant=tenant), now)
    slots = range(len(lease.targets), len(lease.targets) + len(lease.copies))
    index.commit(lease.lease, list(slots), [blocks[one.source] for one in lease.copies], now)
    index.release(lease.lease)
    return lease


def random_runs(count: int, seed: int = 0, layout: BlockLayout = LAYOUT) -> Bytes:
    """[count, run_bytes]"""
    return np.random.default_rng(seed).integers(0, 256, (count, layout.run_bytes), dtype=np.uint8)


def a_segment(slots: int = 4, segment: str = "test", folder: Path = SHM, layout: BlockLayout = LAYOUT) -> Segment:
    """In its own life, so that tests never meet."""
    incarnation = Incarnation(f"test{next(incarnations)}")
    return Segment(SegmentId(segment), incarnation, Geometry(layout, slots), folder)


@dataclass
class Pool:
    """One directory, some segments, and how a client sees them."""

    transport: ZmqTransport
    address: str
    directory: Directory
    segments: list[Segment]
    index: Index
    services: list[SegmentService]

    def place(self, number: int = 0) -> Place:
        return place_of(self.segments[number], self.address, HOST)


@asynccontextmanager
async def a_pool(
    folder: Path,
    *slots: int,
    listen: str = "tcp://127.0.0.1:0",
    layout: BlockLayout = LAYOUT,
    generation: int = 0,
    mooncake: MooncakeSettings | None = None,
    shares: Shares = DEFAULT_SHARES,
) -> AsyncIterator[Pool]:
    """Real services and sockets. The first segment's bytes are served at the directory's address too."""
    async with AsyncExitStack() as stack:
        transport = ZmqTransport()
        stack.callback(transport.close)
        segments = [a_segment(count, f"kv-{number}", folder, layout) for number, count in enumerate(slots or (8,))]
        for segment in segments:
            stack.callback(segment.close)
        index = Index(shares, generation=generation)
        directory, service = DirectoryService(index), SegmentService(segments[0], listen, mooncake)
        stack.callback(service.close)
        server = Server(transport.bind(listen), {**directory.handlers(), **service.handlers()})
        client = Client(transport, server.address)
        tasks = [asyncio.create_task(loop) for loop in (server.serve(), directory.sweep())]
        try:
            async with client, asyncio.timeout(60.0):
                pool = Pool(transport, server.address, Directory(client), segments, index, [service])
                for number, segment in enumerate(segments):  # in this order, which breaks ties between them
                    await client.call(Announce(pool.place(number), segment.generation), Announced, within_s=5.0)
                    loop = announce(segment, pool.place(number), transport, lambda: server.address)
                    tasks.append(asyncio.create_task(loop))
                yield pool
                index.check()
        finally:
            for task in reversed(tasks):  # goodbyes before the server ends
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
