"""Mooncake's Transfer Engine as a way to segments: real engines over loopback, and one that fails."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.api import Done, Lease, Priority, PullRuns, Stale
from kvcache_pool.transfer.mooncake import MooncakeRoute
from kvcache_pool.transfer.mooncake_engine import RDMA_DEVICES, MooncakeSettings
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.blocks import BlockLayout
from protocol.errors import RemoteError
from protocol.rpc import Client
from tests.kvcache_pool.builders import LAYOUT, Pool, a_pool, an_ask, random_runs
from tests.mooncake_engine import MOONCAKE, needs_mooncake

LARGE = BlockLayout(2, 8, 128, 128, "float32")
"""A block is two hops' worth."""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 12, mooncake=MOONCAKE) as pool:
        yield pool


async def a_lease(pool: Pool, unnamed: int = 6) -> Lease:
    return await pool.directory.acquire(an_ask([], unnamed=unnamed))


def a_mover(pool: Pool, lease: Lease, reach: Reach = Reach.MOONCAKE) -> PoolMover:
    mover = PoolMover(pool.transport, "elsewhere", reach)
    mover.know(lease.places)
    return mover


def way_of(mover: PoolMover, lease: Lease) -> MooncakeRoute:
    route = mover._routes[lease.targets[0].segment]
    assert isinstance(route, MooncakeRoute)
    return route


@needs_mooncake
@pytest.mark.parametrize("write_by", [Reach.MOONCAKE, Reach.TCP])
@pytest.mark.parametrize("layout", [LAYOUT, LARGE], ids=["small", "large"])
async def test_the_same_bytes_as_by_every_way(tmp_path: Path, write_by: Reach, layout: BlockLayout) -> None:
    async with a_pool(tmp_path, 6, layout=layout, mooncake=MOONCAKE) as pool:
        lease = await a_lease(pool, 5)
        blocks = random_runs(5 * layout.layers, layout=layout).reshape(5, layout.layers, -1)
        out, pages = np.zeros_like(blocks), np.zeros((7, layout.run_bytes), np.uint8)
        grants, order = [lease.targets[n] for n in (3, 0, 1, 4, 2)], [6, 0, 5, 2, 3]
        writer, reader = a_mover(pool, lease, write_by), a_mover(pool, lease)
        try:
            await writer.write_blocks(grants, blocks, Priority.STORE)
            assert await reader.read_blocks(grants, list(out), Priority.LOAD) == 5
            assert np.array_equal(out, blocks)
            assert await reader.read(1, grants, pages, order, Priority.LOAD) == 5
            assert np.array_equal(pages[order], blocks[:, 1])
            assert way_of(reader, lease)._way is not None
            pool.segments[0].memory.runs[grants[2].slot, 1, 7] ^= 1
            assert await reader.read_blocks(grants, out, Priority.LOAD) == 2
            assert way_of(reader, lease)._way is not None, "a bad run is no fault of the engine's"
        finally:
            await writer.aclose()
            await reader.aclose()


@needs_mooncake
async def test_a_late_writer_changes_nothing(pool: Pool) -> None:
    old = await a_lease(pool, 12)
    await pool.directory.release(old.lease)
    new = await a_lease(pool, 12)
    mover, source = a_mover(pool, new), random_runs(12)
    try:
        await mover.write(0, new.targets, source, range(12), Priority.STORE)
        before = pool.segments[0].memory.runs.copy()
        with pytest.raises(Stale):
            await mover.write(0, old.targets, random_runs(12, seed=5), range(12), Priority.STORE)
        assert np.array_equal(pool.segments[0].memory.runs, before)
        assert await mover.read(0, old.targets, source.copy(), range(12), Priority.LOAD) == 0
    finally:
        await mover.aclose()


@needs_mooncake
async def test_when_the_segments_engine_is_gone_the_same_hop_goes_by_stream(pool: Pool) -> None:
    lease, source = await a_lease(pool), random_runs(6)
    mover, out = a_mover(pool, lease), np.zeros_like(source)
    try:
        await mover.write(0, lease.targets, source, range(6), Priority.STORE)
        service = pool.services[0]._mooncake
        assert service is not None
        service._engine.close()
        assert await mover.read(0, lease.targets, out, range(6), Priority.LOAD) == 6
        assert np.array_equal(out, source)
        assert way_of(mover, lease)._way is None
        await mover.write(1, lease.targets, source, range(6), Priority.STORE)
    finally:
        await mover.aclose()


@needs_mooncake
async def test_a_segment_that_does_not_offer_it_is_reached_by_stream(tmp_path: Path) -> None:
    async with a_pool(tmp_path, 6) as pool:
        lease, source = await a_lease(pool), random_runs(6)
        mover, out = a_mover(pool, lease), np.zeros_like(source)
        try:
            await mover.write(0, lease.targets, source, range(6), Priority.STORE)
            assert await mover.read(0, lease.targets, out, range(6), Priority.LOAD) == 6
            assert np.array_equal(out, source)
            assert way_of(mover, lease)._way is None
        finally:
            await mover.aclose()


@needs_mooncake
async def test_a_pull_from_nobody_is_refused_and_writes_nothing(pool: Pool) -> None:
    before = pool.segments[0].memory.runs.copy()
    async with Client(pool.transport, pool.address) as client:
        for wrong in ({"session": "127.0.0.1:1"}, {"first": 3}, {"slots": []}, {"checksums": []}):
            fields = {"session": "127.0.0.1:1", "first": 0, "slots": [0], "checksums": [1]} | wrong
            ask = PullRuns(address=4096, width=1, generations=[1], **fields)  # type: ignore[arg-type]
            with pytest.raises(RemoteError):
                await client.call(ask, Done, within_s=10.0)
    assert np.array_equal(pool.segments[0].memory.runs, before)


@needs_mooncake
async def test_a_cancelled_read_touches_nothing_afterwards(pool: Pool) -> None:
    lease, source = await a_lease(pool), random_runs(6)
    mover = a_mover(pool, lease)
    try:
        await mover.write(0, lease.targets, source, range(6), Priority.STORE)
        for ticks in range(12):
            out = np.zeros_like(source)
            reading = asyncio.create_task(mover.read(0, lease.targets, out, range(6), Priority.LOAD))
            for _ in range(ticks):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            then = out.copy()
            await asyncio.sleep(0.01)
            assert np.array_equal(out, then)
        assert await mover.read(0, lease.targets, out, range(6), Priority.LOAD) == 6
        assert np.array_equal(out, source)
    finally:
        await mover.aclose()


@needs_mooncake
def test_the_environment_is_as_before() -> None:
    before = dict(os.environ)
    MOONCAKE.require()
    assert dict(os.environ) == before


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ValueError, match=r"pip install 'dango-serve\[mooncake\]'.*libibverbs1"):
        MooncakeSettings().require()


@pytest.mark.skipif(RDMA_DEVICES.is_dir(), reason="this machine has RDMA")
def test_rdma_without_a_device_is_told() -> None:
    with pytest.raises(ValueError, match="no RDMA device"):
        MooncakeSettings("rdma").require()
