"""Leases of one client of the pool, and what is moved under them. Every lease is given back, in every case."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from kvcache_pool.api import (
    LEASE_S,
    TRANSFER_S_MAX,
    Acquire,
    Blocks,
    Directory,
    Lease,
    PoolFull,
    Priority,
    new_lease,
)
from kvcache_pool.buffers import Bytes
from kvcache_pool.transfer.mover import PoolMover
from protocol.blocks import BlockLayout
from protocol.cluster import Mismatch
from protocol.errors import DangoError
from protocol.ids import BlockHash, LeaseId, SegmentId

BATCH_BYTES = 64 << 20
"""Moved in one go. A transfer has TRANSFER_S_MAX, which a slow network must keep; between two of them the lease is
renewed."""

RENEW_AFTER_S = (LEASE_S - TRANSFER_S_MAX) / 2
"""A lease older than this is renewed before the next batch: it then outlasts the batch."""

ACQUIRE_TRIES = 3
"""Each needs blocks to be evicted between a lookup and the acquisition that follows at once."""


class Leasing:
    """Moves whole blocks between the caller's memory and segments, each time under a lease; owns these until
    `settle`. The mover is another's."""

    def __init__(self, mover: PoolMover, layout: BlockLayout, owner: str) -> None:
        self.near: SegmentId | None = None
        """Where new blocks should go."""
        self._mover = mover
        self._layout = layout
        self._owner = owner
        self._reached: set[SegmentId] = set()
        """Where something was read from, so that they can be reached."""
        self._returns: set[asyncio.Task[None]] = set()

    async def store(
        self, directory: Directory, known: list[BlockHash], fresh: list[BlockHash], rows: dict[BlockHash, Bytes]
    ) -> int:
        """Under a lease that keeps the known ones too: room for the fresh ones is not made from them."""
        ask = Acquire(new_lease(), self._owner, known, len(known), len(fresh), self.near)
        async with self.leased(directory, ask) as lease:
            missing = [*known[len(lease.of.sources) :], *fresh]  # some may have gone since
            for batch in self._batches(len(missing)):
                await lease.last()
                blocks = [rows[name] for name in missing[batch]]
                await self._mover.write_blocks(lease.of.targets[batch], blocks, Priority.STORE)
            await directory.commit(ask.lease, list(range(len(missing))), missing)
        return len(missing)

    async def load(self, directory: Directory, lease: "Held", rows: Blocks) -> int:
        """Read all sources of a lease; returns how many leading ones are good.

        A bad block is made forgotten, so that it can be put again; but not in a segment of which nothing could be
        read before: it may only be out of our reach.
        """
        grants, done = lease.of.sources, 0
        for batch in self._batches(len(grants)):
            await lease.last()
            good = await self._mover.read_blocks(grants[batch], rows[batch], Priority.LOAD)
            self._reached.update(grant.segment for grant in grants[batch][:good])
            done += good
            if good < len(grants[batch]):
                if grants[done].segment in self._reached:
                    await directory.discard([grants[done]])
                break
        return done

    def _batches(self, count: int) -> list[slice]:
        step = max(1, BATCH_BYTES // self._layout.block_bytes)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    @asynccontextmanager
    async def prefix(self, directory: Directory, names: list[BlockHash]) -> AsyncIterator["Held | None"]:
        """Lease what is cached of a chain; None if that is nothing."""
        async with AsyncExitStack() as stack:
            for attempt in range(ACQUIRE_TRIES):
                reach = (await directory.lookup(names)).reach if names else 0
                if reach == 0:
                    yield None
                    return
                ask = Acquire(new_lease(), self._owner, names[:reach], reach, 0, self.near)
                try:
                    held = await stack.enter_async_context(self.leased(directory, ask))
                    break
                except PoolFull:  # some went meanwhile, and there is no room for them
                    if attempt == ACQUIRE_TRIES - 1:
                        raise
            yield held

    @asynccontextmanager
    async def leased(self, directory: Directory, ask: Acquire) -> AsyncIterator["Held"]:
        """Hold a lease, and give it back in any case: also if its answer was never heard."""
        try:
            lease = await directory.acquire(ask)
            self._know(lease)
            yield Held(directory, lease)
        finally:
            returning = asyncio.create_task(self._release(directory, ask.lease))
            self._returns.add(returning)
            returning.add_done_callback(self._returns.discard)
            await asyncio.shield(returning)

    async def _release(self, directory: Directory, lease: LeaseId) -> None:
        with contextlib.suppress(DangoError):  # it then ends by itself
            await directory.release(lease)

    def _know(self, lease: Lease) -> None:
        """Where its segments are. Raises Mismatch if their blocks are not like ours."""
        for place in lease.places:
            if place.layout != self._layout:
                raise Mismatch(
                    f"segment {place.segment} has blocks of {place.layout}, and this client {self._layout}"
                )
        self._mover.know(lease.places)

    async def settle(self) -> None:
        """Wait for leases that are being given back; each has its deadline."""
        await asyncio.gather(*self._returns)


class Held:
    """A lease that is ours now."""

    def __init__(self, directory: Directory, lease: Lease) -> None:
        self.of = lease
        self._directory = directory
        self._since = asyncio.get_running_loop().time()

    async def last(self) -> None:
        """See to it that it outlasts one more transfer. Raises LeaseLost."""
        now = asyncio.get_running_loop().time()
        if now - self._since > RENEW_AFTER_S:
            await self._directory.renew(self.of.lease)
            self._since = now
