"""A compressed pool: pages and callers see values, segments and wires see packed runs, whatever the way."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache_pool.api import Grant, Lease, Mover, Note, NotFinite, Place, Priority, Stale
from kvcache_pool.check import open_segment, verify
from kvcache_pool.client import KVCachePool
from kvcache_pool.codec import Bytes, Codec
from kvcache_pool.transfer.mover import PoolMover, Reach
from kvcache_pool.transfer.packed import HOP_BYTES, HOPS_MAX, SCRATCHES, PackedMover, mover_to
from protocol.blocks import BlockLayout
from protocol.cluster import Manifest, Mismatch
from protocol.errors import PeerLost
from tests.kvcache_pool.builders import HOST, LAYOUT, Pool, a_pool, an_ask, names
from tests.kvcache_pool.faults import Faults, FaultyMover
from tests.kvcache_pool.test_client import Conductor

INT8 = replace(LAYOUT, compression="int8")
FP8 = replace(LAYOUT, compression="fp8")
LARGE = BlockLayout(layers=2, kv_heads=8, head_dim=128, block_tokens=64, kv_type="bfloat16", compression="int8")
"""A run takes 0.14 MB: long transfers have several hops."""

SLOTS = 8
NAMES = names(*range(SLOTS))
REACHES = [Reach.SHM, Reach.TCP, Reach.SERVICE]


@asynccontextmanager
async def packed(
    folder: Path, layout: BlockLayout, reach: Reach = Reach.AUTO, slots: int = SLOTS
) -> AsyncIterator[tuple[Mover, Lease, Pool]]:
    """A mover to a pool of this layout, and a lease of `slots` slots there."""
    async with a_pool(folder, slots, layout=layout) as pool:
        lease = await pool.directory.acquire(an_ask([], unnamed=slots))
        mover = mover_to(pool.transport, HOST, reach, layout)
        mover.know(lease.places)
        try:
            yield mover, lease, pool
        finally:
            await mover.aclose()
            await pool.directory.release(lease.lease)


def kv(count: int, layout: BlockLayout, seed: int = 0) -> Bytes:
    """`count` plain runs of values that a model could have made."""
    values = np.random.default_rng(seed).standard_normal((count, layout.plain.run_bytes // 2)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def repacked(runs: Bytes, layout: BlockLayout) -> Bytes:
    """What these runs are after they were packed and unpacked."""
    codec, out = Codec(layout), np.empty_like(runs)
    packed = np.empty((len(runs), layout.run_bytes), np.uint8)
    codec.pack(runs, packed)
    codec.unpack(packed, out)
    return out


@pytest.mark.parametrize("layout", [INT8, FP8, LARGE], ids=["int8", "fp8", "large"])
@pytest.mark.parametrize("reach", REACHES)
async def test_pages_come_back_as_they_were_packed(tmp_path: Path, layout: BlockLayout, reach: Reach) -> None:
    slots = 3 * HOP_BYTES // LARGE.run_bytes if layout is LARGE else SLOTS
    async with packed(tmp_path, layout, reach, slots) as (mover, lease, pool):
        source, out = kv(slots + 3, layout), kv(slots + 3, layout, 1)
        pages = list(range(slots + 2, 2, -1))
        await mover.write(1, lease.targets, source, pages, Priority.STORE)
        assert await mover.read(1, lease.targets, out, pages, Priority.LOAD) == slots
        assert np.array_equal(out[pages], repacked(source, layout)[pages])
        assert np.array_equal(out[:3], kv(slots + 3, layout, 1)[:3])
        one = pool.segments[0].memory
        assert one.runs.shape == (slots, layout.layers, layout.run_bytes)
        assert await mover.read(0, [], out, [], Priority.LOAD) == 0
        assert await mover.read(0, lease.targets, out, pages, Priority.LOAD) == 0


@pytest.mark.parametrize("layout", [INT8, FP8, LARGE], ids=["int8", "fp8", "large"])
@pytest.mark.parametrize("reach", REACHES)
async def test_blocks_come_back_as_they_were_packed(tmp_path: Path, layout: BlockLayout, reach: Reach) -> None:
    slots = 11
    async with packed(tmp_path, layout, reach, slots) as (mover, lease, _):
        runs = kv(slots * layout.layers, layout)
        source = runs.reshape(slots, layout.layers, -1)
        expected = repacked(runs, layout).reshape(source.shape)
        out, apart = np.empty_like(source), [np.empty_like(block) for block in source]
        await mover.write_blocks(lease.targets, list(source), Priority.STORE)
        assert await mover.read_blocks(lease.targets, out, Priority.LOAD) == slots
        assert await mover.read_blocks(lease.targets, apart, Priority.LOAD) == slots
        assert np.array_equal(out, expected)
        assert np.array_equal(np.stack(apart), expected)


async def test_the_segment_holds_packed_runs_with_their_checksums(tmp_path: Path) -> None:
    async with packed(tmp_path, INT8) as (mover, lease, pool):
        source = kv(SLOTS * 3, INT8).reshape(SLOTS, 3, -1)
        await mover.write_blocks(lease.targets, source, Priority.STORE)
        expected = np.empty((3, INT8.run_bytes), np.uint8)
        Codec(INT8).pack(source[2], expected)
        assert np.array_equal(pool.segments[0].memory.runs[lease.targets[2].slot], expected)
        notes = [
            Note(grant.slot, grant.generation, name) for grant, name in zip(lease.targets, NAMES, strict=True)
        ]
        assert list(verify(open_segment(pool.segments[0].path), notes)) == []


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
async def test_what_is_not_finite_is_not_stored(tmp_path: Path, wrong: float) -> None:
    async with packed(tmp_path, LARGE) as (mover, lease, _):
        source = kv(SLOTS, LARGE)
        source[5].view(np.uint16)[7] = np.float32(wrong).view(np.uint32) >> 16
        blocks = source.reshape(SLOTS // 2, 2, -1)
        with pytest.raises(NotFinite):
            await mover.write(0, lease.targets, source, range(SLOTS), Priority.STORE)
        with pytest.raises(NotFinite):
            await mover.write_blocks(lease.targets[:4], blocks, Priority.STORE)
        out = np.empty_like(source)
        assert await mover.read(0, lease.targets, out, range(SLOTS), Priority.LOAD) <= 5
        await mover.write(0, lease.targets[:5], source, range(5), Priority.STORE)


async def test_what_lies_behind_a_tail_is_not_kept(tmp_path: Path) -> None:
    async with packed(tmp_path, INT8) as (mover, lease, _):
        source = kv(2, INT8)
        shape = (2, 2, INT8.block_tokens, -1)
        source.view(np.uint16).reshape(shape)[1, :, 5:] = 0x7FC0  # NaN
        await mover.write(0, lease.targets[:2], source, [0, 1], Priority.STORE, 5)
        out = np.empty_like(source)
        assert await mover.read(0, lease.targets[:2], out, [0, 1], Priority.LOAD) == 2
        clean = source.copy()
        Codec(INT8).blank(clean[1], 5)
        assert np.array_equal(out, repacked(clean, INT8))
        assert np.isfinite((out.view(np.uint16).astype(np.uint32) << 16).view(np.float32)).all()


@pytest.mark.parametrize("bad", [0, 3, 17])
async def test_only_what_comes_before_a_bad_run_is_good(tmp_path: Path, bad: int) -> None:
    slots = 20
    async with packed(tmp_path, LARGE, Reach.SHM, slots) as (mover, lease, pool):
        source, out = kv(slots, LARGE), np.empty((slots, LARGE.plain.run_bytes), np.uint8)
        await mover.write(0, lease.targets, source, range(slots), Priority.STORE)
        pool.segments[0].memory.runs[lease.targets[bad].slot, 0, 9] ^= 1
        assert await mover.read(0, lease.targets, out, range(slots), Priority.LOAD) == bad
        assert np.array_equal(out[:bad], repacked(source, LARGE)[:bad])


async def test_each_block_is_told_of_whatever_became_of_the_others(tmp_path: Path) -> None:
    async with a_pool(tmp_path, 12, 12, layout=LARGE) as pool:
        near, far = [
            await pool.directory.acquire(an_ask([], unnamed=12, near=one.segment)) for one in pool.segments
        ]
        grants = [grant for pair in zip(near.targets, far.targets, strict=True) for grant in pair]
        assert {grant.segment for grant in grants[::2]} != {grant.segment for grant in grants[1::2]}
        source = kv(24 * 2, LARGE).reshape(24, 2, -1)
        mover = mover_to(pool.transport, HOST, Reach.SHM, LARGE)
        mover.know(near.places)
        try:
            faults = await mover.store_blocks(grants, source, Priority.STORE)
            assert {segment: type(error) for segment, error in faults.items()} == {grants[1].segment: PeerLost}
            with pytest.raises(PeerLost):
                await mover.write_blocks(grants, source, Priority.STORE)
            mover.know(far.places)
            assert await mover.store_blocks(grants, source, Priority.STORE) == {}
            for place in (7, 22):
                memory = next(one.memory for one in pool.segments if one.segment == grants[place].segment)
                memory.runs[grants[place].slot, 1, 9] ^= 1
            out = np.zeros_like(source)
            got = await mover.fetch_blocks(grants, out, Priority.LOAD)
            assert {7, 22} <= {*got.missing} <= {*range(7, 24)}
            assert (got.bad, got.lost) == ([7, 22], frozenset())
            there = [place for place in range(24) if place not in got.missing]
            assert 21 in there
            expected = repacked(source.reshape(48, -1), LARGE).reshape(source.shape)
            assert np.array_equal(out[there], expected[there])
            assert await mover.read_blocks(grants, out, Priority.LOAD) == 7
        finally:
            await mover.aclose()
            for lease in (near, far):
                await pool.directory.release(lease.lease)


async def test_a_page_that_is_none_is_refused(tmp_path: Path) -> None:
    async with packed(tmp_path, INT8) as (mover, lease, _):
        for page in (-1, 2):
            with pytest.raises(IndexError):
                await mover.write(0, lease.targets[:2], kv(2, INT8), [0, page], Priority.STORE)
        with pytest.raises(IndexError):
            await mover.write(0, lease.targets[:1], kv(400, INT8), [400], Priority.STORE)


class Slow:
    """A mover below that counts what is under way, and ends when it may. Its runs are packed."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.under_way = self.most = self.calls = 0

    def know(self, places: Sequence[Place]) -> None: ...

    async def _moved(self) -> None:
        self.calls += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.may_end.wait()
        finally:
            self.under_way -= 1

    async def read(
        self, layer: int, grants: Sequence[Grant], out: Bytes, pages: Sequence[int], priority: Priority
    ) -> int:
        assert out.shape[1] == LARGE.run_bytes
        await self._moved()
        out[:] = 0
        return len(grants)

    async def write(
        self,
        layer: int,
        grants: Sequence[Grant],
        source: Bytes,
        pages: Sequence[int],
        priority: Priority,
        filled: int | None = None,
    ) -> None:
        assert source.nbytes <= HOP_BYTES
        await self._moved()

    async def aclose(self) -> None: ...


