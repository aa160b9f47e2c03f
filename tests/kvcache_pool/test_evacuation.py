"""Real segments that are drained while others read and write: bytes, deaths, and what an operator is told."""

import asyncio
import fcntl
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.announcing import announce_once
from kvcache_pool.api import (
    Acquire,
    Blocks,
    CannotDrain,
    Directory,
    Grant,
    Place,
    Priority,
    SegmentStats,
    new_lease,
)
from kvcache_pool.client import KVCachePool
from kvcache_pool.drain import Outcome, outcome_of
from kvcache_pool.evacuation import Evacuation
from kvcache_pool.geometry import Geometry
from kvcache_pool.index import Index
from kvcache_pool.segment import Segment
from kvcache_pool.service import DirectoryService
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.errors import PeerLost
from protocol.ids import BlockHash, Incarnation, SegmentId
from protocol.rpc import Client, Server
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_pool, names
from tests.kvcache_pool.test_client import Conductor
from tests.kvcache_pool.test_operate import Operator
from tests.kvcache_pool.test_tiers import assert_right, put, runs_of

OUT = SegmentId("kv-0")
"""The segment that is drained in these tests."""
CHAIN = names(*range(1, 7))


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    """CHAIN lies in the first of three segments."""
    async with a_pool(tmp_path, 8, 8, 8) as pool, a_mover(pool) as mover:
        await put(pool, mover, CHAIN)
        assert stats(pool, "kv-0").cached == 6
        yield pool


@asynccontextmanager
async def a_mover(pool: Pool, reach: Reach = Reach.AUTO) -> AsyncIterator[PoolMover]:
    mover = PoolMover(pool.transport, HOST, reach)
    try:
        yield mover
    finally:
        await mover.aclose()


@asynccontextmanager
async def evacuating(pool: Pool, mover: object = None, number: int = 0) -> AsyncIterator[None]:
    """As the owner of a segment does for life."""
    async with a_mover(pool) as plain:
        evacuation = Evacuation(pool.segments[number], mover or plain)  # type: ignore[arg-type]
        task = asyncio.create_task(evacuation.run(pool.transport, lambda: pool.address))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Writing:
    """A mover whose writes go another way, or to some segments not at all."""

    def __init__(self, inner: PoolMover, writer: PoolMover | None = None, dead: Sequence[str] = ()) -> None:
        self._inner = inner
        self._writer = writer or inner
        self._dead = dead
        self.failed = 0

    def know(self, places: Sequence[Place]) -> None:
        self._inner.know(places)
        self._writer.know(places)

    async def read_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> int:
        return await self._inner.read_blocks(grants, blocks, priority)

    async def write_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> None:
        if grants[0].segment in self._dead:
            self.failed += 1
            raise PeerLost(f"nobody listens at {grants[0].segment}")
        await self._writer.write_blocks(grants, blocks, priority)


def stats(pool: Pool, segment: str) -> SegmentStats:
    return next(one for one in pool.index.segment_stats() if one.segment == segment)


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not look():  # noqa: ASYNC110 - the service is in this process, and tells nobody
            await asyncio.sleep(0.01)


async def empty(pool: Pool, segment: str = "kv-0") -> None:
    await until(lambda: stats(pool, segment).free == 8)


async def assert_whole(directory: Directory, mover: PoolMover, blocks: list[BlockHash] = CHAIN) -> None:
    """All of these are cached, outside the drained segment, with the right bytes."""
    lease = await directory.acquire(Acquire(new_lease(), "r", blocks, len(blocks), 0, None))
    assert len(lease.sources) == len(blocks)
    assert OUT not in {grant.segment for grant in lease.sources}
    mover.know(lease.places)
    out = np.zeros((len(blocks), LAYOUT.layers, LAYOUT.run_bytes), np.uint8)
    assert await mover.read_blocks(lease.sources, out, Priority.LOAD) == len(blocks)
    assert all(np.array_equal(out[n], runs_of(name)) for n, name in enumerate(blocks))
    await directory.release(lease.lease)


