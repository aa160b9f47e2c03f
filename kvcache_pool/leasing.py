"""Leases of one client of the pool. Every one is given back, in every case."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvcache_pool.api import LEASE_S, TRANSFER_S_MAX, Acquire, Directory, Lease, new_lease
from kvcache_pool.transfer.mover import BlockMover
from protocol.blocks import BlockLayout
from protocol.cluster import Mismatch
from protocol.errors import DangoError
from protocol.ids import NO_TENANT, BlockHash, LeaseId, SegmentId, TenantId

BATCH_BYTES = 64 << 20
"""Moved in one go. A transfer has TRANSFER_S_MAX, which a slow network must keep; between two of them the lease is
renewed."""

RENEW_AFTER_S = (LEASE_S - TRANSFER_S_MAX) / 2
"""A lease older than this is renewed before the next batch: it then outlasts the batch."""


class Leasing:
    """Gets leases, and sees to it that the mover knows where their segments are. Owns them until `settle`; the
    mover is another's."""

    def __init__(
        self,
        mover: BlockMover,
        layout: BlockLayout,
        owner: str,
        tenant: TenantId = NO_TENANT,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """Leases are taken under the name of `owner`, and all that they name is the tenant's."""
        self.mover = mover
        self.near: SegmentId | None = None
        """Where new blocks should go."""
        self.reached: set[SegmentId] = set()
        """Where something was read from, so that they can be reached."""
        self._layout = layout
        self._owner = owner
        self._tenant = tenant
        self._batch_blocks = max(1, batch_bytes // layout.block_bytes)
        self._returns: set[asyncio.Task[None]] = set()

    def ask(
        self,
        known: list[BlockHash],
        unnamed: int = 0,
        *,
        near: SegmentId | None,
        copies: int = 0,
        moves: bool = False,
    ) -> Acquire:
        """What is to be leased: of the known ones all that are cached, and room for the others."""
        tenant, reuse = self._tenant, len(known)
        return Acquire(
            new_lease(), self._owner, known, reuse, unnamed, near, copies=copies, moves=moves, tenant=tenant
        )

    def batches(self, count: int) -> list[slice]:
        """So many blocks, cut into what is moved in one go."""
        step = self._batch_blocks
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    @asynccontextmanager
    async def leased(self, directory: Directory, ask: Acquire) -> AsyncIterator["Held"]:
        """Hold a lease, and give it back in any case: also if its answer was never heard. Who is cancelled does
        not wait for that."""
        waits = True
        try:
            lease = await directory.acquire(ask)
            self._know(lease)
            yield Held(directory, lease)
        except asyncio.CancelledError:
            waits = False
            raise
        finally:
            returning = asyncio.create_task(self._release(directory, ask.lease))
            self._returns.add(returning)
            returning.add_done_callback(self._returns.discard)
            if waits:
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
        self.mover.know(lease.places)

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
