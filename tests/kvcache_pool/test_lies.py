"""A lying client or segment: refused by name of what is wrong, and nothing has changed."""

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.api import (
    Acquire,
    Announce,
    Commit,
    Corrupt,
    Discard,
    Done,
    Grant,
    LeaseLost,
    PoolFull,
    Priority,
    Renew,
    Stale,
    WriteLayer,
    new_lease,
)
from kvcache_pool.leases import ENDS_SPARE, LEASES_MAX
from kvcache_pool.segment import checksum
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.blocks import BlockLayout
from protocol.errors import RemoteError
from protocol.ids import BlockHash, LeaseId, SegmentId
from protocol.message import Message
from protocol.rpc import Client
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_place, a_pool, an_ask, an_index, names, random_runs


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 4) as pool:
        yield pool


async def refused(pool: Pool, client: Client, message: Message, why: str, *buffers: bytes) -> None:
    before = (await pool.directory.stats(), pool.segments[0].memory.runs.tobytes())
    with pytest.raises(RemoteError, match=why):
        await client.call(message, Done, *buffers, within_s=5.0)
    assert (await pool.directory.stats(), pool.segments[0].memory.runs.tobytes()) == before
    pool.index.check()


async def test_numbers_that_nobody_means(pool: Pool) -> None:
    lease = await pool.directory.acquire(an_ask(names(1)))
    ask = an_ask(names(2))
    async with Client(pool.transport, pool.address) as client:
        for lease_s in (0.0, -1.0, math.nan, math.inf, -math.inf, 1e300):
            await refused(pool, client, replace(ask, lease_s=lease_s), "a lease lasts")
            await refused(pool, client, Renew(lease.lease, lease_s), "a lease lasts")
        for field in ("reuse", "unnamed", "copies"):
            await refused(pool, client, replace(ask, **{field: -(1 << 63)}), "not negative")
        with pytest.raises(PoolFull):
            await client.call(replace(ask, unnamed=(1 << 64) - 1), Done, within_s=5.0)
        for slots in ([1], [-1], [1 << 63], [0, 0]):
            await refused(pool, client, Commit(lease.lease, slots, names(1)), "targets")


async def test_names_that_are_none(pool: Pool) -> None:
    lease = await pool.directory.acquire(an_ask(names(1)))
    long = "x" * 1000
    async with Client(pool.transport, pool.address) as client:
        await refused(pool, client, an_ask(names(2, 3, 2)), "named twice")
        await refused(pool, client, replace(an_ask(names(2)), lease=LeaseId(long)), "at most")
        await refused(pool, client, replace(an_ask(names(2)), owner=long), "at most")
        for name in (b"", b"short", b"x" * 33, b"x" * 10**6):
            await refused(pool, client, Commit(lease.lease, [0], [BlockHash(name)]), "32 bytes")


async def test_the_lease_of_another_and_one_that_never_was(pool: Pool) -> None:
    lease = await pool.directory.acquire(an_ask(names(1)))
    async with Client(pool.transport, pool.address) as client:
        await refused(pool, client, replace(an_ask(names(2)), lease=lease.lease), "already")
        for wrong in ("", "never", lease.lease + " "):
            with pytest.raises(LeaseLost):
                await client.call(Commit(LeaseId(wrong), [0], names(1)), Done, within_s=5.0)
            with pytest.raises(LeaseLost):
                await client.call(Renew(LeaseId(wrong)), Done, within_s=5.0)
        before = await pool.directory.stats()
        mine = lease.targets[0]
        strange = [
            mine._replace(generation=mine.generation + 1),
            mine._replace(generation=0),
            mine._replace(slot=1 << 62),
            mine._replace(slot=-1),
            mine._replace(segment=SegmentId("nobody's")),
        ]
        await client.call(Discard(strange), Done, within_s=5.0)
        assert await pool.directory.stats() == before
        await pool.directory.commit(lease.lease, [0], names(1))
        assert (await pool.directory.lookup(names(1))).reach == 1


async def test_what_does_not_fit_a_segment_is_not_written(pool: Pool) -> None:
    lease = await pool.directory.acquire(an_ask(names(1)))
    slot, generation = lease.targets[0].slot, lease.targets[0].generation
    run = random_runs(1)[0].tobytes()
    good = checksum(np.frombuffer(run, np.uint8), generation)
    async with Client(pool.transport, pool.address) as client:
        for count in (0, 1, len(run) - 1, len(run) + 1):
            short = (run + b"x")[:count]
            await refused(pool, client, WriteLayer(0, [slot], [generation], [good]), "a run has", short)
        for layer in (-1, LAYOUT.layers, 1 << 62):
            await refused(pool, client, WriteLayer(layer, [slot], [generation], [good]), "no layer", run)
        for wrong in (good ^ 1, -1, (1 << 64) - 1):
            await refused(pool, client, WriteLayer(0, [slot], [generation], [wrong]), "changed on its way", run)
        for beyond in (-1, 4, 1 << 62):
            await refused(pool, client, WriteLayer(0, [beyond], [generation], [good]), "no slot", run)
        for wild in (-1, 1 << 63, (1 << 64) - 1):
            await refused(pool, client, WriteLayer(0, [slot], [wild], [good]), "generation", run)
        await client.call(WriteLayer(0, [slot], [generation], [good]), Done, run, within_s=5.0)