async def test_a_drained_segment_can_be_stopped_and_every_byte_is_elsewhere(pool: Pool) -> None:
    async with evacuating(pool), a_mover(pool) as mover:
        assert await pool.directory.drain(OUT) == 6
        await empty(pool)
        pool.index.leave(OUT, pool.segments[0].incarnation)
        await assert_whole(pool.directory, mover)
    assert pool.index.stats().leases == 0


async def test_bytes_go_over_the_network_too(pool: Pool) -> None:
    """From the second segment to the first, whose service listens."""
    async with a_mover(pool) as near, a_mover(pool, Reach.TCP) as far:
        for segment in ("kv-1", "kv-2"):
            await pool.directory.drain(SegmentId(segment))
        async with evacuating(pool, number=0):
            lease = await pool.directory.acquire(Acquire(new_lease(), "r", CHAIN, 6, 0, None))
            assert {grant.segment for grant in lease.sources} == {OUT}
            await pool.directory.release(lease.lease)
        await pool.directory.drain(SegmentId("kv-1"), undo=True)
        async with evacuating(pool):
            await pool.directory.drain(OUT)
            await empty(pool)
        await pool.directory.drain(OUT, undo=True)
        async with evacuating(pool, Writing(near, far), number=1):
            await pool.directory.drain(SegmentId("kv-1"))
            await empty(pool, "kv-1")
        await assert_right(pool.directory, near, CHAIN, "kv-0")


async def test_a_reader_reads_on_where_it_began(pool: Pool) -> None:
    async with evacuating(pool), a_mover(pool) as mover:
        lease = await pool.directory.acquire(Acquire(new_lease(), "r", CHAIN, 6, 0, None))
        mover.know(lease.places)
        await pool.directory.drain(OUT)
        await until(lambda: sum(one.cached for one in pool.index.segment_stats()) == 12)
        await assert_whole(pool.directory, mover)
        out = np.zeros((6, LAYOUT.layers, LAYOUT.run_bytes), np.uint8)
        assert await mover.read_blocks(lease.sources, out, Priority.LOAD) == 6
        assert all(np.array_equal(out[n], runs_of(name)) for n, name in enumerate(CHAIN))
        assert stats(pool, "kv-0").cached == 6
        await pool.directory.release(lease.lease)
        await empty(pool)


async def test_what_is_written_during_a_drain_is_carried_too(pool: Pool) -> None:
    async with evacuating(pool), a_mover(pool) as mover:
        ask = Acquire(new_lease(), "w", names(7, 8), 0, 0, OUT)
        lease = await pool.directory.acquire(ask)
        await pool.directory.drain(OUT)
        mover.know(lease.places)
        await until(lambda: stats(pool, "kv-0").cached == 0)
        await mover.write_blocks(lease.targets, [runs_of(name) for name in names(7, 8)], Priority.STORE)
        await pool.directory.commit(ask.lease, [0, 1], names(7, 8))
        await pool.directory.release(ask.lease)
        await empty(pool)
        await assert_whole(pool.directory, mover, [*CHAIN, *names(7, 8)])


async def test_a_bad_block_is_forgotten_and_the_others_are_carried(pool: Pool) -> None:
    slot = next(grant.slot for name, _, grant in pool.index.named() if name == CHAIN[2])
    pool.segments[0].memory.runs[slot, 1, 5] ^= 1
    async with evacuating(pool), a_mover(pool) as mover:
        await pool.directory.drain(OUT)
        await empty(pool)
        await assert_whole(pool.directory, mover, [*CHAIN[:2], *CHAIN[3:]])
        assert await pool.directory.exists([CHAIN[2]]) == [False]


async def test_who_cannot_be_written_to_is_left_alone_and_another_takes_the_blocks(pool: Pool) -> None:
    async with a_mover(pool) as mover:
        half_dead = Writing(mover, dead=["kv-1"])
        async with evacuating(pool, half_dead):
            await pool.directory.drain(OUT)
            await empty(pool)
        assert half_dead.failed == 1
        await assert_right(pool.directory, mover, CHAIN, "kv-2")


