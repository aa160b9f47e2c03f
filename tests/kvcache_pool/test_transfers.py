"""Transfers held by handles: what they tell, how they end, and that of what fails only that is done again."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvcache_pool.announcing import place_of
from kvcache_pool.api import (
    Announce,
    Announced,
    Blocks,
    Corrupt,
    Found,
    Grant,
    Place,
    PoolFull,
    Priority,
    SegmentStats,
    StreamPort,
)
from kvcache_pool.client import KVCachePool
from kvcache_pool.leasing import Leasing
from kvcache_pool.retrying import next_source, next_target
from kvcache_pool.segment import Bytes, Segment
from kvcache_pool.segment_service import SegmentService
from kvcache_pool.transfer.copiers import HOP_BYTES
from kvcache_pool.transfer.mover import Fetched, PoolMover, Reach
from kvcache_pool.transfers import MOVING_MAX, Progress, Status, Transfer, Transfers
from protocol.blocks import BlockLayout
from protocol.errors import DangoError, DeadlineExceeded, PeerLost
from protocol.ids import BlockHash, Incarnation, SegmentId, tenant_id
from protocol.rpc import Client, Server
from protocol.zmq_transport import ZmqTransport
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_pool, a_segment, an_ask, names
from tests.kvcache_pool.flaky import Relay
from tests.kvcache_pool.test_client import a_client, at_rest, some

LARGE = BlockLayout(2, 8, 64, 64, "float32")
"""Blocks of half a MiB: four in a hop."""


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 16) as pool:
        yield pool
        await at_rest(pool)


# -- handles ----------------------------------------------------------------------------------------


class Gate:
    """What a transfer does here: count a block each time it is let."""

    def __init__(self) -> None:
        self.steps = asyncio.Semaphore(0)
        self.begun = 0
        self.ended = 0

    async def move(self, progress: Progress) -> int:
        self.begun += 1
        try:
            while progress.done < progress.total:
                await self.steps.acquire()
                progress.done += 1
            return progress.total
        finally:
            self.ended += 1

    async def fail(self, _: Progress) -> int:
        await self.steps.acquire()
        raise PeerLost("the segment is gone")


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_handle_tells_how_far_its_transfer_is() -> None:
    gate = Gate()
    async with Transfers(at_once=1) as transfers:
        first, second = (transfers.start(gate.move, 2, Priority.LOAD, None) for _ in range(2))
        assert (first.status, first.blocks_done, first.blocks_total) == (Status.WAITING, 0, 2)
        await turns()
        assert (first.status, second.status, gate.begun) == (Status.MOVING, Status.WAITING, 1)
        gate.steps.release()
        await turns()
        assert (first.status, first.blocks_done, second.blocks_done) == (Status.MOVING, 1, 0)
        gate.steps.release()
        assert await first == await first == 2
        await turns()
        assert (first.status, second.status) == (Status.DONE, Status.MOVING)
        assert (first.error, first.cancel()) == (None, False)
        for _ in range(2):
            gate.steps.release()
    assert second.status is Status.DONE


async def test_who_waits_for_the_line_of_one_priority_does_not_wait_for_another() -> None:
    gate = Gate()
    async with Transfers(at_once=2) as transfers:
        saving = [transfers.start(gate.move, 1, Priority.WRITE_BACK, None) for _ in range(5)]
        await turns()
        load = transfers.start(gate.move, 1, Priority.LOAD, None)
        await turns()
        assert [one.status for one in saving].count(Status.MOVING) == 2
        assert load.status is Status.MOVING
        for _ in range(6):
            gate.steps.release()


async def test_too_many_are_refused_and_change_nothing() -> None:
    gate = Gate()
    async with Transfers(open_max=3) as transfers:
        some_ = [transfers.start(gate.move, 1, Priority.STORE, None) for _ in range(3)]
        with pytest.raises(asyncio.QueueFull, match="3 transfers are open"):
            transfers.start(gate.move, 1, Priority.STORE, None)
        with pytest.raises(ValueError, match="more than no time"):
            transfers.start(gate.move, 1, Priority.STORE, 0.0)
        for _ in range(3):
            gate.steps.release()
        assert [await one for one in some_] == [1, 1, 1]
        gate.steps.release()
        assert await transfers.start(gate.move, 1, Priority.STORE, None) == 1
    with pytest.raises(PeerLost, match="closed"):
        transfers.start(gate.move, 1, Priority.STORE, None)


async def test_cancelling_ends_what_moves_and_what_waits_and_lets_the_next_in() -> None:
    gate = Gate()
    async with Transfers(at_once=1) as transfers:
        moving, waiting, last = (transfers.start(gate.move, 1, Priority.LOAD, None) for _ in range(3))
        await turns()
        for one in (waiting, moving):
            assert one.cancel()
            assert await one.wait() is Status.CANCELLED
            with pytest.raises(asyncio.CancelledError):
                await one
            assert one.error is None
        gate.steps.release()
        assert await last == 1
    assert gate.begun == gate.ended == 2


async def test_who_is_cancelled_while_awaiting_leaves_the_transfer_alone() -> None:
    gate = Gate()
    async with Transfers() as transfers:
        one = transfers.start(gate.move, 1, Priority.LOAD, None)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one._result(), 0.01)
        assert one.status is Status.MOVING
        gate.steps.release()
        assert await one == 1


async def test_time_that_is_over_ends_what_moves_and_what_waits() -> None:
    gate = Gate()
    async with Transfers(at_once=1) as transfers:
        moving, waiting = (transfers.start(gate.move, 3, Priority.LOAD, 0.05) for _ in range(2))
        gate.steps.release()
        for one, moved in ((moving, 1), (waiting, 0)):
            with pytest.raises(DeadlineExceeded, match=f"{moved} of 3 blocks were moved within 0.05 s"):
                await one
            assert one.status is Status.FAILED
            assert isinstance(one.error, DeadlineExceeded)
    assert gate.begun == gate.ended == 1


@pytest.mark.parametrize("keeps", [True, False])
async def test_an_error_that_nobody_asks_for_is_told_once_and_in_our_own_words(
    keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    unheard: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    gate = Gate()
    async with Transfers() as transfers:
        with caplog.at_level(logging.WARNING, "dango.pool"):
            kept: list[Transfer] = [transfers.start(gate.fail, 7, Priority.LOAD, None)]
            if not keeps:
                kept.clear()
            gate.steps.release()
            await turns()
            assert len(caplog.records) == (0 if keeps else 1)
            kept.clear()
            gc.collect()
            (record,) = caplog.records
            assert record.getMessage() == ("a transfer of 7 blocks failed, and nobody asked: the segment is gone")
    assert unheard == []


@pytest.mark.parametrize("how", ["awaited", "asked"])
async def test_an_error_that_somebody_has_heard_is_not_told_again(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    async with Transfers() as transfers:
        one = transfers.start(gate.fail, 7, Priority.LOAD, None)
        gate.steps.release()
        if how == "awaited":
            with pytest.raises(PeerLost):
                await one
        else:
            await turns()
            assert isinstance(one.error, PeerLost)
        del one
        gc.collect()
    assert caplog.records == []


async def test_leaving_by_an_error_cancels_what_is_open_and_leaving_else_waits_for_it() -> None:
    gate = Gate()
    started: list[Transfer] = []

    async def leave(error: bool = False) -> Transfer:
        async with Transfers() as transfers:
            started.append(transfers.start(gate.move, 1, Priority.LOAD, None))
            if error:
                await turns()
                raise KeyError
            return started[-1]

    with pytest.raises(KeyError):
        await leave(error=True)
    assert (started[0].status, gate.ended) == (Status.CANCELLED, 1)

    leaving = asyncio.create_task(leave())
    await turns()
    assert not leaving.done()
    gate.steps.release()
    assert (await leaving).status is Status.DONE

    leaving = asyncio.create_task(leave())
    await turns()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert gate.begun == gate.ended


# -- over a pool ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", ["shm", "tcp"])
async def test_started_transfers_do_what_put_and_get_into_do(pool: Pool, reach: str) -> None:
    blocks = some(6)
    async with a_client(pool, reach=reach) as client:
        first = client.start_put(names(1, 2), blocks[:2])
        assert (first.status, first.blocks_total) == (Status.WAITING, 2)
        assert await first == 2
        both = [client.start_put(chain, blocks[: len(chain)]) for chain in (names(1, 2, 3, 4), names(1))]
        assert [await one for one in both] == [2, 0]
        assert [one.blocks_done for one in both] == [4, 1]
        out = np.zeros_like(blocks)
        load = client.start_get_into(names(1, 2, 3, 4, 5, 6), out)
        assert (await load, load.blocks_done, load.blocks_total) == (4, 4, 6)
        assert np.array_equal(out[:4], blocks[:4])
        left = client.start_put(names(7), some(1))
    assert left.status is Status.DONE
    assert (await pool.directory.lookup(names(7))).reach == 1


async def test_many_more_than_may_move_all_end(pool: Pool) -> None:
    blocks = some(12)
    async with a_client(pool) as client:
        puts = [client.start_put(names(n), blocks[n : n + 1]) for n in range(12)] * 3
        outs = [np.zeros_like(blocks[:1]) for _ in range(5 * MOVING_MAX)]
        assert [await one for one in puts] == [1] * 36
        loads = [client.start_get_into(names(n % 12), out) for n, out in enumerate(outs)]
        assert [await one for one in loads] == [1] * len(outs)
        assert all(np.array_equal(out[0], blocks[n % 12]) for n, out in enumerate(outs))


async def test_what_cannot_be_started_is_refused_at_once(pool: Pool) -> None:
    async with a_client(pool) as client:
        with pytest.raises(ValueError, match="2 blocks of 6144 bytes"):
            client.start_put(names(1, 2), some(3))
        with pytest.raises(ValueError, match="read-only"):
            client.start_get_into(names(1), bytes(LAYOUT.block_bytes))
        with pytest.raises(ValueError, match="within_s"):
            client.start_get_into(names(1), some(1), within_s=-1.0)
        assert not client._transfers._tasks
        with pytest.raises(PoolFull):
            await client.start_put(names(*range(17)), some(17))


@pytest.mark.parametrize("ends", ["cancelled", "late"])
async def test_memory_is_not_touched_after_a_load_has_ended(tmp_path: Path, ends: str) -> None:
    """Half of the blocks have come, and the rest comes only after the end."""
    async with a_pool(tmp_path, 8, layout=LARGE) as pool:
        blocks, chain = some(8, layout=LARGE), names(*range(8))
        async with a_client(pool, reach="tcp", layout=LARGE) as client:
            await client.put(chain, blocks)
            async with relayed(client, pool) as relay:
                relay.stop_at = relay.came + HOP_BYTES // 2
                out = np.zeros_like(blocks)
                load = client.start_get_into(chain, out, within_s=0.4 if ends == "late" else None)
                await asyncio.wait_for(relay.stopped.wait(), 10.0)
                if ends == "cancelled":
                    load.cancel()
                with pytest.raises(DeadlineExceeded if ends == "late" else asyncio.CancelledError):
                    await load
                assert load.status is (Status.FAILED if ends == "late" else Status.CANCELLED)
                out[:] = 7
                relay.go_on()
                await asyncio.sleep(0.2)
                assert np.all(out == 7)
            assert np.array_equal(await client.get(chain), blocks)


async def test_a_put_whose_time_is_over_leaves_nothing(tmp_path: Path) -> None:
    async with a_pool(tmp_path, 8, layout=LARGE) as pool, a_client(pool, reach="tcp", layout=LARGE) as client:
        await client.put(names(9), some(1, layout=LARGE))
        async with relayed(client, pool) as relay:
            relay.stop_at = relay.came
            put = client.start_put(names(1, 2), some(2, layout=LARGE), within_s=0.3)
            with pytest.raises(DeadlineExceeded, match="0 of 2 blocks"):
                await put
            relay.go_on()
        await at_rest(pool)
        assert await client.exists(names(1, 2, 9)) == [False, False, True]


# -- of what fails, only that -----------------------------------------------------------------------


@asynccontextmanager
async def relayed(client: KVCachePool, pool: Pool) -> AsyncIterator[Relay]:
    """The streams of the pool's first segment go through a relay."""
    route = client._leasing.mover._routes[pool.segments[0].segment]
    real = route._port  # type: ignore[attr-defined]
    async with Relay(real.port) as relay:
        route._drop_idle()  # type: ignore[attr-defined]
        route._port = StreamPort(relay.port, real.token)  # type: ignore[attr-defined]
        yield relay


