"""Tenants whose blocks are carried: whose they are afterwards, what counts meanwhile, who loses what for them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.api import Carry, Note, PinKind, Place, TenantStats, Tier, WrongTenant, new_lease
from kvcache_pool.eviction import EVICTIONS
from kvcache_pool.index import Index
from kvcache_pool.slots import Shares
from protocol.ids import NO_TENANT, Incarnation, SegmentId, TenantId, tenant_id
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_place, a_pool, an_ask, an_index, cache, copy, names
from tests.kvcache_pool.test_client import a_client, some
from tests.kvcache_pool.test_draining import begin, drain, held, note, order
from tests.kvcache_pool.test_evacuation import empty, evacuating
from tests.kvcache_pool.test_packed import INT8, kv
from tests.kvcache_pool.test_quotas import refused
from tests.kvcache_pool.test_tiers import DISK, a_disk

A, B = tenant_id("a"), tenant_id("b")
OUT, IN = SegmentId("out"), SegmentId("in")
"""What is drained, and what stays."""


def an_index_of_two(out: int, stays: int, share: float = 0.5, eviction: str = "lru") -> Index:
    return an_index(tenant_share=share, eviction=eviction, **{"out": out, "in": stays})


def blocks(index: Index, *tenants: TenantId) -> list[int]:
    return [index.tenant_stats(tenant).blocks for tenant in tenants]


# -- whose they are ---------------------------------------------------------------------------------


def test_what_is_carried_is_its_tenants_in_the_tables_and_in_the_notes() -> None:
    index = an_index_of_two(8, 8)
    cache(index, 1, 2, near="out", tenant=A)
    cache(index, 11, near="out", tenant=B)
    cache(index, 21, near="out")
    index.drain(OUT)
    begin(index, segment=OUT).end()
    whose = {*zip(names(1, 2, 11, 21), (A, A, B, NO_TENANT), strict=True)}
    told, _ = index.news(IN, 0)
    assert {(one.name, one.tenant) for one in told} == whose
    assert {(one.name, one.tenant) for one in index.catalogue(IN, -1, 9)} == whose
    note(index)
    index.settle()
    index.leave(OUT, Incarnation("a"))
    refused(index, WrongTenant, blocks=names(11), tenant=A)
    refused(index, WrongTenant, blocks=names(1, 2), tenant=NO_TENANT)
    assert len(index.acquire(an_ask(names(1, 2), tenant=A), 0.0).sources) == 2


def test_a_new_directory_carries_what_a_drained_segment_brings_as_its_tenants() -> None:
    index = Index(Shares(tenant=0.5))
    index.announce(a_place("out", 8), 0, 0.0, draining=True)
    index.announce(a_place("in", 8), 0, 0.0)
    notes = [Note(0, 1, names(1)[0], A), Note(1, 2, names(11)[0], B), Note(2, 3, names(21)[0])]
    assert index.adopt(OUT, Incarnation("a"), notes) == 3
    assert (index.tenant_stats(A), blocks(index, B)) == (TenantStats(0, 4), [0])
    assert sorted(drain(index, OUT)) == [1, 11, 21]
    assert blocks(index, A, B) == [1, 1]
    refused(index, WrongTenant, blocks=names(11), tenant=A)


def test_a_carrier_that_mixes_up_its_names_is_refused_and_changes_nothing() -> None:
    index = an_index_of_two(8, 1)
    index.announce(a_place("other", 1), 0, 0.0)
    cache(index, 1, near="out", tenant=A)
    cache(index, 11, near="out", tenant=B)
    index.drain(OUT)
    ask = Carry(new_lease(), OUT, 9, [])
    assert index.carry(ask, 0.0).blocks == names(11, 1)
    for lie in (names(1, 11), names(11, 11), names(1, 1), names(31, 31)):
        with pytest.raises(WrongTenant):
            index.commit(ask.lease, [0, 1], lie, 0.0)
        assert [held(index, one) for one in index.segments()] == [{1, 11}, set(), set()]
        index.check()
    index.commit(ask.lease, [0, 1], names(11, 1), 0.0)
    assert [held(index, one) for one in index.segments()] == [{1, 11}, {11}, {1}]


def test_anothers_blocks_are_neither_copied_nor_moved() -> None:
    index = an_index_of_two(8, 8)
    cache(index, 1, 2, near="out", tenant=A)
    for moves in (False, True):
        refused(index, WrongTenant, blocks=names(1, 2), near="in", copies=2, moves=moves, tenant=B)


# -- what counts ------------------------------------------------------------------------------------


def test_what_is_drained_counts_where_it_comes_to_and_once() -> None:
    index = an_index_of_two(8, 8)
    cache(index, 1, 2, 3, near="out", tenant=A)
    cache(index, 4, near="in", tenant=A)
    assert index.tenant_stats(A) == TenantStats(4, 8)
    index.drain(OUT)
    assert index.tenant_stats(A) == TenantStats(1, 4), "the pool is as small as it will be"
    one = begin(index, 2, segment=OUT)
    assert index.tenant_stats(A) == TenantStats(3, 4)
    one.end()
    assert index.tenant_stats(A) == TenantStats(3, 4)
    drain(index, OUT)
    assert index.tenant_stats(A) == TenantStats(4, 4)
    index.leave(OUT, Incarnation("a"))
    assert index.tenant_stats(A) == TenantStats(4, 4)
    index.check()


def test_undone_both_places_of_a_block_count() -> None:
    index = an_index_of_two(8, 8)
    cache(index, 1, 2, near="out", tenant=A)
    index.drain(OUT)
    begin(index, 1, segment=OUT).end()
    index.drain(OUT, undo=True)
    index.drain(OUT, undo=True)
    assert index.tenant_stats(A) == TenantStats(3, 8)
    index.check()
    index.remove(names(1, 2))
    assert index.tenant_stats(A) == TenantStats(0, 8)


def test_who_writes_to_a_segment_that_is_drained_counts_when_it_is_carried() -> None:
    index = an_index_of_two(8, 8)
    writer = index.acquire(an_ask(names(1, 2), near="out", tenant=A), 0.0)
    index.drain(OUT)
    assert blocks(index, A) == [0]
    index.commit(writer.lease, [0, 1], names(1, 2), 0.0)
    index.release(writer.lease)
    assert blocks(index, A) == [0]
    drain(index, OUT)
    assert blocks(index, A) == [2]


def test_what_moves_counts_in_both_places_until_it_has_moved() -> None:
    index = an_index(a=8, b=8, tenant_share=0.5)
    cache(index, 1, 2, near="a", tenant=A)
    lease = index.acquire(an_ask(names(1, 2), near="b", copies=2, moves=True, tenant=A), 0.0)
    assert blocks(index, A) == [4]
    index.commit(lease.lease, [0, 1], names(1, 2), 0.0)
    index.release(lease.lease)
    assert blocks(index, A) == [4]
    note(index)
    index.settle()
    assert blocks(index, A) == [2]
    index.check()


def test_at_its_quota_a_tenant_moves_as_much_as_its_own_make_room_for() -> None:
    index = an_index(a=4, b=4, tenant_share=0.5)
    cache(index, 11, 12, near="b", tenant=B)
    cache(index, 1, 2, 3, near="a", tenant=A)
    cache(index, 4, near="b", tenant=A)
    lease = index.acquire(an_ask(names(1, 2, 3), near="b", copies=3, moves=True, tenant=A), 0.0)
    assert [one.source for one in lease.copies] == [0]
    assert (held(index, IN), index.tenant_stats(A)) == (set(), TenantStats(4, 4))
    assert held(index, SegmentId("b")) == {11, 12}, "of 4 is made room, not of another's"
    index.check()


def test_a_tenants_room_is_not_sought_in_what_is_drained() -> None:
    index = an_index_of_two(4, 4)
    index.announce(a_place("more", 4), 0, 0.0)
    cache(index, 1, 2, 3, 4, near="out", tenant=A)
    held_there = index.acquire(an_ask(names(5, 6), near="in", tenant=A), 0.0)
    index.drain(OUT)
    assert index.tenant_stats(A) == TenantStats(2, 4)
    refused(index, match="3 blocks wanted, 2 can be had", unnamed=3)
    index.release(held_there.lease)


# -- who loses what ---------------------------------------------------------------------------------


def test_no_drain_waits_for_a_quota_where_slots_are_free() -> None:
    index = an_index_of_two(4, 4)
    cache(index, 1, 2, 3, 4, near="out", tenant=A)
    assert drain(index, OUT) == [1, 2, 3, 4]
    assert index.tenant_stats(A) == TenantStats(4, 2)
    cache(index, 11, tenant=B)
    assert held(index, IN) == {1, 2, 3, 11}, "others need no quota of its own to go"
    cache(index, 5, tenant=A)
    assert held(index, IN) == {1, 5, 11}, "what is new has it within its quota again"
    index.check()


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_beyond_its_quota_it_takes_no_others_place_however_cold(eviction: str) -> None:
    index = an_index_of_two(4, 4, eviction=eviction)
    for number in (11, 12):
        cache(index, number, near="in", tenant=B)
    for number in (5, 6):
        cache(index, number, near="in", tenant=A)
    for number in (1, 2, 3, 4):
        cache(index, number, near="out", tenant=A)
    index.drain(OUT)
    assert drain(index, OUT, limit=1) == [4, 3]
    assert held(index, IN) == {11, 12, 3, 4}, "of its own the last two"
    assert held(index, OUT) == set()


def test_of_its_own_what_was_used_later_stays() -> None:
    index = an_index_of_two(4, 4)
    cache(index, 11, 12, near="in", tenant=B)
    cache(index, 1, near="out", tenant=A)
    cache(index, 5, 6, near="in", tenant=A)
    assert drain(index, OUT) == []
    assert (held(index, IN), held(index, OUT)) == ({11, 12, 5, 6}, set())


def test_within_its_quota_it_takes_what_is_colder_of_anybody() -> None:
    index = an_index_of_two(4, 4)
    cache(index, 13, 14, 11, 12, near="in", tenant=B)
    cache(index, 1, 2, 3, near="out", tenant=A)
    assert drain(index, OUT, limit=2) == [1, 2]
    assert held(index, IN) == {13, 14, 1, 2}, "up to its quota"


def test_what_is_pinned_is_carried_beyond_the_quota_first_in_place_of_its_tenants_own() -> None:
    index = an_index_of_two(4, 4)
    cache(index, 11, 12, near="in", tenant=B)
    cache(index, 1, 2, 3, near="out", tenant=A)
    assert index.pin(names(1, 2), PinKind.HARD, 90.0, A) == 2
    cache(index, 5, near="in", tenant=A)
    assert sorted(drain(index, OUT)) == [1, 2]
    assert (held(index, IN), held(index, OUT)) == ({11, 12, 1, 2}, set())


def test_what_is_pinned_takes_anothers_place_where_its_tenant_has_none_to_give() -> None:
    index = an_index_of_two(4, 2)
    cache(index, 11, 12, near="in", tenant=B)
    cache(index, 1, 2, near="out", tenant=A)
    index.pin(names(1, 2), PinKind.SOFT, 90.0, A)
    index.drain(OUT)
    assert index.tenant_stats(A).quota == 1
    assert sorted(drain(index, OUT)) == [1, 2]
    assert held(index, IN) == {1, 2}
    assert index.tenant_stats(A) == TenantStats(2, 1)


def test_what_is_read_beyond_the_quota_stays_as_long_as_it_is_read() -> None:
    index = an_index_of_two(4, 2)
    cache(index, 11, near="in", tenant=B)
    cache(index, 5, near="in", tenant=A)
    cache(index, 1, 2, near="out", tenant=A)
    reader = index.acquire(an_ask(names(1, 2), tenant=A), 0.0)
    assert drain(index, OUT) == [2]
    assert (held(index, IN), held(index, OUT)) == ({11, 2}, {1, 2})
    assert drain(index, OUT) == [], "the two do not drive each other out in turn"
    index.release(reader.lease)
    drain(index, OUT)
    assert (len(held(index, IN)), held(index, OUT)) == (2, set())
    assert 11 in held(index, IN)


def test_a_disk_that_is_drained_brings_a_tenant_no_more_than_its_quota() -> None:
    index = an_index(kv=8, tenant_share=0.25)
    disk = SegmentId("kv.disk")
    index.announce(Place(disk, Incarnation("d"), "", HOST, "", 8, LAYOUT, Tier.DISK), 0, 0.0)
    notes = [Note(n, n + 1, name, A) for n, name in enumerate(names(1, 2, 3))]
    notes += [Note(n + 3, n + 4, name, B) for n, name in enumerate(names(11, 12, 13))]
    assert index.adopt(disk, Incarnation("d"), notes) == 6
    index.remove(names(13))
    index.pin(names(1), PinKind.SOFT, 90.0)
    assert sorted(drain(index, disk)) == [1, 3, 11, 12]
    assert (held(index, SegmentId("kv")), held(index, disk)) == ({1, 3, 11, 12}, set())
    assert (blocks(index, A, B), index.stats().free) == ([2, 2], 4), "nor where slots are free"


def test_what_was_copied_elsewhere_is_the_first_of_its_own_to_make_room() -> None:
    index = an_index(out=4, a=2, b=2, tenant_share=0.5, copies_share=1.0)
    cache(index, 11, near="a", tenant=B)
    cache(index, 12, near="b", tenant=B)
    cache(index, 1, near="out", tenant=A)
    cache(index, 5, near="a", tenant=A)
    copy(index, 5, near="b", tenant=A)
    assert drain(index, OUT) == [1]
    assert [held(index, SegmentId(one)) for one in "ab"] == [{11, 1}, {12, 5}]


def test_what_is_drained_makes_no_room_for_what_comes_back_from_disk() -> None:
    index = an_index(kv=4, out=4, tenant_share=0.5)
    index.announce(a_disk(), 0, 0.0)
    saved = [Note(n, n + 1, name, A) for n, name in enumerate(names(1, 2))]
    assert index.adopt(DISK, Incarnation("d"), saved) == 2
    for _ in range(2):
        index.release(index.acquire(an_ask(names(1, 2), tenant=A), 0.0).lease)
    cache(index, 5, 6, near="kv", tenant=A)
    cache(index, 7, 8, near="out", tenant=A)
    index.drain(OUT)
    reader = index.acquire(an_ask(names(5, 6), tenant=A), 0.0)
    assert index.due(DISK, 9) == []
    index.release(reader.lease)
    assert len(index.due(DISK, 9)) == 2


@pytest.mark.parametrize("limit", [1, 2, 3, 64])
def test_what_is_carried_keeps_its_turn_among_its_tenants_own(limit: int) -> None:
    index = an_index_of_two(9, 18, share=0.4)
    cache(index, 8, near="in", tenant=A)
    for chain, tenant in (((1, 2), A), ((11, 12), B), ((3,), A), ((13,), B), ((1, 2), A), ((4,), A)):
        cache(index, *chain, near="out", tenant=tenant)
    before = order(index, OUT)
    drain(index, OUT, limit=limit)
    assert order(index, IN) == [8, *before], "of all"
    slots = index._segments[IN]
    assert slots.idle._owned is not None
    own = [int.from_bytes(slots.names[slot] or b"", "big") for slot in slots.idle._owned]
    assert [number for number in own if number < 10] == [8, 3, 2, 1, 4], "of one tenant"
    assert [number for number in own if number > 10] == [12, 11, 13]
    cache(index, 5, 6, 7, 9, near="in", tenant=A)
    assert held(index, IN) == {2, 1, 4, 5, 6, 7, 9, 11, 12, 13}


# -- through services -------------------------------------------------------------------------------


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 8, 8, shares=Shares(tenant=0.5)) as pool:
        yield pool


async def test_clients_find_their_own_where_it_was_carried_to_and_its_file_says_whose_it_is(pool: Pool) -> None:
    async with a_client(pool, tenant="a") as a, a_client(pool, tenant="b") as b, evacuating(pool):
        await a.put(names(1, 2, 3), some(3, seed=1))
        await b.put(names(11, 12), some(2, seed=2))
        assert {grant.segment for *_, grant in pool.index.named()} == {"kv-0"}
        await a.drain("kv-0")
        await empty(pool)
        assert (await a.tenant(), await b.tenant()) == (TenantStats(3, 4), TenantStats(2, 4))
        assert np.array_equal(await a.get(names(1, 2, 3)), some(3, seed=1))
        assert np.array_equal(await b.get(names(11, 12)), some(2, seed=2))
        with pytest.raises(WrongTenant):
            await b.get(names(1))
        async with asyncio.timeout(10.0):
            while len(noted := pool.segments[1].noted()) < 5:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.05)
        assert {(one.name, one.tenant) for one in noted} == {
            *zip(names(1, 2, 3, 11, 12), (A, A, A, B, B), strict=True)
        }


async def test_a_client_copies_and_moves_its_own_within_its_quota_and_nobody_elses(pool: Pool) -> None:
    async with a_client(pool, tenant="a") as a, a_client(pool, tenant="b") as b:
        await a.put(names(1, 2, 3), some(3, seed=1))
        for lie in (b.copy, b.move):
            with pytest.raises(WrongTenant):
                await lie(names(1, 2, 3), "kv-1")
        assert (await a.tenant(), await b.tenant()) == (TenantStats(3, 8), TenantStats(0, 8))
        assert await a.copy(names(1, 2), "kv-1") == 2
        assert await a.tenant() == TenantStats(5, 8)
        assert await a.move(names(3), "kv-1") == 1
        async with asyncio.timeout(10.0):
            while (await a.tenant()).blocks > 5:  # noqa: ASYNC110 - until the other segment has noted it
                await asyncio.sleep(0.05)
        assert [len(pool.index._replicas.of(name)) for name in names(1, 2, 3)] == [2, 2, 1]
        assert np.array_equal(await a.get(names(1, 2, 3)), some(3, seed=1))


async def test_transfers_with_handles_are_their_clients_tenants(pool: Pool) -> None:
    out = np.zeros((2, LAYOUT.layers, LAYOUT.run_bytes), np.uint8)
    async with a_client(pool, tenant="a") as a, a_client(pool, tenant="b") as b:
        assert await a.start_put(names(1, 2), some(2, seed=1)) == 2
        assert await a.tenant() == TenantStats(2, 8)
        assert await a.start_get_into(names(1, 2), out) == 2
        assert np.array_equal(out, some(2, seed=1))
        with pytest.raises(WrongTenant):
            await b.start_get_into(names(1, 2), out)
        with pytest.raises(WrongTenant):
            await b.start_put(names(1, 3), some(2))
        assert await b.tenant() == TenantStats(0, 8)


async def test_compressed_blocks_are_their_tenants_wherever_they_go(tmp_path: Path) -> None:
    async with (
        a_pool(tmp_path, 8, 8, layout=INT8, shares=Shares(tenant=0.5)) as pool,
        a_client(pool, tenant="a", layout=INT8) as a,
        a_client(pool, tenant="b", layout=INT8) as b,
        evacuating(pool),
    ):
        assert await a.start_put(names(1, 2), kv(2 * INT8.layers, INT8)) == 2
        before = await a.get(names(1, 2))
        await a.drain("kv-0")
        await empty(pool)
        assert await a.tenant() == TenantStats(2, 4)
        assert np.array_equal(await a.get(names(1, 2)), before)
        with pytest.raises(WrongTenant):
            await b.get(names(1, 2))
