"""Objects that are put and got, and the time that it takes, in turn with what it is compared with."""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from bench.physical import RawSocket, copy_s
from bench.pool import HOST, MOONCAKE, Pool
from bench.report import Row, Spread, percentile
from kvcache_pool.aligned import aligned
from kvcache_pool.api import Grant, Priority
from kvcache_pool.transfer.mover import PoolMover, Reach
from protocol.blocks import BlockLayout

SMOLLM = BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=16, kv_type="bfloat16")
SMALL = BlockLayout(layers=1, kv_heads=8, head_dim=128, block_tokens=16, kv_type="bfloat16")

OBJECTS = {"1.1 MB": 3, "11.8 MB": 32}
"""Blocks of SmolLM2."""

Bytes = npt.NDArray[np.uint8]
Timed = Callable[[int], Awaitable[None]]


class Samples:
    """Microseconds of things that are measured in turn, run by run; a run's sample is its median."""

    def __init__(self) -> None:
        self._turns = 0
        self._runs: dict[str, list[float]] = {}
        self.all: dict[str, list[float]] = {}

    async def turns(self, count: int, things: dict[str, Timed]) -> None:
        """One run: `count` rounds, each of every thing once, after one that is not counted."""
        taken: dict[str, list[float]] = {name: [] for name in things}
        for counted in (False, *[True] * count):
            for name, thing in things.items():
                self._turns += 1  # another object each time: what one has touched the next must not find cached
                began = time.perf_counter()
                await thing(self._turns)
                if counted:
                    taken[name].append(1e6 * (time.perf_counter() - began))
        for name, values in taken.items():
            self._runs.setdefault(name, []).append(statistics.median(values))
            self.all.setdefault(name, []).extend(values)

    def of(self, name: str) -> Spread:
        return Spread.of(self._runs[name])

    def tail(self, name: str, percent: float) -> Spread:
        return Spread.of([percentile(self.all[name], percent)])

    def row(self, text: str, name: str, against: str | None = None, limit: float | None = None) -> Row:
        return Row(text, "us", self.of(name), None if against is None else self.of(against), limit)


class Objects:
    """The blocks of a pool and as many here, and movers that carry objects between them."""

    def __init__(self, pool: Pool, layout: BlockLayout, grants: Sequence[Grant]) -> None:
        self.grants = grants
        self.here: Bytes = aligned(len(grants), layout.layers, layout.run_bytes)
        self.here[:] = 1  # every page is touched
        self.there: Bytes = aligned(*self.here.shape)
        self.there[:] = np.random.default_rng(0).integers(0, 256, self.here.shape, np.uint8)
        self.movers = {reach: PoolMover(pool.transport, HOST, reach) for reach in (Reach.SHM, Reach.TCP)}
        if MOONCAKE is not None:
            self.movers[Reach.MOONCAKE] = PoolMover(pool.transport, "another host", Reach.MOONCAKE)

    def part(self, blocks: int, number: int) -> slice:
        """Where the object of this number lies: the next one each time, around and around."""
        start = number * blocks % (len(self.grants) - blocks + 1)
        return slice(start, start + blocks)

    def put(self, reach: Reach, blocks: int) -> Timed:
        async def put(number: int) -> None:
            part = self.part(blocks, number)
            await self.movers[reach].write_blocks(self.grants[part], self.there[part], Priority.STORE)

        return put

    def get(self, reach: Reach, blocks: int) -> Timed:
        async def get(number: int) -> None:
            part = self.part(blocks, number)
            good = await self.movers[reach].read_blocks(self.grants[part], self.here[part], Priority.LOAD)
            assert good == blocks, f"{good} of {blocks} blocks"

        return get

    def memcpy(self, blocks: int) -> Timed:
        async def copy(number: int) -> None:
            part = self.part(blocks, number)
            copy_s(self.here[part], self.there[part])

        return copy

    def copy_and_hash(self, blocks: int) -> Timed:
        async def copy(number: int) -> None:
            target = self.here[self.part(blocks, number)]
            copy_s(target, self.there[self.part(blocks, number)])
            xxhash.xxh3_64_intdigest(target.data)

        return copy

    def raw(self, raw: RawSocket, blocks: int) -> Timed:
        async def get(number: int) -> None:
            part, size = self.part(blocks, number), self.here[0].nbytes
            raw.get(part.start * size, self.here[part].reshape(-1).data)

        return get

    async def check(self) -> None:
        """Get all of it once more, by each way: it is what was put."""
        for mover in self.movers.values():
            self.here[:] = 0
            assert await mover.read_blocks(self.grants, self.here, Priority.LOAD) == len(self.grants)
            assert np.array_equal(self.here, self.there), "what was got is not what was put"

    async def aclose(self) -> None:
        for mover in self.movers.values():
            await mover.aclose()


async def objects_of(pool: Pool, layout: BlockLayout, slots: int) -> Objects:
    lease = await pool.lease([], unnamed=slots)
    objects = Objects(pool, layout, lease.targets)
    for mover in objects.movers.values():
        mover.know(lease.places)
    await objects.movers[Reach.SHM].write_blocks(objects.grants, objects.there, Priority.STORE)
    return objects