class Counting:
    """A mover whose calls are counted, and some of which fail as they were told to."""

    def __init__(self, inner: PoolMover) -> None:
        self._inner = inner
        self.stored: list[list[Grant]] = []
        self.fetched: list[list[Grant]] = []
        self.faults: dict[int, DangoError] = {}
        """Of the stores by their numbers: nothing is written."""

    def know(self, places: Sequence[Place]) -> None:
        self._inner.know(places)

    async def store_blocks(
        self, grants: Sequence[Grant], blocks: Blocks, priority: Priority
    ) -> dict[SegmentId, DangoError]:
        self.stored.append(list(grants))
        if (error := self.faults.get(len(self.stored) - 1)) is not None:
            return {grant.segment: error for grant in grants}
        return await self._inner.store_blocks(grants, blocks, priority)

    async def fetch_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> Fetched:
        self.fetched.append(list(grants))
        return await self._inner.fetch_blocks(grants, blocks, priority)


def count(client: KVCachePool, blocks: int) -> Counting:
    """Batches of so many blocks, through a mover that counts."""
    leasing = client._leasing
    counting = Counting(leasing.mover)
    size = blocks * client.layout.block_bytes
    client._leasing = Leasing(counting, client.layout, "client", client._tenant, size)  # type: ignore[arg-type]
    client._leasing.near = leasing.near
    client._leasing._returns = leasing._returns
    return counting