async def test_a_target_that_dies_with_what_it_got_is_made_up_for(pool: Pool) -> None:
    """It dies before it has noted anything, so the drained segment still has it all."""
    async with a_mover(pool) as mover:
        evacuation = Evacuation(pool.segments[0], mover)
        await pool.directory.drain(OUT)
        assert await evacuation.round(pool.directory) == 6
        target = next(place.segment for _, place, _ in pool.index.named() if place.segment != OUT)
        number = ["kv-0", "kv-1", "kv-2"].index(target)
        pool.index.leave(target, pool.segments[number].incarnation)
        pool.index.settle()
        assert pool.index.find(CHAIN).reach == 6
        assert await evacuation.round(pool.directory) == 6
        await empty(pool)
        await assert_whole(pool.directory, mover)


async def test_an_owner_that_is_killed_between_writing_and_committing_loses_nothing(pool: Pool) -> None:
    class Dying(Writing):
        async def write_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> None:
            await super().write_blocks(grants[:3], blocks[:3], priority)
            raise asyncio.CancelledError

    async with a_mover(pool) as mover:
        await pool.directory.drain(OUT)
        with pytest.raises(asyncio.CancelledError):
            await Evacuation(pool.segments[0], Dying(mover)).round(pool.directory)
        assert (stats(pool, "kv-0").cached, pool.index.find(CHAIN).reach) == (6, 6)
        async with evacuating(pool):
            await empty(pool)
        await assert_whole(pool.directory, mover)


async def test_a_new_directory_goes_on_with_the_drain(pool: Pool) -> None:
    await pool.directory.drain(OUT)
    await until(lambda: pool.segments[0].draining)
    index = Index(generation=1 << 40)
    server = Server(pool.transport.bind("tcp://127.0.0.1:0"), DirectoryService(index).handlers())
    task = asyncio.create_task(server.serve())
    try:
        async with Client(pool.transport, server.address) as client, a_mover(pool) as mover:
            for number, segment in enumerate(pool.segments):
                await announce_once(client, segment, pool.place(number), 0)
            assert index.draining(OUT)
            assert index.find(CHAIN).reach == 6
            directory = Directory(client)
            assert await Evacuation(pool.segments[0], mover).round(directory) == 6
            for number, segment in enumerate(pool.segments):
                noted = await announce_once(client, segment, pool.place(number), 0)
                await announce_once(client, segment, pool.place(number), noted)
            assert index.settle() == 6
            await assert_whole(directory, mover)
            await directory.drain(OUT, undo=True)
            await announce_once(client, pool.segments[0], pool.place(0), 0)
            assert not pool.segments[0].draining
            index.check()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def killed(segment: Segment) -> None:
    """What the kernel does then; the mapping here has the file open too."""
    fcntl.flock(segment._file, fcntl.LOCK_UN)
    os.close(segment._file)


def test_a_killed_owners_next_life_knows_that_it_is_drained(tmp_path: Path) -> None:
    def a_life(life: str) -> Segment:
        return Segment(OUT, Incarnation(life), Geometry(LAYOUT, 4), tmp_path)

    first = a_life("1")
    assert not first.draining
    first.draining = True
    killed(first)
    second = a_life("2")
    assert second.adopted
    assert second.draining
    second.draining = False
    killed(second)
    third = a_life("3")
    assert not third.draining
    third.draining = True
    third.close()
    fourth = a_life("4")
    assert not fourth.draining, "one that was stopped in good order begins anew"
    fourth.close()


# -- a client's copies and moves ----------------------------------------------------------------------


@asynccontextmanager
async def a_client(pool: Pool) -> AsyncIterator[KVCachePool]:
    async with KVCachePool.connect(directory=pool.address, layout=LAYOUT, host=HOST) as client:
        yield client


