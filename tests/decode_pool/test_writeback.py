"""What decoding makes goes back to the pool: along its chain, best effort, and never in the way."""

import asyncio
import gc
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from decode_pool.writeback import BLOCKS_MAX, Block, WriteBack
from kvcache_pool.api import Directory, DirectoryLink, new_lease
from protocol.errors import PeerLost
from protocol.ids import BlockHash, LeaseId, RequestId
from tests.fakes import MemoryMover
from tests.kvcache_pool.builders import LAYOUT, a_pool, an_ask, names


class Link(DirectoryLink):
    def __init__(self, directory: Directory) -> None:
        self._fixed = directory

    def get(self) -> Directory:
        return self._fixed


def a_block(*numbers: int) -> Block:
    runs = np.full((LAYOUT.layers, 1, LAYOUT.run_bytes), numbers[-1], np.uint8)
    return Block(RequestId("r"), names(*numbers), runs)


async def written(back: WriteBack, *blocks: Block) -> None:
    """Offer blocks and wait until each is written or dropped."""
    for block in blocks:
        back.offer(block)
    wanted = back.written + back.dropped + len(blocks)
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


async def test_the_queue_is_bounded():
    back = WriteBack(MemoryMover(), Link(Directory.__new__(Directory)))
    for _ in range(BLOCKS_MAX + 3):
        back.offer(a_block(1))
    assert back.dropped == 3


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
