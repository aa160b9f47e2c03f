"""A writer that dies between reserving and committing, or is paused past its lease: nobody is held up by it."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from kvcache_pool.client import KVCachePool
from kvcache_pool.leases import QUARANTINE_S
from tests.kvcache_pool.builders import HOST, names
from tests.kvcache_pool.cluster import ROOT, STOP_S, UP_S, Cluster
from tests.kvcache_pool.soak_client import bytes_of
from tests.kvcache_pool.writer import BLOCKS

pytestmark = pytest.mark.cluster

LEASE_S = 1.0


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(tmp_path) as cluster:
        cluster.start("kv-w", "--size-bytes", "96KiB", "--host", HOST)
        await cluster.until(lambda: "brings 0 blocks" in cluster.said("kv-w"))
        yield cluster


@contextmanager
def a_writer(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """One that has reserved."""
    assert cluster.registry.directory is not None
    argv = [sys.executable, "-m", "tests.kvcache_pool.writer", cluster.registry.directory, str(LEASE_S)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "reserved\n"
            yield writer
        finally:
            writer.kill()


async def put_and_found(pool: KVCachePool, numbers: range) -> None:
    wanted = names(*numbers)
    await pool.put(wanted, [bytes_of(name) for name in wanted])
    assert np.array_equal(await pool.get(wanted), [bytes_of(name) for name in wanted])


async def at_rest(pool: KVCachePool, long: bool) -> None:
    """What the writer had reserved is free again, if there is time to wait for it."""
    if not long:
        assert (await pool.stats()).reserved == len(BLOCKS), "it is not given to others while it may be written"
        return
    end = time.monotonic() + LEASE_S + QUARANTINE_S + UP_S
    while (await pool.stats()).reserved:
        assert time.monotonic() < end
        await asyncio.sleep(0.2)
    await pool.clear()
    stats = await pool.stats()
    assert (stats.free, stats.leases) == (stats.total, 0)
    await put_and_found(pool, range(20, 20 + stats.total))


async def test_one_that_is_killed_leaves_its_names_to_others(cluster: Cluster, long: bool) -> None:
    async with KVCachePool.connect(cluster.conductor, host=HOST) as pool:
        with a_writer(cluster) as writer:
            assert (await pool.stats()).reserved == len(BLOCKS)
            assert not any(await pool.exists(BLOCKS))
            writer.kill()
            writer.wait(STOP_S)
        await put_and_found(pool, range(1, 4))
        assert await pool.remove(BLOCKS) == len(BLOCKS)
        assert not any(await pool.exists(BLOCKS))
        await put_and_found(pool, range(1, 3))
        await at_rest(pool, long)


async def test_one_that_is_paused_past_its_lease_commits_nothing(cluster: Cluster, long: bool) -> None:
    async with KVCachePool.connect(cluster.conductor, host=HOST) as pool:
        with a_writer(cluster) as writer:
            psutil.Process(writer.pid).suspend()
            await put_and_found(pool, range(1, 4))
            await asyncio.sleep(2 * LEASE_S)
            psutil.Process(writer.pid).resume()
            out, _ = await asyncio.to_thread(writer.communicate, "go on\n", timeout=STOP_S)
            assert out == "LeaseLost\n"
        assert np.array_equal(await pool.get(BLOCKS), [bytes_of(name) for name in BLOCKS])
        await at_rest(pool, long)


@pytest.mark.parametrize("full", [False, True], ids=["idle", "full"])
async def test_one_whose_directory_died_meanwhile_commits_nothing(cluster: Cluster, full: bool) -> None:
    """The next life's memory is the same file, in which the slots may be others' by now."""
    with a_writer(cluster) as writer:
        psutil.Process(writer.pid).suspend()
        cluster.kill("kv-w")
        cluster.start("kv-w")
        await cluster.until(lambda: cluster.said("kv-w").count(" brings ") == 2)
        async with KVCachePool.connect(cluster.conductor, host=HOST) as pool:
            total = (await pool.stats()).total
            if full:
                await put_and_found(pool, range(10, 10 + total))
            psutil.Process(writer.pid).resume()
            out, _ = await asyncio.to_thread(writer.communicate, "go on\n", timeout=STOP_S)
            assert out in ("Stale\n", "PeerLost\n", "LeaseLost\n", "DeadlineExceeded\n")
            assert not any(await pool.exists(BLOCKS))
            if full:
                mine = names(*range(10, 10 + total))
                assert np.array_equal(await pool.get(mine), [bytes_of(name) for name in mine])
            stats = await pool.stats()
            assert (stats.reserved, stats.leases) == (0, 0)
