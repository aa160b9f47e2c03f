"""Movers: the same bytes by every way, in the right order, and never more than what is good."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_pool.api import Grant, Lease, Mover, Priority, Stale
from kvcache_pool.transfer.copiers import COPY_THREADS, HOP_BYTES, Copiers, Turns, hops
from kvcache_pool.transfer.copies import Copies, Span
from kvcache_pool.transfer.grain import in_bulk
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.blocks import BlockLayout
from protocol.errors import PeerLost
from protocol.ids import Incarnation, SegmentId
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_place, a_pool, a_segment, an_ask, random_runs
from tests.kvcache_pool.faults import Faults, FaultyMover

REACHES = [Reach.SHM, Reach.TCP, Reach.SERVICE]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with a_pool(tmp_path, 12) as pool:
        yield pool


async def a_lease(pool: Pool, unnamed: int = 6) -> Lease:
    return await pool.directory.acquire(an_ask([], unnamed=unnamed))


class Moving:
    """A mover that is closed, and knows a lease's places."""

    def __init__(self, pool: Pool, lease: Lease, reach: Reach = Reach.AUTO, host: str = HOST) -> None:
        self.mover = PoolMover(pool.transport, host, reach)
        self.mover.know(lease.places)

    async def __aenter__(self) -> PoolMover:
        return self.mover

    async def __aexit__(self, *_: object) -> None:
        await self.mover.aclose()


async def store(mover: Mover, lease: Lease, layer: int, seed: int = 0) -> np.ndarray:
    source = random_runs(16, seed)
    pages = list(range(15, 15 - len(lease.targets), -1))
    await mover.write(layer, lease.targets, source, pages, Priority.STORE)
    return source[pages]


async def load(mover: Mover, grants: list[Grant], layer: int) -> tuple[int, np.ndarray]:
    out = random_runs(16, seed=99)
    pages = list(range(3, 3 + len(grants)))
    good = await mover.read(layer, grants, out, pages, Priority.LOAD)
    return good, out[pages]


@pytest.mark.parametrize("write_by", REACHES)
@pytest.mark.parametrize("read_by", REACHES)
async def test_the_same_bytes_by_every_way(pool: Pool, write_by: Reach, read_by: Reach) -> None:
    lease = await a_lease(pool)
    async with Moving(pool, lease, write_by) as writer, Moving(pool, lease, read_by) as reader:
        written = [await store(writer, lease, layer, seed=layer) for layer in range(LAYOUT.layers)]
        for layer in range(LAYOUT.layers):
            good, out = await load(reader, lease.targets, layer)
            assert good == 6
            assert np.array_equal(out, written[layer])


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("lie", ["one array", "anywhere", "strided"])
async def test_whole_blocks_come_back_wherever_they_lie(pool: Pool, reach: Reach, lie: str) -> None:
    lease = await a_lease(pool)
    shape = (6, LAYOUT.layers, LAYOUT.run_bytes)
    source, out = random_runs(6 * LAYOUT.layers, seed=1).reshape(shape), np.zeros(shape, np.uint8)
    if lie == "strided":  # as an engine's pages are: [layers, pages, run_bytes]
        source = source.swapaxes(0, 1).copy().swapaxes(0, 1)
        out = out.swapaxes(0, 1).copy().swapaxes(0, 1)
    blocks, into = (source, out) if lie == "one array" else (list(source), list(out))
    grants = [lease.targets[number] for number in (4, 0, 1, 2, 5, 3)]
    async with Moving(pool, lease, reach) as mover:
        await mover.write_blocks(grants, blocks, Priority.STORE)
        assert await mover.read_blocks(grants, into, Priority.LOAD) == 6
        assert np.array_equal(out, source)
        pool.segments[0].memory.runs[grants[2].slot, 1, 5] ^= 1
        assert await mover.read_blocks(grants, into, Priority.LOAD) == 2
        assert await mover.read_blocks([], into[:0], Priority.LOAD) == 0


def test_little_is_read_whole_and_much_layer_by_layer_more_so_from_afar() -> None:
    smollm, large = 368_640, 2 << 20
    assert [in_bulk(count, smollm, mapped=True) for count in (0, 1, 16, 22, 23, 64)] == [True] * 4 + [False] * 2
    assert [in_bulk(count, smollm, mapped=False) for count in (1, 64, 68, 69)] == [True] * 3 + [False]
    assert [in_bulk(count, large, mapped=True) for count in (4, 5)] == [True, False]
    assert [in_bulk(count, large, mapped=False) for count in (12, 13)] == [True, False]