async def test_a_client_moves_a_chain_and_its_pins(pool: Pool) -> None:
    async with a_client(pool) as client, a_mover(pool) as mover:
        await client.pin(CHAIN[:2], 60.0, hard=True)
        assert await client.move(CHAIN, "kv-2") == 6
        await empty(pool)
        await assert_right(pool.directory, mover, CHAIN, "kv-2")
        assert (stats(pool, "kv-2").pinned, stats(pool, "kv-2").copies) == (2, 0)
        assert await client.move(CHAIN, "kv-2") == 6
        assert await client.move(names(99), "kv-2") == 0


async def test_a_client_copies_as_far_as_the_budget_goes(pool: Pool) -> None:
    async with a_client(pool) as client, a_mover(pool) as mover:
        assert await client.copy(CHAIN, "kv-1") == 2, "a quarter of eight"
        assert await client.copy(CHAIN, "kv-1") == 2
        assert (stats(pool, "kv-0").cached, stats(pool, "kv-1").copies) == (6, 2)
        lease = await pool.directory.acquire(Acquire(new_lease(), "r", CHAIN, 6, 0, SegmentId("kv-1")))
        assert [grant.segment for grant in lease.sources] == ["kv-1"] * 2 + ["kv-0"] * 4
        mover.know(lease.places)
        out = np.zeros((6, LAYOUT.layers, LAYOUT.run_bytes), np.uint8)
        assert await mover.read_blocks(lease.sources, out, Priority.LOAD) == 6
        assert all(np.array_equal(out[n], runs_of(name)) for n, name in enumerate(CHAIN))
        await pool.directory.release(lease.lease)


async def test_a_move_takes_as_much_as_there_is_room_for(pool: Pool) -> None:
    async with a_client(pool) as client:
        held = await pool.directory.acquire(Acquire(new_lease(), "w", [], 0, 5, SegmentId("kv-1")))
        assert await client.move(CHAIN, "kv-1") == 3
        await until(lambda: stats(pool, "kv-0").cached == 3)
        assert (await client.lookup(CHAIN)).segments == {"kv-1": 3}
        assert (await client.lookup(CHAIN)).blocks == 6
        await pool.directory.release(held.lease)


async def test_a_bad_block_ends_a_copy_and_is_forgotten(pool: Pool) -> None:
    slot = next(grant.slot for name, _, grant in pool.index.named() if name == CHAIN[1])
    pool.segments[0].memory.runs[slot, 2, 0] ^= 1
    async with a_client(pool) as client:
        assert await client.move(CHAIN, "kv-1") == 1
        assert (await client.lookup(CHAIN)).blocks == 1


async def test_a_segment_that_takes_nothing_is_told(pool: Pool) -> None:
    await pool.directory.drain(SegmentId("kv-2"))
    async with a_client(pool) as client:
        with pytest.raises(ValueError, match="there is no segment kv-9; there are: kv-0, kv-1, kv-2"):
            await client.move(CHAIN, "kv-9")
        with pytest.raises(ValueError, match="kv-2 is drained, and takes no blocks"):
            await client.copy(CHAIN, "kv-2")
        with pytest.raises(CannotDrain, match="there is no segment kv-9"):
            await client.drain("kv-9")
    assert stats(pool, "kv-0").cached == 6


# -- an operator --------------------------------------------------------------------------------------


@pytest.fixture
async def dango(pool: Pool) -> AsyncIterator[Operator]:
    async with Conductor(pool.transport, pool.address) as conductor:
        yield Operator(conductor.address)


async def test_the_verb_waits_until_the_segment_is_empty(pool: Pool, dango: Operator) -> None:
    async with evacuating(pool):
        code, out, err = await dango("drain", "kv-0", "--wait", "30")
    assert (code, out) == (0, "kv-0 is drained: its process may be stopped\n")
    assert "kv-0: blocks left: " in err
    assert pool.index.find(CHAIN).reach == 6
    code, out, _ = await dango("stats")
    assert "kv-0 on here: 8 of 8 free, 0 cached, 0 in use, 0 pinned, draining" in out
    code, out, _ = await dango("drain", "kv-0", "--undo")
    assert (code, out) == (0, "kv-0 is drained no more\n")
    assert not stats(pool, "kv-0").draining


