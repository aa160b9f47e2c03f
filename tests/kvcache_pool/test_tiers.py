"""The disk tier: what is saved, found, promoted, evicted, and still there after everything else is gone."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.announcing import announce_once, place_of
from kvcache_pool.api import Acquire, Directory, Lease, Place, PoolFull, Priority, Tier
from kvcache_pool.geometry import Geometry
from kvcache_pool.index import Index
from kvcache_pool.segment import Segment
from kvcache_pool.slots import Shares
from kvcache_pool.tiers import Carrier, beside, disk_segment
from kvcache_pool.transfer.copiers import Copiers
from kvcache_pool.transfer.mover import PoolMover
from protocol.ids import BlockHash, Incarnation, SegmentId
from protocol.rpc import Client
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_place, a_pool, an_ask, cache, names

KV, DISK = SegmentId("kv"), SegmentId("kv.disk")


def a_disk(slots: int = 8) -> Place:
    return Place(DISK, Incarnation("d"), "tcp://nowhere", HOST, "", slots, LAYOUT, Tier.DISK)


def an_index(memory: int = 4, disk: int = 8) -> Index:
    index = Index(Shares(copies=0.5))
    index.announce(a_place("kv", memory), 0, 0.0)
    index.announce(a_disk(disk), 0, 0.0)
    return index


def save(index: Index, limit: int = 100) -> list[int]:
    """As Carrier does. Returns the numbers of what was saved."""
    unsaved = [name for name, *_ in index.due(KV, limit)]
    if unsaved:
        lease = index.acquire(an_ask(unsaved, near=DISK, reuse=0), 0.0)
        index.commit(lease.lease, [*range(len(unsaved))], unsaved, 0.0)
        index.release(lease.lease)
    index.check()
    return [int.from_bytes(name, "big") for name in unsaved]


def read(index: Index, *numbers: int) -> Lease:
    """As a prefill near the memory does, which writes what it is given room for."""
    blocks = names(*numbers)
    lease = index.acquire(an_ask(blocks, near="kv", copies=100), 0.0)
    slots = [*range(len(lease.targets) + len(lease.copies))]
    named = [*blocks[len(lease.sources) :], *(blocks[copy.source] for copy in lease.copies)]
    index.commit(lease.lease, slots, named, 0.0)
    index.release(lease.lease)
    index.check()
    return lease


def on(index: Index, segment: SegmentId) -> set[int]:
    return {int.from_bytes(name, "big") for name, place, _ in index.named() if place.segment == segment}


def test_each_block_is_saved_once_the_first_cached_first() -> None:
    index = an_index()
    cache(index, 1, 2, near="kv")
    cache(index, 3, near="kv")
    assert save(index, limit=2) == [2, 1], "of one prompt the end is published first"
    assert save(index) == [3]
    assert save(index) == []
    assert (index.stats().cached, index.stats().disk_cached) == (3, 3)


def test_saving_does_not_count_as_use() -> None:
    index = an_index()
    for number in (1, 2, 3, 4):
        cache(index, number, near="kv")
    save(index)
    cache(index, 5, near="kv")
    assert on(index, KV) == {2, 3, 4, 5}


def test_what_memory_evicts_is_found_on_disk() -> None:
    index = an_index()
    cache(index, 1, 2, 3, 4, near="kv")
    save(index)
    cache(index, 5, 6, 7, near="kv")
    found = index.find(names(1, 2, 3, 4))
    assert (found.reach, found.held["kv.disk"]) == (4, 4)
    lease = index.acquire(an_ask(names(1, 2, 3, 4), near="kv"), 0.0)
    assert [grant.segment for grant in lease.sources] == [KV, DISK, DISK, DISK], "memory first"


def test_a_block_on_disk_is_due_for_memory_at_its_second_use() -> None:
    index = an_index()
    cache(index, 1, 2, near="kv")
    save(index)
    cache(index, 5, 6, 7, 8, near="kv")
    read(index, 1, 2)
    assert index.due(DISK, 9) == []
    read(index, 1)
    assert [name for name, *_ in index.due(DISK, 9)] == names(1)
    lease = index.acquire(an_ask(names(1), near="kv", reuse=0), 0.0)
    index.commit(lease.lease, [0], names(1), 0.0)
    index.release(lease.lease)
    assert index.due(DISK, 9) == []
    assert read(index, 1).sources[0].segment == KV
    assert index.stats().copies == 0, "it is no copy of what another memory has"


def test_requests_never_write_to_a_disk() -> None:
    index = an_index(memory=2)
    with pytest.raises(PoolFull, match="3 blocks wanted, 2 can be had"):
        index.acquire(an_ask(names(1, 2, 3)), 0.0)
    assert index.stats().total == 2


def test_a_full_disk_gives_away_what_was_used_least() -> None:
    index = an_index(memory=4, disk=2)
    for number in (1, 2, 3):
        cache(index, number, near="kv")
        save(index)
    assert on(index, DISK) == {2, 3}
    assert save(index) == [], "what the disk gave away and nobody uses is not saved again"


def test_what_is_hot_in_memory_stays_on_disk() -> None:
    """Also if somebody holds it all the time; and beside it the disk has the latest, in their order."""
    for held in (False, True):
        index = an_index(memory=3, disk=3)
        cache(index, 1, near="kv")
        save(index)
        holding = index.acquire(an_ask(names(1), near="kv"), 0.0)
        for number in range(2, 9):
            if not held:
                index.release(holding.lease)
            cache(index, 1, near="kv")
            cache(index, number, near="kv")
            save(index)
            assert 1 in on(index, DISK)
        assert on(index, DISK) == on(index, KV) == {1, 7, 8}
        index.release(holding.lease)


def test_of_a_prefix_that_is_hot_in_memory_the_disk_gives_the_end_away_first() -> None:
    index = an_index(memory=4, disk=3)
    cache(index, 3, near="kv")
    cache(index, 1, 2, near="kv")
    save(index)
    cache(index, 3, near="kv")
    cache(index, 1, 2, near="kv")
    cache(index, 4, near="kv")
    save(index)
    assert on(index, DISK) == {1, 2, 4}
    cache(index, 5, near="kv")
    save(index)
    assert on(index, DISK) == {1, 4, 5}


@pytest.mark.parametrize("used", ["leased", "touched"])
def test_what_a_disk_gave_away_is_saved_again_at_its_next_use(used: str) -> None:
    index = an_index(memory=4, disk=2)
    for number in (1, 2, 3):
        cache(index, number, near="kv")
        save(index)
    assert on(index, KV) == {1, 2, 3}
    if used == "leased":
        cache(index, 1, near="kv")
    else:
        index.touch(names(1))
    assert save(index) == [1]
    assert on(index, DISK) == {3, 1}
    assert save(index) == []


def test_a_disk_that_joins_late_saves_what_is_there_and_one_that_leaves_ends_it() -> None:
    index = Index(Shares(copies=0.5))
    index.announce(a_place("kv", 4), 0, 0.0)
    cache(index, 1, 2, near="kv")
    assert index.due(KV, 9) == []
    index.announce(a_disk(), 0, 0.0)
    assert sorted(save(index)) == [1, 2]
    index.leave(DISK, Incarnation("d"))
    cache(index, 3, near="kv")
    assert index.due(KV, 9) == []
    index.check()


def test_two_of_one_host_save_a_block_once() -> None:
    index = an_index()
    index.announce(a_place("kv-1", 4), 0, 0.0)
    cache(index, 1, near="kv")
    lease = index.acquire(an_ask(names(1), near="kv-1", copies=1), 0.0)
    index.commit(lease.lease, [0], names(1), 0.0)
    index.release(lease.lease)
    assert save(index) == [1]
    assert index.due(SegmentId("kv-1"), 9) == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:0"),
        ("ipc:///tmp/x/kvcache-0.sock", "ipc:///tmp/x/kvcache-0.disk"),
        ("ipc:///tmp/x/kv", "ipc:///tmp/x/kv.disk"),
    ],
)
def test_where_the_disk_tier_listens(address: str, expected: str) -> None:
    assert beside(address) == expected


# -- with bytes -------------------------------------------------------------------------------------


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    (tmp_path / "memory").mkdir()
    async with a_pool(tmp_path / "memory", 4) as pool:
        yield pool


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Segment]:
    disk = a_disk_segment(tmp_path)
    yield disk
    disk.close()


def a_disk_segment(folder: Path, life: str = "d1") -> Segment:
    return Segment(disk_segment(SegmentId("kv-0")), Incarnation(life), Geometry(LAYOUT, 8), folder, keep=True)


@asynccontextmanager
async def joined(pool: Pool, disk: Segment) -> AsyncIterator[Carrier]:
    copiers = Copiers()
    spill = Carrier(pool.segments[0], disk, copiers)
    try:
        async with Client(pool.transport, pool.address) as client:
            await announce_once(client, disk, place_of(disk, "tcp://nowhere", HOST, Tier.DISK), 0)
        yield spill
    finally:
        copiers.close()


def runs_of(name: BlockHash) -> np.ndarray:
    """[layers, run_bytes], told by the name."""
    seed = int.from_bytes(name, "big")
    return np.random.default_rng(seed).integers(0, 256, (LAYOUT.layers, LAYOUT.run_bytes), dtype=np.uint8)


async def put(pool: Pool, mover: PoolMover, blocks: list[BlockHash]) -> None:
    lease = await pool.directory.acquire(an_ask(blocks, near="kv-0"))
    mover.know(lease.places)
    await mover.write_blocks(lease.targets, [runs_of(name) for name in blocks], Priority.STORE)
    await pool.directory.commit(lease.lease, [*range(len(blocks))], blocks)
    await pool.directory.release(lease.lease)


async def assert_right(directory: Directory, mover: PoolMover, blocks: list[BlockHash], segment: str) -> None:
    lease = await directory.acquire(Acquire(f"l{os.urandom(4).hex()}", "r", blocks, len(blocks), 0, None))
    assert [grant.segment for grant in lease.sources] == [segment] * len(blocks)
    mover.know(lease.places)
    out = np.zeros((len(blocks), LAYOUT.run_bytes), np.uint8)
    for layer in range(LAYOUT.layers):
        assert await mover.read(layer, lease.sources, out, range(len(blocks)), Priority.LOAD) == len(blocks)
        assert all(np.array_equal(out[n], runs_of(name)[layer]) for n, name in enumerate(blocks))
    await directory.release(lease.lease)


async def test_saved_bytes_are_read_from_disk_when_memory_has_them_no_more(pool: Pool, disk: Segment) -> None:
    mover = PoolMover(pool.transport, HOST)
    async with joined(pool, disk) as spill:
        await put(pool, mover, names(1, 2, 3))
        assert await spill.round(pool.directory) == 3
        assert await spill.round(pool.directory) == 0
        await put(pool, mover, names(4, 5, 6, 7))
        await assert_right(pool.directory, mover, names(1, 2, 3), "kv-0.disk")
    await mover.aclose()
    assert (await pool.directory.stats()).leases == 0


async def test_what_is_read_twice_is_in_memory_again(pool: Pool, disk: Segment) -> None:
    mover = PoolMover(pool.transport, HOST)
    async with joined(pool, disk) as spill:
        await put(pool, mover, names(1, 2, 3))
        await spill.round(pool.directory)
        await put(pool, mover, names(4, 5, 6, 7))
        back = Carrier(disk, pool.segments[0], spill._copiers)
        await assert_right(pool.directory, mover, names(1, 2), "kv-0.disk")
        assert await back.round(pool.directory) == 0
        await assert_right(pool.directory, mover, names(1, 2), "kv-0.disk")
        assert await back.round(pool.directory) == 2
        await assert_right(pool.directory, mover, names(1, 2), "kv-0")
    await mover.aclose()


async def test_a_block_that_is_bad_in_memory_is_not_saved_but_forgotten(pool: Pool, disk: Segment) -> None:
    mover = PoolMover(pool.transport, HOST)
    async with joined(pool, disk) as spill:
        await put(pool, mover, names(1, 2, 3))
        slot = next(grant.slot for name, _, grant in pool.index.named() if name == names(2)[0])
        pool.segments[0].memory.runs[slot, 1, 5] ^= 1
        assert await spill.round(pool.directory) == 2
        assert (await pool.directory.lookup(names(1, 2, 3))).reach == 1
        assert await spill.round(pool.directory) == 0
    await mover.aclose()


async def test_after_all_is_gone_but_the_disk_everything_saved_is_there(
    pool: Pool, disk: Segment, tmp_path: Path
) -> None:
    mover = PoolMover(pool.transport, HOST)
    async with joined(pool, disk) as spill, Client(pool.transport, pool.address) as client:
        await put(pool, mover, names(1, 2, 3))
        await spill.round(pool.directory)
        await announce_once(client, disk, place_of(disk, "tcp://nowhere", HOST, Tier.DISK), 0)
    disk.close()
    again = a_disk_segment(tmp_path, "d2")
    assert again.adopted
    again.memory.runs[again.noted()[0].slot, 0, 0] ^= 1  # one torn run, as after a power cut
    (tmp_path / "other").mkdir()
    async with a_pool(tmp_path / "other", 4) as other, joined(other, again):
        noted = {note.name for note in again.noted()}
        assert noted == set(names(1, 2, 3))
        bad = again.noted()[0].name
        for name in names(1, 2, 3):
            if name != bad:
                await assert_right(other.directory, mover, [name], "kv-0.disk")
        lease = await other.directory.acquire(an_ask([BlockHash(bad)]))
        mover.know(lease.places)
        out = np.zeros((1, LAYOUT.run_bytes), np.uint8)
        assert await mover.read(0, lease.sources, out, [0], Priority.LOAD) == 0
    await mover.aclose()
    again.close()
