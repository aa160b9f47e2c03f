"""The directory and a segment over real sockets, and the whole process."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache_pool.announcing import announce, place_of
from kvcache_pool.api import (
    Acquire,
    Announce,
    Corrupt,
    Counted,
    Directory,
    Done,
    GetSegments,
    Goodbye,
    LeaseLost,
    Pin,
    PinKind,
    PoolFull,
    ReadLayer,
    Remove,
    Renew,
    Runs,
    Segments,
    Stale,
    Unpin,
    WriteLayer,
    new_lease,
)
from kvcache_pool.config import KVCacheConfig
from kvcache_pool.index import Index
from kvcache_pool.pins import PIN_S_MAX
from kvcache_pool.segment import SHM, checksum
from kvcache_pool.service import DirectoryService
from protocol.cluster import Manifest
from protocol.errors import RemoteError
from protocol.ids import Incarnation, SegmentId
from protocol.message import Message
from protocol.registry import GetManifest, Heard, Leave, Register, Report, Welcome
from protocol.rpc import Ask, Client, Server, handler
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_place, a_pool, a_segment, an_ask, names, random_runs


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 6) as pool:
        yield pool


async def test_a_block_from_acquire_to_clear(pool: Pool) -> None:
    directory = pool.directory
    lease = await directory.acquire(an_ask(names(1, 2), unnamed=1))
    await directory.renew(lease.lease)
    await directory.commit(lease.lease, [0, 1], names(1, 2))
    assert lease.places == [pool.place()]
    assert (await directory.lookup(names(1, 2, 3))).reach == 2
    assert (await directory.stats()).leased == 2
    await directory.release(lease.lease)
    await directory.release(lease.lease)
    with pytest.raises(LeaseLost):
        await directory.commit(lease.lease, [0], names(1))
    with pytest.raises(LeaseLost):
        await directory.renew(lease.lease)
    with pytest.raises(PoolFull):
        await directory.acquire(an_ask([], unnamed=7))
    again = await directory.acquire(an_ask(names(1, 2)))
    await directory.discard(again.sources[1:])
    assert (await directory.lookup(names(1, 2))).reach == 1
    await directory.release(again.lease)
    assert await directory.clear() == 1
    assert (await directory.stats()).free == 6


async def test_blocks_are_pinned_unpinned_and_removed_and_segments_tell_of_it(pool: Pool) -> None:
    lease = await pool.directory.acquire(an_ask(names(1, 2)))
    await pool.directory.commit(lease.lease, [0, 1], names(1, 2))
    await pool.directory.release(lease.lease)
    async with Client(pool.transport, pool.address) as client:

        async def counted(message: Message) -> int:
            return (await client.call(message, Counted, within_s=5.0)).blocks

        assert await counted(Pin(names(1, 2, 3), PinKind.HARD, 60.0)) == 2
        with pytest.raises(PoolFull):
            await pool.directory.acquire(an_ask([], unnamed=5))
        assert await counted(Unpin(names(2, 3))) == 1
        (one,) = (await client.call(GetSegments(), Segments, within_s=5.0)).segments
        assert (one.segment, one.incarnation, one.host) == ("kv-0", pool.place().incarnation, HOST)
        assert (one.total, one.free, one.cached, one.leased, one.pinned, one.copies) == (6, 4, 2, 0, 1, 0)
        assert (await pool.directory.stats()).pinned == 1
        assert await counted(Pin(names(2), PinKind.SOFT, 0.1)) == 1
        async with asyncio.timeout(5.0):
            while (await pool.directory.stats()).pinned > 1:  # noqa: ASYNC110 - only the service can tell
                await asyncio.sleep(0.05)
        assert await counted(Remove(names(1, 2, 3))) == 2
    assert (await pool.directory.stats()).free == 6


async def test_two_leases_put_one_block_at_once(pool: Pool) -> None:
    leases = await asyncio.gather(*(pool.directory.acquire(an_ask(names(1, 2))) for _ in range(2)))
    await asyncio.gather(*(pool.directory.commit(lease.lease, [0, 1], names(1, 2)) for lease in leases))
    await asyncio.gather(*(pool.directory.release(lease.lease) for lease in leases))
    stats = await pool.directory.stats()
    assert (stats.cached, stats.free) == (2, 4)


async def test_nonsense_is_refused_and_changes_nothing(pool: Pool) -> None:
    async with Client(pool.transport, pool.address) as client:
        lease = await pool.directory.acquire(an_ask(names(1)))
        nonsense: list[Message] = [
            *(replace(an_ask([], unnamed=1), lease_s=lease_s) for lease_s in (0.0, -1.0, 1e9, float("nan"))),
            replace(an_ask(names(1)), reuse=-1),
            an_ask([], unnamed=-1),
            an_ask(names(1), copies=-1),
            Renew(lease.lease, float("inf")),
            Announce(a_place(slots=0)),
            Announce(a_place(slots=1 << 40)),
            Announce(a_place(), 1 << 63),
            *(Pin(names(1), PinKind.SOFT, for_s) for for_s in (0.0, -1.0, PIN_S_MAX + 1, float("nan"))),
            ReadLayer(3, [0], [1]),
            ReadLayer(0, [0, 1], [1]),
            ReadLayer(0, [0], [-1]),
            WriteLayer(0, [0], [1], []),
            WriteLayer(-1, [0], [1], [1]),
        ]
        before = await pool.directory.stats()
        for message in nonsense:
            with pytest.raises(RemoteError, match="BadMessage"):
                await client.call(message, Done, b"short", within_s=5.0)
        with pytest.raises(RemoteError, match="1 targets"):
            await pool.directory.commit(lease.lease, [1], names(1))
        with pytest.raises(RemoteError, match="a run has 2048 bytes"):
            await client.call(WriteLayer(0, [0], [1], [1]), Done, b"short", within_s=5.0)
        assert await pool.directory.stats() == before


async def test_a_dead_owners_lease_expires_without_anybody_asking(pool: Pool) -> None:
    await pool.directory.acquire(Acquire(new_lease(), "dead", names(1), 0, 0, None, lease_s=0.1))
    async with asyncio.timeout(5.0):
        while (await pool.directory.stats()).leases:  # noqa: ASYNC110 - only the service can tell
            await asyncio.sleep(0.05)
    stats = await pool.directory.stats()
    assert (stats.reserved, stats.free) == (1, 5)  # still in quarantine


async def test_a_run_that_changed_on_its_way_is_refused(pool: Pool) -> None:
    run = random_runs(1)[0]
    lease = await pool.directory.acquire(an_ask([], unnamed=1))
    slots, generations = [lease.targets[0].slot], [lease.targets[0].generation]
    good = checksum(run, generations[0])
    async with Client(pool.transport, pool.address) as client:
        with pytest.raises(Corrupt):
            await client.call(WriteLayer(0, slots, generations, [good ^ 1]), Done, run.data, within_s=5.0)
        await client.call(WriteLayer(0, slots, generations, [good]), Done, run.data, within_s=5.0)
        answer = await client.call_raw(ReadLayer(0, [*slots, 5], [*generations, 77]), within_s=5.0)
        assert isinstance(answer.message, Runs)
        assert (answer.message.valid, answer.message.checksums) == (1, [good])
        assert "slot 5" in answer.message.reason
        assert bytes(answer.buffers[0]) == run.tobytes()
        with pytest.raises(Stale):
            await client.call(WriteLayer(0, slots, [1], [good]), Done, run.data, within_s=5.0)


async def test_a_segment_says_goodbye_and_its_blocks_go(tmp_path: Path, pool: Pool) -> None:
    segment = a_segment(3, "guest", tmp_path)
    place = place_of(segment, "tcp://127.0.0.1:1", HOST)
    task = asyncio.create_task(announce(segment, place, pool.transport, lambda: pool.address))
    async with asyncio.timeout(5.0):
        while (await pool.directory.stats()).total < 9:  # noqa: ASYNC110 - only the service can tell
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await pool.directory.stats()).total == 6
    async with Client(pool.transport, pool.address) as client:
        stranger = Goodbye(pool.place().segment, Incarnation("another"))
        await client.call(stranger, Done, within_s=5.0)
    assert (await pool.directory.stats()).total == 6
    segment.close()


async def test_announcing_follows_the_directory_and_outlives_its_absence(tmp_path: Path) -> None:
    segment = a_segment(3, "mover", tmp_path)
    where: list[str | None] = [None]
    async with a_pool(tmp_path / ".", 2) as one, a_pool(tmp_path, 2) as two:
        place = place_of(segment, "tcp://127.0.0.1:1", HOST)
        task = asyncio.create_task(announce(segment, place, one.transport, lambda: where[0]))
        for pool in (one, two):
            where[0] = pool.address
            async with asyncio.timeout(5.0):
                while (await pool.directory.stats()).total < 5:  # noqa: ASYNC110 - only the service can tell
                    await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    segment.close()


@pytest.mark.parametrize(
    "wrong", [{"hard_pins_share": 1.1}, {"watermark": -0.1}, {"watermark_step": 2.0}, {"watermark": 0.01}]
)
def test_settings_that_nobody_could_use_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        KVCacheConfig(**wrong)


@pytest.mark.parametrize("name", ["", "k" * 59, "\u2603" * 20])
def test_a_name_that_a_segments_file_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="instance must have 1 to 58 bytes"):
        KVCacheConfig(instance=name)
    KVCacheConfig(instance="k" * 58)


def test_the_load_is_the_pools_blocks() -> None:
    index = Index()
    index.announce(a_place(slots=5), 0, 0.0)
    index.acquire(an_ask(names(1), unnamed=1), 0.0)
    load = DirectoryService(index).load()
    assert (load.blocks_total, load.blocks_free, load.blocks_pending, load.blocks_leased) == (5, 3, 2, 0)


MANIFEST = Manifest("tiny", "m", "t", 256, LAYOUT)


class Registry:
    """As much of a Conductor as an instance needs to start."""

    def __init__(self) -> None:
        self.registered: asyncio.Queue[Register] = asyncio.Queue(8)
        self.left: asyncio.Queue[Leave] = asyncio.Queue(8)

    async def manifest(self, message: GetManifest, ask: Ask) -> Manifest:
        return MANIFEST

    async def register(self, message: Register, ask: Ask) -> Welcome:
        self.registered.put_nowait(message)
        return Welcome(Heard(True, message.address))

    async def report(self, message: Report, ask: Ask) -> Heard:
        return Heard(True, None)

    async def leave(self, message: Leave, ask: Ask) -> Heard:
        self.left.put_nowait(message)
        return Heard(True, None)


@pytest.mark.cluster
async def test_the_process_serves_and_leaves_nothing_behind() -> None:
    transport, registry = ZmqTransport(), Registry()
    rows = [
        handler(GetManifest, registry.manifest),
        handler(Register, registry.register),
        handler(Report, registry.report),
        handler(Leave, registry.leave),
    ]
    server = Server(transport.bind("tcp://127.0.0.1:0"), dict(rows))
    serving = asyncio.create_task(server.serve())
    arguments = ["--conductor", server.address, "--size-bytes", "1MiB", "--instance", "kv-under-test"]
    arguments += ["--events", "tcp://127.0.0.1:0", "--events-replay", "tcp://127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvcache_pool", *arguments)
    try:
        async with asyncio.timeout(20.0):
            joined = await registry.registered.get()
            assert (joined.directory, joined.manifest, joined.instance) == (True, MANIFEST, "kv-under-test")
            async with Client(transport, joined.address) as client:
                directory = Directory(client)
                while not (await directory.stats()).total:  # noqa: ASYNC110 - only the process can tell
                    await asyncio.sleep(0.05)
                lease = await directory.acquire(an_ask(names(1)))
                assert lease.wants_tokens  # it publishes
                assert lease.places[0].shm in map(str, SHM.glob("*kv-under-test*"))
            process.terminate()
            assert await process.wait() == 0
            assert (await registry.left.get()).incarnation == joined.incarnation
            assert list(SHM.glob("*kv-under-test*")) == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        transport.close()


def test_the_default_is_one_instance_that_keeps_the_directory() -> None:
    config = KVCacheConfig()
    assert config.directory
    assert config.size_bytes == 768 << 20
    assert SegmentId(config.instance) == "kvcache-0"
