"""What was removed or cleared stays so: for who is killed just afterwards, for who was away, and for who joins."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvcache_pool.announcing import announce_once, place_of
from kvcache_pool.api import Announce, Announced, Directory, Note, Unconfirmed
from kvcache_pool.client import KVCachePool
from kvcache_pool.index import Index
from kvcache_pool.service import DirectoryService
from protocol.rpc import Client, Server
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import HOST, LAYOUT, a_segment, cache, names, random_runs
from tests.kvcache_pool.cluster import Cluster

BLOCKS = names(*range(1, 13))
EIGHT_BLOCKS = "96KiB"
"""Of LAYOUT: 8 KiB each, and the tables."""


async def brought(cluster: Cluster, lives: int) -> list[int]:
    """How many blocks the segments have brought in each catalogue, once there are so many."""
    told: list[int] = []

    def all_have() -> bool:
        lines = [line for line in cluster.said("kv-a").splitlines() if " brings " in line]
        told[:] = [int(line.split(" brings ")[1].split()[0]) for line in lines]
        return len(told) >= lives

    await cluster.until(all_have)
    return told


@pytest.mark.cluster
async def test_what_was_forgotten_is_not_there_after_a_kill_at_that_moment(tmp_path: Path) -> None:
    """First the whole pool is killed when it has rested, and is warm again: so that is what a kill leaves."""
    async with Cluster(tmp_path) as cluster:
        for name in ("kv-a", "kv-b"):
            cluster.start(name, "--size-bytes", EIGHT_BLOCKS)
        assert await brought(cluster, 2) == [0, 0]
        lives = 2
        async with KVCachePool.connect(cluster.conductor) as pool:
            total = (await pool.stats()).total
            assert len(BLOCKS) > total // 2, "it takes both segments"

            async def next_lives() -> list[int]:
                nonlocal lives
                cluster.kill("kv-a", "kv-b")
                for name in ("kv-a", "kv-b"):
                    cluster.start(name)
                lives += 2
                return (await brought(cluster, lives))[-2:]

            assert await pool.put(BLOCKS, random_runs(len(BLOCKS) * LAYOUT.layers)) == len(BLOCKS)
            await asyncio.sleep(1.2)  # noted
            assert sum(await next_lives()) == len(BLOCKS)
        async with KVCachePool.connect(cluster.conductor) as pool:
            assert all(await pool.exists(BLOCKS))
            assert await pool.remove(BLOCKS[1::2]) == len(BLOCKS) // 2
            assert sum(await next_lives()) == len(BLOCKS) // 2
        async with KVCachePool.connect(cluster.conductor) as pool:
            assert await pool.exists(BLOCKS) == [True, False] * (len(BLOCKS) // 2)
            assert await pool.clear() == len(BLOCKS) // 2
            assert await next_lives() == [0, 0]
        async with KVCachePool.connect(cluster.conductor) as pool:
            assert not any(await pool.exists(BLOCKS))


@pytest.fixture
async def directory() -> AsyncIterator[tuple[Index, Client]]:
    """One that gives up segments within a second."""
    transport, index = ZmqTransport(), Index(silent_s=1.0)
    service = DirectoryService(index)
    server = Server(transport.bind("tcp://127.0.0.1:0"), service.handlers())
    tasks = [asyncio.create_task(loop) for loop in (server.serve(), service.sweep())]
    try:
        async with asyncio.timeout(20.0), Client(transport, server.address) as client:
            yield index, client
            index.check()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        transport.close()


async def test_a_segment_that_dies_before_it_has_noted_is_named(
    directory: tuple[Index, Client], tmp_path: Path
) -> None:
    index, client = directory
    segment = a_segment(4, "kv", tmp_path)
    place = place_of(segment, "tcp://nowhere", HOST)
    try:
        await announce_once(client, segment, place, 0)
        for grant in cache(index, 1, 2, now=asyncio.get_running_loop().time()).targets:
            segment.memory.claim(grant.slot, grant.generation)
        await announce_once(client, segment, place, 0)
        for forget in (lambda: Directory(client).remove(names(1)), Directory(client).clear):
            with pytest.raises(Unconfirmed, match="forgotten blocks: 1; kv did not confirm it"):
                await forget()
            assert len(segment.noted()) == 2
            await announce_once(client, segment, place, 0)  # it was only slow
            assert index.find(names(1)).reach == 0, "what was forgotten is refused"
        await announce_once(client, segment, place, 0)
        assert segment.noted() == [], "and the segment is told"
        assert await Directory(client).clear() == 0
    finally:
        segment.close()


async def test_who_joins_is_heard_before_anything_is_forgotten(
    directory: tuple[Index, Client], tmp_path: Path
) -> None:
    """Else its catalogue would bring back just what was removed."""
    _, client = directory
    segment = a_segment(4, "kv", tmp_path)
    place = place_of(segment, "tcp://nowhere", HOST)
    try:
        for slot, name in enumerate(names(1, 2)):
            segment.memory.claim(slot, slot + 1)
            segment.note(Note(slot, slot + 1, name))
        assert (await client.call(Announce(place, 2), Announced, within_s=5.0)).joined
        removing = asyncio.create_task(Directory(client).remove(names(1)))
        await asyncio.sleep(0.1)
        noted = 0
        while not removing.done():
            noted = await announce_once(client, segment, place, noted)
            await asyncio.sleep(0.05)
        assert await removing == 1
        assert await Directory(client).exists(names(1, 2)) == [False, True]
        assert [note.name for note in segment.noted()] == names(2)
    finally:
        segment.close()