async def test_a_deadline_says_what_is_left_and_why_and_the_drain_goes_on(pool: Pool, dango: Operator) -> None:
    lease = await pool.directory.acquire(Acquire(new_lease(), "r", CHAIN[:2], 2, 1, OUT))
    async with evacuating(pool):
        code, out, _ = await dango("drain", "kv-0", "--wait", "3", "--json")
        told = json.loads(out)
        assert (code, told["drained"], told["blocks"]) == (1, False, 3)
        assert told["why"] == "blocks left: 3 (2 in use, 1 being written)"
        await pool.directory.release(lease.lease)
        await empty(pool)
        code, out, _ = await dango("drain", "kv-0", "--wait", "0")
    assert (code, out) == (0, "kv-0 is drained: its process may be stopped\n")


async def test_the_verb_says_what_cannot_be_drained(pool: Pool, dango: Operator) -> None:
    code, out, err = await dango("drain", "kv-7")
    assert (code, out) == (1, "")
    assert err == "dango kvcache drain: there is no segment kv-7; there are: kv-0, kv-1, kv-2\n"
    for segment in ("kv-1", "kv-2"):
        await pool.directory.drain(SegmentId(segment))
    code, out, err = await dango("drain", "kv-0")
    assert (code, out) == (1, "")
    assert err == "dango kvcache drain: kv-0 cannot be drained: no other memory stays that could take its blocks\n"
    code, out, err = await dango("drain", "kv-0", "--wait", "-1")
    assert (code, err) == (1, "dango kvcache drain: --wait is 0 or more seconds, not -1\n")
    assert not stats(pool, "kv-0").draining


async def test_a_prompt_is_moved_and_copied_by_hand(pool: Pool, tmp_path: Path) -> None:
    tokens = [str(token) for token in range(32)]
    async with Conductor(pool.transport, pool.address) as conductor:
        async with KVCachePool.connect(conductor.address, host=HOST) as client:
            kv = np.zeros((2, LAYOUT.block_bytes), np.uint8)
            assert await client.put([*range(32)], kv) == 2
        dango = Operator(conductor.address)
        assert await dango("copy", "--to", "kv-1", *tokens, DANGO_KVCACHE_HOST=HOST) == (
            0,
            "2 blocks are in kv-1 now\n",
            "",
        )
        assert await dango("move", "--to", "kv-2", *tokens, DANGO_KVCACHE_HOST=HOST) == (
            0,
            "2 blocks are in kv-2 now\n",
            "",
        )
        code, _, err = await dango("move", "--to", "kv-9", *tokens)
        assert (code, err) == (
            1,
            "dango kvcache move: there is no segment kv-9; there are: kv-0, kv-1, kv-2\n",
        )


def a_row(segment: str, draining: bool = True, cached: int = 0, leased: int = 0, pinned: int = 0) -> SegmentStats:
    counts = (8, 8 - cached, cached, leased, pinned, 0)
    return SegmentStats(SegmentId(segment), Incarnation("i"), HOST, *counts, False, draining)


def test_what_is_left_is_told_with_its_reason() -> None:
    stays = a_row("b", False)
    assert outcome_of(SegmentId("x"), [stays]) is None
    assert outcome_of(OUT, [a_row("kv-0"), stays]) == Outcome(OUT, True, 0, "")
    assert outcome_of(OUT, [a_row("kv-0", False), stays]) == Outcome(
        OUT, False, 0, "somebody has ended the drain", ended=True
    )
    some = outcome_of(OUT, [a_row("kv-0", cached=5, pinned=1, leased=2), a_row("b")])
    assert some is not None
    assert some.why == "blocks left: 5 (2 in use, 1 pinned, no other memory is there to take them)"