@pytest.mark.parametrize("error", [PeerLost("broke"), DeadlineExceeded("slow"), Corrupt("changed")])
async def test_of_a_put_only_the_batch_that_failed_is_written_again(pool: Pool, error: DangoError) -> None:
    blocks, chain = some(8), names(*range(8))
    async with a_client(pool) as client:
        mover = count(client, 2)
        mover.faults = {2: error}
        put = client.start_put(chain, blocks)
        assert (await put, put.blocks_done) == (8, 8)
        first, second, third, again, last = mover.stored
        assert again == third
        assert len({*first, *second, *third, *last}) == 8
        assert np.array_equal(await client.get(chain), blocks)


async def test_a_put_that_fails_twice_in_its_only_segment_fails_and_leaves_nothing(pool: Pool) -> None:
    async with a_client(pool) as client:
        mover = count(client, 2)
        mover.faults = {2: PeerLost("broke"), 3: PeerLost("broke again")}
        with pytest.raises(PeerLost, match="broke again"):
            await client.put(names(*range(8)), some(8))
        assert len(mover.stored) == 4
        await at_rest(pool)
        assert pool.index.stats().cached == 0
        mover.faults = {number: PeerLost("now and then") for number in (5, 7, 9)}
        assert await client.put(names(*range(8)), some(8)) == 8  # never twice in a row


