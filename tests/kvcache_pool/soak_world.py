"""A pool of real services in one process, with a life of its own: what it consists of dies and comes again."""

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvcache_pool.announcing import announce, place_of
from kvcache_pool.api import DirectoryLink, Stats
from kvcache_pool.index import Index
from kvcache_pool.segment import SHM, Geometry, Segment
from kvcache_pool.segment_service import SegmentService
from kvcache_pool.service import DirectoryService
from kvcache_pool.slots import Shares
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.ids import SegmentId
from protocol.instance import new_incarnation
from protocol.message import Message
from protocol.rpc import Handler, Server
from protocol.tasks import together
from protocol.transport import Port
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import HOST, LAYOUT
from tests.kvcache_pool.faults import Faults, FaultyMover
from tests.kvcache_pool.flaky import FlakyTransport, Odds
from tests.kvcache_pool.soak_client import SoakClient, Tally, bytes_of

ODDS = Odds(lost=0.002, doubled=0.01, delayed=0.02)
BIND_S = 10.0
REST_S = 150.0
"""Leases of 20 s, their quarantine of 30 s, and a segment's 3 s of silence; with much to spare."""


@dataclass
class World:
    """One directory, a segment for each of `slots`, and `clients` of them, in `folder` for sockets."""

    seed: int
    folder: Path
    slots: tuple[int, ...]
    clients: int
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}/{self.slots}/faults")
        self.zmq = ZmqTransport()
        self.names = [SegmentId(f"soak-{number}") for number in range(len(self.slots))]
        self.segments: dict[SegmentId, Segment] = {}
        self.lives: dict[SegmentId, tuple[asyncio.Task[None], FlakyTransport]] = {}
        self.index = Index()
        self.over = False

    def address(self, name: str) -> str:
        return f"ipc://{self.folder}/{len(self.slots)}-{self.slots[0]}-{name}"

    def _process(self) -> FlakyTransport:
        """The network as one process sees it."""
        return FlakyTransport(self.zmq, ODDS, random.Random(self.rng.random()))

    async def _bind(self, name: str) -> Port:
        """A socket that was closed lets go of its address a little later."""
        async with asyncio.timeout(BIND_S):
            while True:
                with contextlib.suppress(OSError):
                    return self.zmq.bind(self.address(name))
                await asyncio.sleep(0.05)

    async def _directory(self) -> None:
        """One life of the directory, until cancelled."""
        self.index = Index(Shares(copies=0.5), generation=time.time_ns())
        service = DirectoryService(self.index)
        await self._serve("directory", service.handlers(), service.sweep())

    async def _serve(
        self, name: str, handlers: dict[type[Message], Handler], loop: Coroutine[Any, Any, None]
    ) -> None:
        try:
            port = await self._bind(name)
        except BaseException:
            loop.close()
            raise
        await together([Server(port, handlers).serve(), loop])

    async def _segment(self, name: SegmentId, slots: int, transport: FlakyTransport) -> None:
        """One life of a segment, until cancelled."""
        segment = Segment(name, new_incarnation(), Geometry(LAYOUT, slots), SHM)
        try:
            self.segments[name] = segment
            service = SegmentService(segment)
            place = place_of(segment, self.address(name), HOST)
            told = announce(segment, place, transport, lambda: self.address("directory"))
            try:
                await self._serve(name, service.handlers(), told)
            finally:
                service.close()
        finally:
            segment.close()

    def _start(self, name: SegmentId) -> None:
        transport = self._process()
        slots = self.slots[self.names.index(name)]
        self.lives[name] = asyncio.create_task(self._segment(name, slots, transport)), transport

    async def _kill(self, name: SegmentId) -> None:
        task, transport = self.lives[name]
        transport.cut = self.rng.random() < 0.7  # else it says goodbye
        await ended(task)

    async def _trouble(self) -> None:
        """What goes wrong, one after the other, until cancelled."""
        while True:
            await asyncio.sleep(4.0 + 16.0 * self.rng.random())
            what, name = (
                self.rng.choice(["kill", "kill", "restart", "directory", "silence"]),
                self.rng.choice(self.names),
            )
            self.tally.troubles += 1
            self.tally.counts[f"trouble: {what}"] += 1
            if what == "directory":
                await ended(self.directory)
                await asyncio.sleep(self.rng.random() * 2.0)
                self.directory = asyncio.create_task(self._directory())
            elif what == "silence":  # given up, it joins again; its bytes are still there
                self.lives[name][1].cut = True
                await asyncio.sleep(self.rng.random() * 6.0)
                self.lives[name][1].cut = False
            else:
                await self._kill(name)
                await asyncio.sleep(self.rng.random() * 5.0 if what == "kill" else 0.0)
                self._start(name)
            await asyncio.sleep(5.0)  # until all have joined again, and been told of
            self.tally.troubles += 1

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/{self.slots}/{number}")
        transport = self._process()
        reach = (Reach.SHM, Reach.TCP, Reach.AUTO)[number % 3]
        faults = Faults(
            read_delay_s={1: 0.3} if number % 4 == 3 else {},
            write_delay_s={2: 0.3} if number % 4 == 3 else {},
            repeated_writes=frozenset(rng.sample(range(10**4), 300)),
        )
        mover = FaultyMover(PoolMover(transport, HOST, reach), faults)
        link = DirectoryLink(transport)
        try:
            await link.follow(self.address("directory"))
            await SoakClient(link, mover, rng, self.names, self.tally).run(lambda: self.over)
        finally:
            await link.aclose()
            await mover.aclose()

    async def run(self, seconds: float) -> Stats:
        """Soak for so long, of the loop's time; then come to rest. The counts when all is at rest."""
        self.directory = asyncio.create_task(self._directory())
        for name in self.names:
            self._start(name)
        trouble = asyncio.create_task(self._trouble())
        clients = [asyncio.create_task(self._client(number)) for number in range(self.clients)]
        try:
            await asyncio.wait([trouble, *clients], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self.over = True
            await asyncio.gather(*clients)
            await self._finish(trouble)
            return await self._rest()
        finally:
            for task in (trouble, *clients, *(task for task, _ in self.lives.values()), self.directory):
                await ended(task)
            self.zmq.close()

    async def _finish(self, trouble: asyncio.Task[None]) -> None:
        """No more trouble; whoever it left dead is started."""
        await ended(trouble)
        if self.directory.done():
            self.directory = asyncio.create_task(self._directory())
        for name, (task, transport) in list(self.lives.items()):
            transport.cut, transport.odds = False, Odds()
            if task.done():
                self._start(name)

    async def _rest(self) -> Stats:
        async with asyncio.timeout(REST_S):
            while not at_rest(self.index.stats(), sum(self.slots)):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        self.index.check()
        self.read_all()
        stats = self.index.stats()
        assert self.index.clear() == stats.cached
        self.index.check()
        assert self.index.stats().free == stats.total
        return stats

    def read_all(self) -> None:
        """Every block that is offered is there, in all layers, with the bytes of its name."""
        out = np.empty(LAYOUT.run_bytes, np.uint8)
        for name, place, grant in self.index.named():
            segment = self.segments[place.segment]
            assert segment.incarnation == place.incarnation
            for layer in range(LAYOUT.layers):
                segment.memory.get(layer, grant.slot, grant.generation, out)
                assert np.array_equal(out, bytes_of(name)[layer])


def at_rest(stats: Stats, total: int) -> bool:
    counts = (stats.total, stats.leases, stats.leased, stats.reserved, stats.free + stats.cached)
    return counts == (total, 0, 0, 0, total)


async def ended(task: asyncio.Task[None]) -> None:
    """Cancelled, and over. What it raised is raised."""
    task.cancel()
    await asyncio.wait([task])  # not the task itself: its cancellation would hide that of who waits
    if not task.cancelled():
        task.result()
