"""What decoding makes goes back to the pool: along its chain, best effort, and never in the way."""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from decode_pool.writeback import BLOCKS_MAX, Filled, WriteBack
from kvcache_pool.api import Acquire, Directory, DirectoryLink, Grant, Lease, new_lease
from kvcache_pool.slots import Shares
from protocol.errors import PeerLost
from protocol.ids import BlockHash, Ids, LeaseId, RequestId, SegmentId, tenant_id, token_ids
from tests.fakes import MemoryMover
from tests.kvcache_pool.builders import LAYOUT, a_pool, an_ask, names


class Link(DirectoryLink):
    def __init__(self, directory: Directory) -> None:
        self._fixed = directory

    def get(self) -> Directory:
        return self._fixed


def a_block(*numbers: int, count: int = 1) -> Filled:
    """The last `count` of a chain."""
    runs = np.full((LAYOUT.layers, count, LAYOUT.run_bytes), numbers[-1], np.uint8)
    return Filled(RequestId("r"), names(*numbers), runs)


async def written(back: WriteBack, *blocks: Filled) -> None:
    """Offer blocks and wait until each is written or dropped."""
    wanted = back.written + back.dropped + sum(block.count for block in blocks)
    for block in blocks:
        back.offer(block)
    task = asyncio.create_task(back.run())
    async with asyncio.timeout(5):
        while back.written + back.dropped < wanted:  # noqa: ASYNC110 - a test may poll
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_chain_grows_in_the_pool_and_its_prefix_outlives_its_end(tmp_path: Path):
    async with a_pool(tmp_path, 4) as pool:
        back = WriteBack(MemoryMover(), Link(pool.directory))
        lease = await pool.directory.acquire(an_ask(names(1)))
        await pool.directory.commit(lease.lease, [0], names(1))
        await pool.directory.release(lease.lease)
        await written(back, a_block(1, 2), a_block(1, 2, 3), a_block(1, 2, 3, 4))
        assert (await pool.directory.lookup(names(1, 2, 3, 4))).reach == 4
        for room, reach in ((1, 3), (2, 2), (3, 1)):  # evict one more each time: always the chain's end
            lease = await pool.directory.acquire(an_ask([], unnamed=room))
            assert (await pool.directory.lookup(names(1, 2, 3, 4))).reach == reach
            await pool.directory.release(lease.lease)


class Asked(Directory):
    """Grants all, and remembers what it is told."""

    def __init__(self, wants_tokens: bool) -> None:
        self.wants_tokens = wants_tokens
        self.told: list[tuple[list[int], BlockHash | None]] = []

    async def acquire(self, ask: Acquire) -> Lease:
        targets = [Grant(SegmentId("kv"), slot, 1) for slot in range(ask.unnamed)]
        return Lease(ask.lease, [], targets, [], wants_tokens=self.wants_tokens)

    async def commit(
        self,
        lease: LeaseId,
        slots: list[int],
        blocks: list[BlockHash],
        tokens: Ids | None = None,
        parent: BlockHash | None = None,
    ) -> None:
        self.told.append(([*(tokens or ())], parent))

    async def release(self, lease: LeaseId, prefix: Sequence[BlockHash] = ()) -> None:
        pass


async def test_tokens_are_told_where_they_are_wanted_and_known():
    tokens = token_ids(range(LAYOUT.block_tokens))
    first, later = replace(a_block(1), tokens=tokens), replace(a_block(1, 2), tokens=tokens)
    for wanted in (True, False):
        directory = Asked(wanted)
        await written(WriteBack(MemoryMover(), Link(directory)), first, later, a_block(1, 2, 3))
        known = [([*tokens], None), ([*tokens], names(1)[0])] if wanted else [([], None), ([], None)]
        assert directory.told == [*known, ([], None)]


async def test_what_is_there_already_is_not_kept_twice(tmp_path: Path):
    async with a_pool(tmp_path, 8) as pool:
        back = WriteBack(MemoryMover(), Link(pool.directory))
        await written(back, a_block(1), a_block(1), a_block(1, 2), a_block(1, 2))
        stats = await pool.directory.stats()
        assert (stats.cached, stats.leases, stats.reserved) == (2, 0, 0)


async def test_a_full_pool_costs_the_block_and_nothing_else(tmp_path: Path):
    async with a_pool(tmp_path, 1) as pool:
        back = WriteBack(MemoryMover(), Link(pool.directory))
        lease = await pool.directory.acquire(an_ask(names(9)))
        await written(back, a_block(1))
        assert (back.written, back.dropped) == (0, 1)
        await pool.directory.release(lease.lease)
        await written(back, a_block(1))
        assert back.written == 1


