"""Lives of the directory and of segments: what was granted in one is worth nothing in the next."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.api import Lease, Priority, Stale
from kvcache_pool.index import Index
from kvcache_pool.lives import LIVES_MAX, NAMES_MAX
from kvcache_pool.stock import SEGMENT_SILENT_S
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.ids import Incarnation, SegmentId
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import (
    HOST,
    LAYOUT,
    Pool,
    a_place,
    a_pool,
    an_ask,
    an_index,
    cache,
    names,
    random_runs,
)


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


def test_who_was_replaced_does_not_come_back_and_who_was_only_slow_does() -> None:
    """B49: also if it had been given up for silence when its successor came."""
    index = an_index(kv=2)
    cache(index, 1)
    assert index.silent(SEGMENT_SILENT_S + 1.0) == ["kv"]
    assert index.announce(a_place("kv", 2, "a"), 0, 5.0)
    assert index.silent(10.0) == ["kv"]
    assert index.announce(a_place("kv", 2, "b"), 0, 10.0)
    cache(index, 1)
    for now in (10.5, 11.0):
        with pytest.raises(ValueError, match="newer life"):
            index.announce(a_place("kv", 2, "a"), 0, now)
    assert not index.leave(SegmentId("kv"), Incarnation("a"))
    assert index.find(names(1)).reach == 1
    assert index.silent(14.0) == ["kv"]
    with pytest.raises(ValueError, match="newer life"):
        index.announce(a_place("kv", 2, "a"), 0, 15.0)
    assert index.announce(a_place("kv", 2, "b"), 0, 15.0)
    index.check()


def test_ten_lives_under_one_name_leave_one() -> None:
    """B49"""
    index, seen = an_index(kv=4), 0
    for life in range(100):
        assert index.announce(a_place("kv", 4, f"life {life}"), 0, float(life))
        lease = cache(index, 1, 2)
        assert min(grant.generation for grant in lease.targets) > seen
        seen = max(grant.generation for grant in lease.targets)
        assert index.stats().total == 4
        index.check()
    assert len(index._lives._of) == 1
    assert len(index._lives._of[SegmentId("kv")]) == LIVES_MAX


def test_names_of_segments_are_bounded() -> None:
    index = Index()
    for number in range(NAMES_MAX):
        index.announce(a_place(f"kv-{number}"), 0, 0.0)
        index.leave(SegmentId(f"kv-{number}"), Incarnation("a"))
    with pytest.raises(ValueError, match="names"):
        index.announce(a_place("one more"), 0, 0.0)
    assert index.announce(a_place("kv-7"), 0, 0.0)
    index.check()
