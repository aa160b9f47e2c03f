"""The directory's index as a client of its service sees it, with the index's own methods."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvcache_pool.announcing import announce_once
from kvcache_pool.api import (
    Acquire,
    Announce,
    Announced,
    Directory,
    Done,
    Found,
    Goodbye,
    Grant,
    Lease,
    Place,
    Stats,
)
from kvcache_pool.service import DirectoryService
from protocol.ids import BlockHash, Incarnation, LeaseId, SegmentId
from protocol.rpc import Client, Server
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import Blank, a_place, an_index

CALL_S = 20.0

T = TypeVar("T")


class Served:
    """Owns a directory, its segments' announcements, a client, and the loop that all of them run in, which goes on
    only while a method waits. Nobody sweeps, so no segment is silent meanwhile."""

    def __init__(self, **slots: int) -> None:
        self._runner = asyncio.Runner()
        self._tasks: list[asyncio.Task[None]] = []
        self._places: dict[SegmentId, Place] = {}
        self._noted: dict[Place, int] = {}
        self._run(self._start(slots))

    async def _start(self, slots: dict[str, int]) -> None:
        self._transport = ZmqTransport()
        self._index = an_index(**slots)
        server = Server(self._transport.bind("tcp://127.0.0.1:0"), DirectoryService(self._index).handlers())
        self._client = Client(self._transport, server.address).start()
        self._directory = Directory(self._client)
        for segment, count in slots.items():
            self._places[SegmentId(segment)] = a_place(segment, count)
        self._tasks = [asyncio.create_task(server.serve()), asyncio.create_task(self._tell())]

    async def _tell(self) -> None:
        while True:
            for place in [*self._places.values()]:
                self._noted[place] = await announce_once(self._client, Blank(), place, self._noted.get(place, 0))
            await asyncio.sleep(0.005)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            return self._runner.run(asyncio.wait_for(call, CALL_S))
        finally:
            for task in self._tasks:
                if task.done() and not task.cancelled():
                    task.result()  # it ended only because it failed

    def find(self, blocks: list[BlockHash]) -> Found:
        return self._run(self._directory.lookup(blocks))

    def acquire(self, ask: Acquire, now: float) -> Lease:
        return self._run(self._directory.acquire(ask))

    def commit(self, lease: LeaseId, targets: list[int], blocks: list[BlockHash], now: float) -> None:
        self._run(self._directory.commit(lease, targets, blocks))

    def release(self, lease: LeaseId) -> None:
        self._run(self._directory.release(lease))

    def discard(self, grants: list[Grant]) -> None:
        self._run(self._directory.discard(grants))

    def remove(self, blocks: list[BlockHash]) -> int:
        return self._run(self._directory.remove(blocks))

    def clear(self) -> int:
        return self._run(self._directory.clear())

    def leave(self, segment: SegmentId, incarnation: Incarnation) -> None:
        del self._places[segment]
        self._run(self._client.call(Goodbye(segment, incarnation), Done, within_s=CALL_S))

    def announce(self, place: Place, generation: int, now: float) -> bool:
        answer = self._run(self._client.call(Announce(place, generation), Announced, within_s=CALL_S))
        self._places[place.segment] = place
        return answer.joined

    def stats(self) -> Stats:
        return self._run(self._directory.stats())

    def check(self) -> None:
        self._index.check()

    def close(self) -> None:
        self._run(self._stop())
        self._runner.close()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
        self._transport.close()