async def test_a_lease_that_is_lost_is_the_reason_to_write_all_again_once(pool: Pool) -> None:
    blocks, chain = some(6), names(*range(6))

    class Losing(Counting):
        lost = 0

        async def store_blocks(
            self, grants: Sequence[Grant], blocks: Blocks, priority: Priority
        ) -> dict[SegmentId, DangoError]:
            if len(self.stored) % 3 == 2 and self.lost:
                self.lost -= 1
                for lease in [*pool.index._leases._current]:
                    pool.index.release(lease)
            return await super().store_blocks(grants, blocks, priority)

    async with a_client(pool) as client:
        count(client, 2)
        mover = client._leasing.mover = Losing(client._leasing.mover)  # type: ignore[assignment, arg-type]
        mover.lost = 1
        put = client.start_put(chain, blocks)
        assert (await put, put.blocks_done) == (6, 6)
        assert [len(batch) for batch in mover.stored] == [2, 2, 2, 2, 2, 2]
        assert np.array_equal(await client.get(chain), blocks)
        await client.clear()
        mover.lost = 2
        mover.stored.clear()
        with pytest.raises(DangoError, match="has ended"):
            await client.put(chain, blocks)
        assert pool.index.stats().cached == 0


class Guest:
    """A segment with a service of its own, which can be killed."""

    def __init__(self, pool: Pool, folder: Path, name: str, slots: int, layout: BlockLayout) -> None:
        self.segment: Segment = a_segment(slots, name, folder, layout)
        self._service = SegmentService(self.segment, "tcp://127.0.0.1:0")
        self._transport = ZmqTransport()
        server = Server(self._transport.bind("tcp://127.0.0.1:0"), self._service.handlers())
        self.place = place_of(self.segment, server.address, "far")
        self._pool = pool
        self._tasks = [asyncio.create_task(server.serve()), asyncio.create_task(self._announce())]

    async def _announce(self) -> None:
        async with Client(self._transport, self._pool.address) as client:
            while True:
                await client.call(Announce(self.place, self.segment.generation), Announced, within_s=5.0)
                await asyncio.sleep(0.3)

    async def joined(self) -> None:
        async with asyncio.timeout(5.0):
            while self.place.segment not in self._pool.index.segments():  # noqa: ASYNC110 - only it can tell
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        """Without a farewell. Twice is no error."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._service.close)
        self._transport.close()
        self.segment.close()


@asynccontextmanager
async def guests(
    pool: Pool, folder: Path, *slots: int, layout: BlockLayout = LAYOUT
) -> AsyncIterator[list[Guest]]:
    all_of_them = [Guest(pool, folder, f"guest-{n}", count, layout) for n, count in enumerate(slots)]
    try:
        for one in all_of_them:
            await one.joined()
        yield all_of_them
    finally:
        for one in all_of_them:
            await one.kill()


async def replicate(client: KVCachePool, pool: Pool, chain: list[BlockHash], near: Guest, blocks: Bytes) -> None:
    """The last `len(blocks)` of a cached chain are in this segment too."""
    ask = an_ask(chain[len(chain) - len(blocks) :], near=near.place.segment, copies=len(blocks))
    lease = await pool.directory.acquire(ask)
    assert len(lease.copies) == len(blocks)
    client._leasing.mover.know(lease.places)
    await client._leasing.mover.write_blocks([one.target for one in lease.copies], blocks, Priority.STORE)
    await pool.directory.commit(lease.lease, list(range(len(blocks))), ask.blocks)
    await pool.directory.release(lease.lease)


@pytest.mark.parametrize("killed", [False, True])
async def test_of_a_get_that_breaks_in_the_middle_the_rest_comes_from_another_replica(
    tmp_path: Path, killed: bool
) -> None:
    """The connection breaks after the first hop; then the segment is gone, or only its streams are."""
    blocks, chain = some(12, layout=LARGE), names(*range(12))
    async with (
        a_pool(tmp_path, 1, layout=LARGE) as pool,
        guests(pool, tmp_path, 16, 64, layout=LARGE) as (one, other),
        a_client(pool, layout=LARGE) as client,
    ):
        client._leasing.near = one.place.segment
        await client.put(chain, blocks)
        await replicate(client, pool, chain, other, blocks[2:])
        mover = client._leasing.mover
        route = mover._routes[one.place.segment]
        real = route._port  # type: ignore[attr-defined]
        async with Relay(real.port) as relay:
            route._drop_idle()  # type: ignore[attr-defined]
            route._port = StreamPort(relay.port, real.token)  # type: ignore[attr-defined]
            relay.stop_at, relay.when_cut = 5 * HOP_BYTES // 2, one.kill if killed else turns
            counting = Counting(mover)
            client._leasing.mover = counting  # type: ignore[assignment]
            out = np.zeros_like(blocks)
            load = client.start_get_into(chain, out)
            assert (await load, load.blocks_done) == (12, 12)
        assert np.array_equal(out, blocks)
        first, *again = counting.fetched
        assert len(first) == 12
        if killed:
            (rest,) = again
            assert {grant.segment for grant in rest} == {other.place.segment}
            assert 2 <= len(rest) < 12
        else:
            assert again == []  # the service brought the hops that had not ended


async def test_where_no_other_has_it_a_get_that_breaks_keeps_what_has_come(tmp_path: Path) -> None:
    blocks, chain = some(12, layout=LARGE), names(*range(12))
    async with (
        a_pool(tmp_path, 1, layout=LARGE) as pool,
        guests(pool, tmp_path, 16, layout=LARGE) as (one,),
        a_client(pool, layout=LARGE) as client,
    ):
        client._leasing.near = one.place.segment
        await client.put(chain, blocks)
        route = client._leasing.mover._routes[one.place.segment]
        real = route._port  # type: ignore[attr-defined]
        async with Relay(real.port) as relay:
            route._drop_idle()  # type: ignore[attr-defined]
            route._port = StreamPort(relay.port, real.token)  # type: ignore[attr-defined]
            relay.stop_at, relay.when_cut = 5 * HOP_BYTES // 2, one.kill
            good = await client.get(chain)
        assert 0 < len(good) < 12
        assert np.array_equal(good, blocks[: len(good)])
        assert (await client.lookup(chain)).blocks in (12, 0)  # none was taken for bad; it may be silent by now


async def test_a_bad_block_is_had_from_another_replica_and_only_that(tmp_path: Path) -> None:
    blocks, chain = some(6), names(*range(6))
    async with a_pool(tmp_path, 8, 32) as pool, a_client(pool, reach="shm") as client:
        client._leasing.near = pool.segments[0].segment
        await client.put(chain, blocks)
        lease = await pool.directory.acquire(an_ask(chain, near="kv-1", copies=6))
        writer = PoolMover(pool.transport, HOST, Reach.SHM)
        writer.know(lease.places)
        await writer.write_blocks([one.target for one in lease.copies], blocks, Priority.STORE)
        await pool.directory.commit(lease.lease, list(range(6)), chain)
        await pool.directory.release(lease.lease)
        await writer.aclose()
        first = {name: grant for name, place, grant in pool.index.named() if place.segment == "kv-0"}
        for bad in (1, 4):
            pool.segments[0].memory.runs[first[chain[bad]].slot, 2, 0] ^= 1
        mover = count(client, 64)
        good = await client.get(chain)
        assert np.array_equal(good, blocks)
        assert [len(grants) for grants in mover.fetched] == [6, 5, 2]
        assert {grant.segment for grant in mover.fetched[0]} == {"kv-0"}
        assert [len(pool.index._replicas.of(name)) for name in chain] == [2, 1, 2, 2, 1, 2]


async def test_a_put_to_a_segment_that_is_gone_goes_to_another_with_all_that_was_there(tmp_path: Path) -> None:
    blocks, chain = some(6), names(*range(6))
    async with (
        a_pool(tmp_path, 16) as pool,
        guests(pool, tmp_path, 16) as (guest,),
        a_client(pool, tenant="a") as client,
    ):
        client._leasing.near = guest.place.segment
        mover = count(client, 2)

        class Dying(Counting):
            async def store_blocks(
                self, grants: Sequence[Grant], blocks: Blocks, priority: Priority
            ) -> dict[SegmentId, DangoError]:
                if len(self.stored) == 2:
                    await guest.kill()
                return await super().store_blocks(grants, blocks, priority)

        dying = client._leasing.mover = Dying(mover)  # type: ignore[assignment, arg-type]
        put = client.start_put(chain, blocks)
        assert (await put, put.blocks_done) == (6, 6)
        where = [{grant.segment for grant in grants} for grants in dying.stored]
        assert where == [{"guest-0"}] * 4 + [{"kv-0"}] * 3
        client._leasing.near = SegmentId("kv-0")
        assert np.array_equal(await client.get(chain), blocks)
        assert {note.tenant for note in pool.index.catalogue(SegmentId("kv-0"), -1, 9)} == {tenant_id("a")}
        await at_rest(pool)


def stats_of(name: str, free: int, on_disk: bool = False, cached: int = 0, leased: int = 0) -> SegmentStats:
    return SegmentStats(SegmentId(name), Incarnation("a"), HOST, 100, free, cached, leased, 0, 0, on_disk)


def test_what_is_lost_is_had_from_the_segment_that_has_most_of_it() -> None:
    found, here = Found(9, {"a": 9, "b": 2, "c": 5, "d": 5}), SegmentId("d")
    assert next_source(found, set(), here) == (9, here)
    assert next_source(found, {SegmentId("a")}, here) == (5, here)
    assert next_source(found, {SegmentId("a")}, None) == (5, "c")
    assert next_source(found, {SegmentId(name) for name in "acd"}, here) == (2, "b")
    assert next_source(found, {SegmentId(name) for name in "abcd"}, here) == (0, None)
    assert next_source(Found(3, {}), {SegmentId("a")}, here) == (0, None)


def test_what_is_lost_goes_to_the_memory_with_the_most_room() -> None:
    segments = [
        stats_of("a", 90),
        stats_of("b", 10, cached=40, leased=5),
        stats_of("c", 20),
        stats_of("d", 99, True),
    ]
    assert next_target(segments, set()) == "a"
    assert next_target(segments, {SegmentId("a")}) == "b"
    assert next_target(segments, {SegmentId("a"), SegmentId("b")}) == "c"
    assert next_target(segments, {SegmentId("a"), SegmentId("b"), SegmentId("c")}) is None
