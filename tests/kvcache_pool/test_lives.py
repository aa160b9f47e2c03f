"""Lives of the directory and of segments: what was granted in one is worth nothing in the next."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.api import Lease, Priority, Stale
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_pool, an_ask, names, random_runs


@asynccontextmanager
async def a_life(folder: Path, address: str) -> AsyncIterator[Pool]:
    """A whole pool, at the same address and under the same names as the one before."""
    async with a_pool(folder, 2, listen=address, generation=time.time_ns()) as pool:
        yield pool


async def fill(mover: PoolMover, lease: Lease, seed: int) -> np.ndarray:
    runs = random_runs(2, seed)
    for layer in range(LAYOUT.layers):
        await mover.write(layer, lease.targets, runs, range(2), Priority.STORE)
    return runs


@pytest.mark.parametrize("reach", [Reach.SHM, Reach.TCP])
async def test_what_a_dead_directory_granted_never_fits_what_its_successor_grants(
    tmp_path: Path, reach: Reach
) -> None:
    """One mover, as of an instance that lives on: an old reader gets nothing, an old writer changes nothing."""
    transport = ZmqTransport()
    mover = PoolMover(transport, HOST, reach)
    address = "tcp://127.0.0.1:0"
    try:
        async with a_life(tmp_path, address) as pool:
            address = pool.address
            old = await pool.directory.acquire(an_ask(names(1, 2)))
            mover.know(old.places)
            await fill(mover, old, seed=1)
        async with a_life(tmp_path, address) as pool:
            new = await pool.directory.acquire(an_ask(names(3, 4)))
            assert [grant.slot for grant in new.targets] == [grant.slot for grant in old.targets]
            mover.know(new.places)
            written = await fill(mover, new, seed=2)
            out = np.zeros_like(written)
            assert await mover.read(0, old.targets, out, range(2), Priority.LOAD) == 0
            with pytest.raises(Stale):
                await fill(mover, old, seed=3)
            for layer in range(LAYOUT.layers):
                assert await mover.read(layer, new.targets, out, range(2), Priority.LOAD) == 2
                assert np.array_equal(out, written)
    finally:
        await mover.aclose()
        transport.close()
