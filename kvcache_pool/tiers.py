"""The disk tier: every cached block gets a second home in a file, which survives what memory does not.

    segment in /dev/shm  ──saved: what no disk has, the first cached first──>  segment in a file
                         <──promoted: what was read there twice─────────────

A disk segment is a segment: the same file format, generations and checksums, mapped by its readers; the kernel's
page cache decides what of it is in memory. Nothing is synced. After `kill -9` the kernel still has every byte;
after a power cut, what did not reach the disk has a wrong checksum or no note, and is not found or not believed.

Both ways are carried in the background, and their sources are not leased, so that it is no use of them and changes
nothing in their order of eviction: one that is evicted under the copy has another generation or checksum.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvcache_pool.announcing import announce, place_of
from kvcache_pool.api import (
    Acquire,
    Corrupt,
    Directory,
    DirectoryLink,
    Due,
    Grant,
    Lease,
    Priority,
    QuotaExceeded,
    Stale,
    Tier,
    new_lease,
)
from kvcache_pool.segment import Segment
from kvcache_pool.segment_service import SegmentService
from kvcache_pool.transfer.copiers import Copiers, hops
from protocol.errors import DangoError
from protocol.ids import SegmentId, TenantId
from protocol.rpc import Server
from protocol.tasks import together
from protocol.transport import Transport

ROUND_BLOCKS = 64
"""Of one round: some 20 MB of a small model, a few milliseconds of one thread's copying."""

PACE_S = 0.05
"""Between two rounds while there is more to carry: 400 MB/s of a small model, with most of a core left free."""

IDLE_S = 0.5
"""Until the next look, when nothing is due."""

DISK_SUFFIX = ".disk"

log = logging.getLogger("dango.tiers")


def disk_segment(segment: SegmentId) -> SegmentId:
    """The name of the disk tier beside this segment."""
    return SegmentId(f"{segment}{DISK_SUFFIX}")


class DiskTier:
    """One disk segment and its part in the pool: it is announced, filled, and read by others at its own address.
    Owns threads until `close`; the segments are another's."""

    def __init__(self, memory: Segment, disk: Segment, address: str) -> None:
        """Streams are taken at the host of `address`."""
        self._disk = disk
        self._copiers = Copiers()
        self._carriers = (Carrier(memory, disk, self._copiers), Carrier(disk, memory, self._copiers))
        self._service = SegmentService(disk, address)

    async def run(self, transport: Transport, host: str, listen: str, directory: Callable[[], str | None]) -> None:
        """Until cancelled. Raises OSError when it cannot listen."""
        server = Server(transport.bind(listen), self._service.handlers())
        place = place_of(self._disk, server.address, host, Tier.DISK)
        carrying = (carrier.run(transport, directory) for carrier in self._carriers)
        await together([server.serve(), announce(self._disk, place, transport, directory), *carrying])

    def close(self) -> None:
        """End the threads."""
        self._copiers.close()
        self._service.close()


def beside(address: str) -> str:
    """Where the disk tier listens, beside the instance that listens there."""
    if address.startswith("tcp://"):
        return f"{address.rpartition(':')[0]}:0"
    return f"{address.removesuffix('.sock')}{DISK_SUFFIX}"


class Carrier:
    """Copies what is due from one segment to another of the same process."""

    def __init__(self, source: Segment, target: Segment, copiers: Copiers) -> None:
        self._source = source
        self._target = target
        self._copiers = copiers

    async def run(self, transport: Transport, directory: Callable[[], str | None]) -> None:
        """Until cancelled, at whichever directory there is."""
        link = DirectoryLink(transport)
        try:
            while True:
                await link.follow(directory())
                carried = 0
                try:
                    carried = await self.round(link.get())
                except DangoError as error:  # the directory is away, or the target has no room: due for later
                    log.debug("nothing is carried to %s: %s", self._target.segment, error)
                await asyncio.sleep(PACE_S if carried else IDLE_S)
        finally:
            await link.aclose()

    async def round(self, directory: Directory) -> int:
        """Copy some blocks. Returns how many; 0 when nothing is due. Raises PoolFull and its like."""
        if self._target.draining:
            return 0
        due = await directory.due(self._source.segment, ROUND_BLOCKS)
        if not due.blocks:
            return 0
        carried = 0
        for tenant, part in _by_tenant(due).items():
            try:
                carried += await self._carry_for(tenant, part, directory)
            except QuotaExceeded as error:  # that of one is in no other's way
                log.debug("nothing of a tenant is carried to %s: %s", self._target.segment, error)
        return carried

    async def _carry_for(self, tenant: TenantId, due: Due, directory: Directory) -> int:
        target = self._target.segment
        ask = Acquire(new_lease(), target, due.blocks, reuse=0, unnamed=0, near=target, tenant=tenant)
        try:
            lease = await directory.acquire(ask)
            return await self._carry(directory, due, lease)
        finally:
            await asyncio.shield(directory.release(ask.lease))

    async def _carry(self, directory: Directory, due: Due, lease: Lease) -> int:
        good: list[int] = []
        for hop in hops(len(lease.targets), self._target.memory.geometry.layout.block_bytes):
            copying = partial(self._copy, due.grants[hop], lease.targets[hop])
            done = await self._copiers.run(Priority.WRITE_BACK, copying)
            good += [hop.start + position for position in done]
        await directory.commit(lease.lease, good, [due.blocks[position] for position in good])
        here = {n for n, grant in enumerate(lease.targets) if grant.segment == self._target.segment}
        missed = here - set(good)
        if missed:  # evicted meanwhile, which the directory knows, or bad, which it should
            await directory.discard([due.grants[position] for position in sorted(missed)])
        return len(good)

    def _copy(self, sources: Sequence[Grant], targets: Sequence[Grant]) -> list[int]:
        """Which of them were copied whole. One that was given room elsewhere is not."""
        source, target = self._source.memory, self._target.memory
        run = np.empty(target.geometry.layout.run_bytes, np.uint8)
        good = []
        for position, (old, new) in enumerate(zip(sources, targets, strict=True)):
            if new.segment != self._target.segment:
                continue
            try:
                for layer in range(target.geometry.layout.layers):
                    source.get(layer, old.slot, old.generation, run)
                    target.put(layer, new.slot, new.generation, run)
            except (Stale, Corrupt):
                continue
            good.append(position)
        return good


def _by_tenant(due: Due) -> dict[TenantId, Due]:
    """A lease is of one tenant, so is each of these."""
    parts: dict[TenantId, Due] = {}
    for name, grant, tenant in zip(due.blocks, due.grants, due.tenants, strict=True):
        part = parts.setdefault(tenant, Due([], [], []))
        part.blocks.append(name)
        part.grants.append(grant)
        part.tenants.append(tenant)
    return parts