async def test_a_committed_block_survives_a_write_with_a_wrong_checksum(pool: Pool) -> None:
    """It is verified before it is written: a reader has the block all the while."""
    lease = await pool.directory.acquire(an_ask(names(1)))
    mover = PoolMover(pool.transport, HOST, Reach.TCP)
    mover.know(lease.places)
    runs, out = random_runs(1, seed=1), random_runs(1, seed=2)
    for layer in range(LAYOUT.layers):
        await mover.write(layer, lease.targets, runs, [0], Priority.STORE)
    await pool.directory.commit(lease.lease, [0], names(1))
    grant = lease.targets[0]
    async with Client(pool.transport, pool.address) as client:
        message = WriteLayer(0, [grant.slot], [grant.generation], [7])
        with pytest.raises(Corrupt):
            await client.call(message, Done, random_runs(1, seed=3)[0].data, within_s=5.0)
        older = WriteLayer(0, [grant.slot], [grant.generation - 1], [7])
        with pytest.raises((Stale, Corrupt)):
            await client.call(older, Done, random_runs(1, seed=3)[0].data, within_s=5.0)
    assert await mover.read(0, lease.targets, out, [0], Priority.LOAD) == 1
    assert np.array_equal(out, runs)
    await mover.aclose()


async def test_a_lying_segment_does_not_join(pool: Pool) -> None:
    """It would take the directory's memory, the others' room to count, or what readers take for a block."""
    place = a_place("liar")
    other = BlockLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.block_tokens * 2, LAYOUT.kv_type)
    async with Client(pool.transport, pool.address) as client:
        for slots in (0, -1, 1 << 40, (1 << 64) - 1):
            await refused(pool, client, Announce(replace(place, slots=slots)), "slots")
        for generation in (-1, 1 << 63, (1 << 64) - 1):
            await refused(pool, client, Announce(place, generation), "generation")
        await refused(pool, client, Announce(replace(place, layout=other)), "layout")
        await refused(pool, client, Announce(replace(place, segment=SegmentId("x" * 1000))), "at most")


def test_a_name_twice_in_one_ask_is_refused_and_generations_go_on() -> None:
    """It was counted twice against the room, which made another segment give too much, and generations go back."""
    index = an_index(a=1, b=2, c=3)
    first = index.acquire(an_ask(names(1), near="a"), 0.0)
    index.commit(first.lease, [0], names(1), 0.0)
    index.release(first.lease)
    before = index.stats()
    with pytest.raises(ValueError, match="named twice"):
        index.acquire(an_ask(names(1, 1), unnamed=4, near="a"), 0.0)
    assert index.stats() == before
    index.check()


def test_leases_that_come_and_go_leave_nothing() -> None:
    """Of a client gone mad: as many as it likes, of the longest kind, or so short that all are late at once."""
    index = an_index(kv=2)
    for number in range(4 * ENDS_SPARE):
        lease = index.acquire(an_ask([], lease_s=600.0), 0.0)
        index.release(lease.lease)
        index.acquire(an_ask([], lease_s=1e-9), float(number))
    index.expire(5.0 * ENDS_SPARE)
    index.check()
    assert len(index._leases._ends) <= ENDS_SPARE + 1
    assert len(index._leases._late) == 0


def test_a_lease_under_a_name_that_was_used_ends_when_it_should() -> None:
    index = an_index(kv=2)
    ask = replace(an_ask([], unnamed=1, lease_s=10.0), lease=LeaseId("again"))
    index.acquire(ask, 0.0)
    index.release(ask.lease)
    index.acquire(replace(ask, lease_s=20.0), 0.0)
    index.check()
    assert index.expire(10.0) == []
    index.check()
    assert [claim.lease for claim in index.expire(20.0)] == ["again"]
    index.check()


def test_too_many_leases_are_refused_as_such() -> None:
    index = an_index(kv=2)
    for _ in range(LEASES_MAX):
        index.acquire(an_ask([]), 0.0)
    with pytest.raises(PoolFull, match="leases"):
        index.acquire(an_ask([]), 0.0)
    index.expire(30.0)
    index.acquire(Acquire(new_lease(), "r", [], 0, 1, None), 30.0)
    index.check()


def test_a_grant_is_what_it_says() -> None:
    """Equal in one field less is another: an index never frees a slot for it."""
    index = an_index(kv=2)
    lease = index.acquire(an_ask(names(1)), 0.0)
    index.commit(lease.lease, [0], names(1), 0.0)
    grant = lease.targets[0]
    assert index.discard([Grant(grant.segment, grant.slot, grant.generation + 1)]) == 0
    assert index.find(names(1)).reach == 1
    assert index.discard([grant, grant]) == 2
    index.check()
    index.release(lease.lease)
    assert index.stats().free == 2