def grants_of(count: int) -> list[Grant]:
    return [Grant("kv", slot, 1) for slot in range(count)]  # type: ignore[arg-type]


async def test_scratch_is_bounded_and_comes_back_from_cancelled_calls() -> None:
    below = Slow()
    mover = PackedMover(below, LARGE)
    pages = kv(64, LARGE)
    calls = [
        asyncio.create_task(mover.write(0, grants_of(64), pages, range(64), Priority.STORE))
        for _ in range(2 * SCRATCHES)
    ]
    try:
        async with asyncio.timeout(20.0):
            while below.under_way < SCRATCHES:  # noqa: ASYNC110 - only the mover below can tell
                await asyncio.sleep(0.001)
        assert below.most == SCRATCHES
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert all(call.cancelled() for call in calls)
        assert below.under_way == 0
        below.may_end.set()
        below.most = 0
        out = kv(64, LARGE, 1)
        assert await mover.read(0, grants_of(64), out, range(64), Priority.LOAD) == 64
        assert not out.any()
        assert below.most <= HOPS_MAX
    finally:
        await mover.aclose()


async def test_one_call_does_not_take_all_scratch() -> None:
    below = Slow()
    mover = PackedMover(below, LARGE)
    pages = kv(64, LARGE)
    long = asyncio.create_task(mover.write(0, grants_of(64), pages, range(64), Priority.STORE))
    try:
        async with asyncio.timeout(20.0):
            while below.under_way < HOPS_MAX:  # noqa: ASYNC110 - only the mover below can tell
                await asyncio.sleep(0.001)
            short = asyncio.create_task(mover.write(0, grants_of(1), pages, [0], Priority.LOAD))
            while below.under_way < HOPS_MAX + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert below.most == HOPS_MAX + 1
        below.may_end.set()
        await asyncio.gather(long, short)
    finally:
        await mover.aclose()