async def test_a_mover_goes_by_the_way_to_the_segments_that_are_asked_for(tmp_path: Path) -> None:
    layout = BlockLayout(2, 8, 128, 64, "float32")  # blocks of a MiB
    async with a_pool(tmp_path, 12, layout=layout) as pool:
        lease = await a_lease(pool, 12)
        for reach, host, far in (
            (Reach.AUTO, HOST, False),
            (Reach.AUTO, "elsewhere", True),
            (Reach.SERVICE, HOST, True),
        ):
            async with Moving(pool, lease, reach, host) as mover:
                assert [mover.in_bulk(lease.targets[:count]) for count in (0, 8, 9)] == [True, True, far]
                assert mover.in_bulk([Grant(SegmentId("unheard of"), 0, 1)])


@given(
    st.permutations(range(8)), st.permutations(range(8)), st.integers(1, 8), st.integers(0, 2), st.integers(1, 3)
)
def test_many_runs_at_once_are_what_one_at_a_time_would_be(
    slots: list[int], rows: list[int], count: int, first: int, width: int
) -> None:
    width = min(width, LAYOUT.layers - first)
    span, grants = Span(first, width), [Grant(SegmentId("x"), slot, 5) for slot in slots[:count]]
    units = random_runs(8 * width, seed=3).reshape(8, width, -1)
    segment = a_segment(8, "many")
    try:
        copies, memory, run = Copies(segment.memory), segment.memory, np.zeros(LAYOUT.run_bytes, np.uint8)
        copies.put(span, grants, units, rows[:count])
        for grant, row in zip(grants, rows, strict=False):
            for layer in range(width):
                memory.get(first + layer, grant.slot, 5, run)
                assert np.array_equal(run, units[row, layer])
        for out in (np.zeros_like(units), list(np.zeros_like(units))):
            assert copies.get(span, grants, out, rows[:count]) == count
            assert all(np.array_equal(out[row], units[row]) for row in rows[:count])
        memory.checksums[grants[-1].slot, first + width - 1] ^= np.uint64(1)
        assert copies.get(span, grants, out, rows[:count]) == count - 1
        with pytest.raises(Stale):
            copies.put(span, [*grants[:-1], grants[-1]._replace(generation=4)], units, rows[:count])
    finally:
        segment.close()


@pytest.mark.parametrize("reach", REACHES)
async def test_whole_blocks_are_what_their_layers_are(pool: Pool, reach: Reach) -> None:
    lease = await a_lease(pool)
    blocks = list(random_runs(6 * LAYOUT.layers, seed=1).reshape(6, LAYOUT.layers, -1))
    async with Moving(pool, lease, reach) as mover:
        await mover.write_blocks(lease.targets, blocks, Priority.WRITE_BACK)
        for layer in range(LAYOUT.layers):
            good, out = await load(mover, lease.targets, layer)
            assert good == 6
            assert np.array_equal(out, [block[layer] for block in blocks])
        late = [lease.targets[0]._replace(generation=0)]
        with pytest.raises(Stale):
            await mover.write_blocks(late, blocks[:1], Priority.WRITE_BACK)


async def test_between_two_loopback_addresses(tmp_path: Path) -> None:
    async with a_pool(tmp_path, listen="tcp://127.0.0.2:0") as pool:
        lease = await a_lease(pool)
        assert lease.places[0].address.startswith("tcp://127.0.0.2:")
        async with Moving(pool, lease, host="elsewhere") as far, Moving(pool, lease) as near:
            written = await store(far, lease, 1)
            for mover in (far, near):
                good, out = await load(mover, lease.targets, 1)
                assert (good, np.array_equal(out, written)) == (6, True)


@pytest.mark.parametrize("reach", REACHES)
async def test_transfers_longer_than_a_hop(tmp_path: Path, reach: Reach) -> None:
    layout = BlockLayout(1, 8, 128, 128, "float32")
    assert layout.run_bytes == HOP_BYTES // 2
    async with a_pool(tmp_path, 5, layout=layout) as pool:
        lease = await a_lease(pool, unnamed=5)
        source, out = random_runs(5, layout=layout), np.zeros((5, layout.run_bytes), np.uint8)
        async with Moving(pool, lease, reach) as mover:
            await mover.write(0, lease.targets, source, range(5), Priority.STORE)
            assert await mover.read(0, lease.targets, out, range(5), Priority.LOAD) == 5
            assert np.array_equal(out, source)
            pool.segments[0].memory.runs[lease.targets[3].slot, 0, 77] ^= 1
            assert await mover.read(0, lease.targets, out, range(5), Priority.LOAD) == 3


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("bad", [0, 2, 5])
async def test_only_the_runs_before_a_corrupt_one_are_good(pool: Pool, reach: Reach, bad: int) -> None:
    lease = await a_lease(pool)
    async with Moving(pool, lease, reach) as mover:
        written = await store(mover, lease, 0)
        pool.segments[0].memory.runs[lease.targets[bad].slot, 0, 5] ^= 1
        good, out = await load(mover, lease.targets, 0)
        assert good == bad
        assert np.array_equal(out[:bad], written[:bad])