async def test_a_tenant_without_room_costs_its_own_block_and_no_other(tmp_path: Path):
    x, y = tenant_id("x"), tenant_id("y")
    async with a_pool(tmp_path, 4, shares=Shares(tenant=0.5)) as pool:
        back = WriteBack(MemoryMover(), Link(pool.directory))
        lease = await pool.directory.acquire(an_ask([], unnamed=2, tenant=x))
        await written(back, replace(a_block(1), tenant=x), replace(a_block(2), tenant=y))
        assert (back.written, back.dropped) == (1, 1)
        assert (await pool.directory.tenant(y)).blocks == 1
        await pool.directory.release(lease.lease)
        await written(back, replace(a_block(1), tenant=x))
        assert (await pool.directory.tenant(x)).blocks == 1


async def test_blocks_in_a_row_are_written_together_under_their_names(tmp_path: Path):
    async with a_pool(tmp_path, 8) as pool:
        mover = MemoryMover()
        back = WriteBack(mover, Link(pool.directory))
        await written(back, a_block(1), a_block(1, 2, 3, 4, count=3))
        assert (back.written, back.dropped) == (4, 0)
        assert (await pool.directory.lookup(names(1, 2, 3, 4))).reach == 4
        assert mover.writes == 4 * LAYOUT.layers
        stats = await pool.directory.stats()
        assert (stats.cached, stats.leases, stats.reserved) == (4, 0, 0)


async def test_a_block_goes_where_it_is_said_to_belong(tmp_path: Path):
    asked: list[SegmentId | None] = []

    class Noted(Directory):
        async def acquire(self, ask: Acquire) -> Lease:
            asked.append(ask.near)
            return await super().acquire(ask)

    async with a_pool(tmp_path, 4) as pool:
        back = WriteBack(MemoryMover(), Link(Noted(pool.directory._client)))
        back.near = SegmentId("home")
        await written(back, a_block(1), replace(a_block(1, 2), near=SegmentId("elsewhere")))
    assert asked == ["home", "elsewhere"]


async def test_a_bad_block_is_forgotten_and_without_a_directory_nothing_happens(tmp_path: Path):
    async with a_pool(tmp_path, 4) as pool:
        back = WriteBack(MemoryMover(), Link(pool.directory))
        await written(back, a_block(1))
        lease = await pool.directory.acquire(an_ask(names(1), reuse=1))
        await pool.directory.release(lease.lease)
        back.forget(lease.sources[0])
        await written(back, a_block(2))  # after it
        assert (await pool.directory.lookup(names(1))).reach == 0

        class Away(Directory):
            async def discard(self, grants: list[Grant]) -> None:
                raise PeerLost("no directory is known")

        back = WriteBack(MemoryMover(), Link(Away(pool.directory._client)))
        back.forget(lease.sources[0])
        await written(back, a_block(3))
        assert back.written == 1


async def test_the_queue_is_bounded():
    back = WriteBack(MemoryMover(), Link(Directory.__new__(Directory)))
    for _ in range(BLOCKS_MAX + 3):
        back.offer(a_block(1))
    assert back.dropped == 3
    back.offer(a_block(1, 2, 3, count=2))
    assert back.dropped == 5


async def test_what_one_step_filled_is_taken_whole_if_nothing_else_waits():
    back = WriteBack(MemoryMover(), Link(Directory.__new__(Directory)))
    numbers = range(BLOCKS_MAX + 3)
    back.offer(a_block(*numbers, count=len(numbers)))
    back.offer(a_block(1))
    assert back.dropped == 1


def test_names_of_leases_are_unlike():
    assert len({new_lease() for _ in range(100)}) == 100


async def test_one_that_is_ended_while_it_gives_its_lease_back_leaves_no_error_behind(tmp_path: Path):
    """The directory goes away at the same moment: nobody is left who could hear of it."""
    unheard: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    asked = asyncio.Event()

    class Silent(Directory):
        async def release(self, lease: LeaseId, prefix: Sequence[BlockHash] = ()) -> None:
            asked.set()
            await asyncio.sleep(0.01)
            raise PeerLost("closed")

    async with a_pool(tmp_path, 4) as pool:
        back = WriteBack(MemoryMover(), Link(Silent(pool.directory._client)))
        back.offer(a_block(1))
        task = asyncio.create_task(back.run())
        await asked.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.02)
        gc.collect()
        await asyncio.sleep(0)
    assert unheard == []
