"""Tenants over the wire, in files, and as clients and operators see them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.announcing import announce_once, place_of
from kvcache_pool.api import (
    Catalogue,
    Commit,
    Counted,
    Directory,
    GetTenant,
    Note,
    Pin,
    PinKind,
    PoolFull,
    QuotaExceeded,
    Remove,
    TenantStats,
    Tier,
    Unpin,
    WrongTenant,
)
from kvcache_pool.client import KVCachePool
from kvcache_pool.config import KVCacheConfig
from kvcache_pool.index import Index
from kvcache_pool.service import DirectoryService
from kvcache_pool.slots import Shares
from kvcache_pool.tiers import Carrier
from kvcache_pool.transfer.copiers import Copiers
from protocol.ids import SegmentId, TenantId, tenant_id
from protocol.rpc import Client, Server
from tests.kvcache_pool.builders import HOST, Pool, a_pool, an_ask, names
from tests.kvcache_pool.test_client import MANIFEST, Conductor, a_client, at_rest, some
from tests.kvcache_pool.test_lies import refused
from tests.kvcache_pool.test_operate import Operator
from tests.kvcache_pool.test_tiers import a_disk_segment

A, B = tenant_id("a"), tenant_id("b")


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 8, shares=Shares(tenant=0.5)) as pool:
        yield pool
        await at_rest(pool)


async def test_a_client_at_its_quota_replaces_its_own_blocks_and_keeps_what_is_in_use(pool: Pool) -> None:
    async with a_client(pool, tenant="b") as b, a_client(pool, tenant="a") as a:
        await b.put(names(11, 12), some(2, seed=1))
        for first in range(1, 9, 2):
            assert await a.put(names(first, first + 1), some(2, seed=first)) == 2
        assert await a.exists(names(*range(1, 9))) == [False] * 4 + [True] * 4
        assert (await a.tenant(), await b.tenant()) == (TenantStats(4, 4), TenantStats(2, 4))
        assert np.array_equal(await a.get(names(7, 8)), some(2, seed=7))
        assert np.array_equal(await b.get(names(11, 12)), some(2, seed=1))
        with pytest.raises(QuotaExceeded, match="5 blocks wanted, 4 can be had within the tenant's quota"):
            await a.put(names(*range(21, 26)), some(5))
        assert await a.exists(names(*range(5, 9))) == [True] * 4, "refused is refused before anything goes"
        held = await pool.directory.acquire(an_ask(names(5, 6, 7, 8), reuse=4, tenant=A))
        with pytest.raises(PoolFull):
            await a.put(names(9), some(1))
        await b.put(names(13), some(1))
        await pool.directory.release(held.lease)
        stats = await a.stats()
        assert (stats.tenants, stats.largest_tenant, stats.over_quota) == (2, 4, 2)


async def test_a_client_of_a_root_is_its_tenant(pool: Pool) -> None:
    tokens = [*range(40)]
    async with KVCachePool.connect(directory=pool.address, root=MANIFEST.root("a"), host=HOST) as client:
        await client.put(tokens, some(2))
        assert await client.tenant() == TenantStats(2, 4)
        assert await client.pin(tokens, 9.0) == await client.unpin(tokens) == await client.remove(tokens) == 2
    with pytest.raises(ValueError, match="part of a root"):
        async with KVCachePool.connect(directory=pool.address, root=MANIFEST.root(), tenant="a"):
            pass


async def test_another_tenants_blocks_are_refused_by_name_and_nothing_has_changed(pool: Pool) -> None:
    async with a_client(pool, tenant="a") as a, a_client(pool, tenant="b") as b, a_client(pool) as nobody:
        await a.put(names(1, 2), some(2))
        assert await a.pin(names(1), 60.0) == 1
        lease = await pool.directory.acquire(an_ask([], unnamed=1, tenant=B))
        before = await pool.directory.stats()
        for liar in (b, nobody):
            for lie in (
                liar.get(names(1)),
                liar.put(names(2, 3), some(2)),
                liar.pin(names(2), 9.0),
                liar.unpin(names(1)),
                liar.remove(names(2)),
            ):
                with pytest.raises(WrongTenant, match=r"block 0000000000000000\.\.\. is another tenant's"):
                    await lie
        with pytest.raises(WrongTenant):
            await pool.directory.commit(lease.lease, [0], names(1))
        await at_rest_but(pool, 1)
        assert await pool.directory.stats() == before
        assert np.array_equal(await a.get(names(1, 2)), some(2))
        assert await pool.directory.unpin(names(1)) == 1, "an operator, who names no tenant, may"
        assert await pool.directory.remove(names(1, 2)) == 2
        await pool.directory.release(lease.lease)


async def at_rest_but(pool: Pool, leases: int) -> None:
    async with asyncio.timeout(5.0):
        while pool.index.stats().leases > leases:  # noqa: ASYNC110 - only the service can tell
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("tenant", [-1, -(1 << 63)])
async def test_what_stands_for_no_tenant_is_refused(pool: Pool, tenant: int) -> None:
    wild = TenantId(tenant)
    lease = await pool.directory.acquire(an_ask([], unnamed=1))
    incarnation = pool.segments[0].incarnation
    async with Client(pool.transport, pool.address) as client:
        await refused(pool, client, an_ask(names(2), tenant=wild), "not negative")
        note = Note(5, 1, names(1)[0], wild)
        await refused(pool, client, Catalogue(SegmentId("kv-0"), incarnation, [note]), "not negative")
        named = replace(an_ask(names(2)), tenant="a")  # type: ignore[arg-type]
        await refused(pool, client, named, "tenant must be int")
        assert (await client.call(GetTenant(wild), TenantStats, within_s=5.0)).blocks == 0
        for nothing in (Pin(names(1), PinKind.SOFT, 9.0, wild), Unpin(names(1), wild), Remove(names(1), wild)):
            assert (await client.call(nothing, Counted, within_s=5.0)).blocks == 0
        await refused(pool, client, Commit(lease.lease, [1], names(1)), "targets")
    await pool.directory.release(lease.lease)


async def test_a_new_directory_counts_as_the_old_one_did(pool: Pool) -> None:
    async with a_client(pool, tenant="a") as a, a_client(pool, tenant="b") as b, a_client(pool) as nobody:
        await a.put(names(1, 2, 3), some(3))
        await b.put(names(11), some(1))
        await nobody.put(names(21), some(1))
    segment, place = pool.segments[0], pool.place()
    async with Client(pool.transport, pool.address) as old:
        number = await announce_once(old, segment, place, 0)
    index = Index(Shares(tenant=0.5))
    server = Server(pool.transport.bind("tcp://127.0.0.1:0"), DirectoryService(index).handlers())
    task = asyncio.create_task(server.serve())
    try:
        async with Client(pool.transport, server.address) as client:
            await announce_once(client, segment, place, number)
            directory = Directory(client)
            assert await directory.tenant(A) == TenantStats(3, 4)
            assert await directory.tenant(B) == TenantStats(1, 4)
            assert (await directory.stats()).cached == 5
            with pytest.raises(WrongTenant):
                await directory.acquire(an_ask(names(1), tenant=B))
            with pytest.raises(QuotaExceeded):
                await directory.acquire(an_ask(names(1, 2, 3), unnamed=2, tenant=A))
            index.check()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_each_tenants_blocks_go_to_disk_and_back_as_that_tenants(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    disk = a_disk_segment(tmp_path / "disk")
    copiers = Copiers()
    try:
        async with Client(pool.transport, pool.address) as client:
            await announce_once(client, disk, place_of(disk, "tcp://nowhere", HOST, Tier.DISK), 0)
        down, up = (Carrier(*ends, copiers) for ends in ((pool.segments[0], disk), (disk, pool.segments[0])))
        async with a_client(pool, tenant="a") as a, a_client(pool, tenant="b") as b:
            await a.put(names(1, 2), some(2, seed=1))
            await b.put(names(11, 12), some(2, seed=11))
            assert await down.round(pool.directory) == 4
            await a.put(names(3, 4, 5, 6), some(4, seed=3))
            assert await a.tenant() == TenantStats(4, 4)
            for _ in range(2):
                assert np.array_equal(await a.get(names(1, 2)), some(2, seed=1))
            assert await up.round(pool.directory) == 2
            assert await a.tenant() == TenantStats(4, 4)
            assert await b.tenant() == TenantStats(2, 4)
            with pytest.raises(WrongTenant):
                await b.get(names(3))
        pool.index.check()
    finally:
        copiers.close()
        disk.close()


async def test_an_operator_sees_a_tenant_by_name_and_all_by_number(pool: Pool) -> None:
    tokens = [*range(40)]
    async with Conductor(pool.transport, pool.address) as conductor:
        dango = Operator(conductor.address)
        async with KVCachePool.connect(conductor.address, tenant="team a", host=HOST) as client:
            await client.put(tokens, some(2))
        code, out, err = await dango("stats", "--tenant", "team a")
        assert (code, err) == (0, "")
        assert "tenants: 1, the largest with 2 blocks, 0 leases refused for a quota" in out
        assert "tenant team a: 2 blocks, 4 at most" in out
        code, out, _ = await dango("stats", "--tenant", "another", "--json")
        assert '"tenant": {"blocks": 0, "quota": 4}' in out
        prompt = [str(token) for token in tokens]
        assert (await dango("remove", *prompt))[1] == "0 blocks are forgotten\n"
        assert (await dango("remove", "--tenant", "team a", *prompt))[1] == "2 blocks are forgotten\n"


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_a_share_that_nobody_could_use_is_refused_by_name(share: float) -> None:
    with pytest.raises(ValueError, match="tenant_share must be"):
        KVCacheConfig(tenant_share=share)