@pytest.mark.parametrize("reach", REACHES)
async def test_a_late_writer_is_stale_and_its_reader_gets_nothing(pool: Pool, reach: Reach) -> None:
    old = await a_lease(pool, unnamed=12)
    await pool.directory.release(old.lease)
    new = await a_lease(pool, unnamed=12)
    async with Moving(pool, old, reach) as mover:
        written = await store(mover, new, 0)
        with pytest.raises(Stale):
            await store(mover, old, 0, seed=5)
        good, out = await load(mover, new.targets, 0)
        assert (good, np.array_equal(out, written)) == (12, True)
        assert (await load(mover, old.targets, 0))[0] == 0


@pytest.mark.parametrize("reach", REACHES)
async def test_a_slot_that_does_not_exist(pool: Pool, reach: Reach) -> None:
    lease = await a_lease(pool, unnamed=1)
    strange = replace(lease, targets=[lease.targets[0]._replace(slot=4000)])
    async with Moving(pool, lease, reach) as mover:
        with pytest.raises(Stale, match="no slot 4000"):
            await store(mover, strange, 0)
        assert (await load(mover, strange.targets, 0))[0] == 0


async def test_grants_of_several_segments_are_one_transfer(tmp_path: Path) -> None:
    async with a_pool(tmp_path, 3, 3) as pool:
        lease = await a_lease(pool)
        mixed = replace(lease, targets=lease.targets[::2] + lease.targets[1::2])
        assert len({grant.segment for grant in mixed.targets}) == 2
        async with Moving(pool, lease, Reach.SHM) as mover:
            written = await store(mover, mixed, 2)
            good, out = await load(mover, mixed.targets, 2)
            assert (good, np.array_equal(out, written)) == (6, True)
            second = mixed.targets[4]
            segment = next(s for s in pool.segments if s.segment == second.segment)
            segment.memory.checksums[second.slot, 2] += np.uint64(1)
            assert (await load(mover, mixed.targets, 2))[0] == 4
            mover.know([replace(place, shm="gone") for place in lease.places if place.segment == second.segment])
            first = next(i for i, grant in enumerate(mixed.targets) if grant.segment == second.segment)
            assert (await load(mover, mixed.targets, 2))[0] == first
            with pytest.raises(PeerLost, match="cannot be mapped"):
                await store(mover, mixed, 2)


async def test_an_unreachable_segment_makes_bad_runs_and_lost_writes(pool: Pool) -> None:
    lease = await a_lease(pool)
    async with Moving(pool, lease, Reach.TCP) as mover:
        mover.know([replace(lease.places[0], address="tcp://127.0.0.1:1")])
        good, lost = await asyncio.gather(
            load(mover, lease.targets, 0), store(mover, lease, 0), return_exceptions=True
        )
        assert not isinstance(good, BaseException)
        assert good[0] == 0
        assert isinstance(lost, PeerLost)
        unknown = [Grant(SegmentId("unknown"), 0, 1)]
        assert (await load(mover, unknown, 0))[0] == 0


async def test_a_segment_that_restarted_is_reached_anew(tmp_path: Path, pool: Pool) -> None:
    lease = await a_lease(pool)
    stale = [replace(place, incarnation=Incarnation("before")) for place in lease.places]
    async with Moving(pool, replace(lease, places=stale), Reach.SHM) as mover:
        assert (await load(mover, lease.targets, 0))[0] == 0
        mover.know(lease.places)
        written = await store(mover, lease, 0)
        good, out = await load(mover, lease.targets, 0)
        assert (good, np.array_equal(out, written)) == (6, True)


async def test_without_the_file_the_service_is_asked(pool: Pool) -> None:
    lease = await a_lease(pool)
    elsewhere = replace(lease, places=[replace(lease.places[0], shm="/dev/shm/no-such-file")])
    async with Moving(pool, elsewhere, Reach.AUTO) as mover:
        written = await store(mover, lease, 0)
        good, out = await load(mover, lease.targets, 0)
        assert (good, np.array_equal(out, written)) == (6, True)


async def test_nothing_to_move_is_moved_at_once(pool: Pool) -> None:
    async with Moving(pool, await a_lease(pool)) as mover:
        assert await mover.read(0, [], random_runs(1), [], Priority.LOAD) == 0
        await mover.write(0, [], random_runs(1), [], Priority.STORE)