async def test_an_error_below_is_the_callers(tmp_path: Path) -> None:
    async with a_pool(tmp_path, SLOTS, layout=INT8) as pool:
        lease = await pool.directory.acquire(an_ask([], unnamed=SLOTS))
        below = FaultyMover(PoolMover(pool.transport, HOST), Faults(failed_writes={0}))
        mover = PackedMover(below, INT8)
        mover.know(lease.places)
        try:
            with pytest.raises(Stale, match="write 0 fails"):
                await mover.write(0, lease.targets, kv(SLOTS, INT8), range(SLOTS), Priority.STORE)
            await mover.write(0, lease.targets, kv(SLOTS, INT8), range(SLOTS), Priority.STORE)
        finally:
            await mover.aclose()
            await pool.directory.release(lease.lease)


async def test_without_compression_there_is_nothing_between(tmp_path: Path) -> None:
    async with packed(tmp_path, LAYOUT) as (mover, _, _):
        assert type(mover) is PoolMover
    with pytest.raises(ValueError, match="not compressed"):
        PackedMover(Slow(), LAYOUT)


# -- a client of the pool -----------------------------------------------------------------------------


def some(count: int, layout: BlockLayout) -> Any:
    """Blocks of values, float32 [count, layers, 2, block_tokens, kv_heads, head_dim]."""
    shape = (count, layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim)
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("form", ["int8", "fp8"])
async def test_a_client_puts_and_gets_values(tmp_path: Path, form: str) -> None:
    layout = BlockLayout(layers=3, kv_heads=2, head_dim=16, block_tokens=16, kv_type="float32", compression=form)
    tokens, values = list(range(3 * 16)), some(3, layout)
    async with a_pool(tmp_path, SLOTS, layout=layout) as pool:
        manifest = Manifest("tiny", "m", "t", 256, layout)
        async with (
            Conductor(pool.transport, pool.address, manifest) as conductor,
            KVCachePool.connect(conductor.address, host=HOST) as client,
        ):
            assert (client.layout, client.stored) == (layout.plain, layout)
            assert await client.put(tokens, values) == 3
            back = client.typed(await client.get(tokens))
            assert back.shape == values.shape
            step = np.abs(values).max() / (120 if form == "int8" else 14)
            assert 0 < np.abs(back - values).max() < step
            into = [np.empty_like(block) for block in values]
            assert await client.get_into(tokens, into) == 3
            assert np.array_equal(np.stack(into), back)
            assert await client.put(tokens, values) == 0
            values[1, 2, 0, 3, 0, 0] = np.nan
            other = [token + 1000 for token in tokens]
            with pytest.raises(NotFinite):
                await client.put(other, values)
            assert (await client.lookup(other)).blocks == 0


async def test_a_client_that_compresses_otherwise_is_refused(tmp_path: Path) -> None:
    async with a_pool(tmp_path, SLOTS, layout=INT8) as pool:
        for layout in (LAYOUT, FP8):
            async with KVCachePool.connect(directory=pool.address, layout=layout, host=HOST) as client:
                with pytest.raises(Mismatch, match="compression='int8'"):
                    await client.put(names(1), kv(3, INT8))