async def test_turns_go_by_priority_then_by_arrival_and_none_is_lost() -> None:
    turns, order = Turns(1), []

    async def wait(name: str, priority: Priority) -> None:
        async with turns.turn(priority):
            order.append(name)
            await asyncio.sleep(0)

    line = [
        ("first", Priority.WRITE_BACK),
        ("back", Priority.WRITE_BACK),
        ("store", Priority.STORE),
        ("gone", Priority.LOAD),
        ("load", Priority.LOAD),
        ("load 2", Priority.LOAD),
    ]
    tasks = [asyncio.create_task(wait(*entry)) for entry in line]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["first", "load", "load 2", "store", "back"]


@pytest.mark.parametrize("ticks", range(6))
async def test_a_turn_cancelled_at_any_moment_is_given_on(ticks: int) -> None:
    turns, order = Turns(1), []

    async def wait(name: str, rounds: int = 1) -> None:
        async with turns.turn(Priority.LOAD):
            order.append(name)
            for _ in range(rounds):
                await asyncio.sleep(0)

    tasks = [asyncio.create_task(wait("a", 2)), asyncio.create_task(wait("b")), asyncio.create_task(wait("c"))]
    for _ in range(ticks):
        await asyncio.sleep(0)
    tasks[1].cancel()
    async with asyncio.timeout(1.0):
        await asyncio.gather(*tasks, return_exceptions=True)
        await wait("last")
    assert order[0] == "a"
    assert order[-2:] == ["c", "last"]


async def test_the_most_urgent_copy_goes_first_and_a_cancelled_one_never() -> None:
    copiers, order = Copiers(), list[str]()
    go, loop = asyncio.Event(), asyncio.get_running_loop()
    held = [
        copiers.run(Priority.WRITE_BACK, lambda: asyncio.run_coroutine_threadsafe(go.wait(), loop).result(10))
        for _ in range(COPY_THREADS)
    ]
    line = [
        ("back", Priority.WRITE_BACK),
        ("store", Priority.STORE),
        ("gone", Priority.LOAD),
        ("load", Priority.LOAD),
    ]
    tasks = [asyncio.create_task(hold) for hold in held]
    await asyncio.sleep(0.05)
    tasks += [asyncio.create_task(copiers.run(priority, partial(order.append, name))) for name, priority in line]
    await asyncio.sleep(0)
    tasks[COPY_THREADS + 2].cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    copiers.close()
    assert "gone" not in order
    assert order.index("load") < order.index("back")
    assert sorted(order) == ["back", "load", "store"]


async def test_a_cancelled_copy_is_over_when_its_caller_hears_of_it() -> None:
    copiers, ended = Copiers(), []
    begun, go = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def copy() -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(10)
        ended.append(True)

    task = asyncio.create_task(copiers.run(Priority.LOAD, copy))
    await begun.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    copiers.close()


def test_hops_cover_all_runs_and_are_bounded() -> None:
    for count, run_bytes in ((0, 10), (1, HOP_BYTES * 3), (7, HOP_BYTES // 2), (1000, 12288)):
        cut = hops(count, run_bytes)
        assert [i for hop in cut for i in range(count)[hop]] == list(range(count))
        assert all((hop.stop - hop.start) * run_bytes <= max(HOP_BYTES, run_bytes) for hop in cut)


async def test_faults_are_told_beforehand_and_the_rest_is_real(pool: Pool) -> None:  # B31, B32
    lease = await a_lease(pool)
    loop = asyncio.get_running_loop()
    faults = Faults(
        read_delay_s={2: 0.05}, short_reads={1: 4}, corrupt_layers={1: 3}, failed_writes=frozenset({2})
    )
    async with Moving(pool, lease) as inner:
        mover = FaultyMover(inner, faults)
        written = [await store(mover, lease, layer) for layer in (0, 1)]
        with pytest.raises(Stale, match="write 2"):
            await store(mover, lease, 2)
        await store(mover, lease, 2)
        assert np.array_equal((await load(mover, lease.targets, 0))[1], written[0])
        good, out = await load(mover, lease.targets, 0)
        assert good == 4
        assert (out[4:] == 0xA5).all()
        assert (await load(mover, lease.targets, 1))[0] == 3
        start = loop.time()
        assert (await load(mover, lease.targets, 2))[0] == 6
        assert loop.time() - start >= 0.05
    assert mover.calls[:3] == [("write", 0, 6), ("write", 1, 6), ("write", 2, 6)]


async def test_places_that_are_told_again_change_nothing(pool: Pool) -> None:
    lease = await a_lease(pool)
    async with Moving(pool, lease, Reach.TCP) as mover:
        written = await store(mover, lease, 0)
        mover.know([*lease.places, a_place("another")])
        mover.know(lease.places)
        assert np.array_equal((await load(mover, lease.targets, 0))[1], written)
