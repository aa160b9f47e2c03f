"""Writes blocks to the pool. A batch that fails is written again, and only that; one whose segment is gone, to
another. All are named when all are written."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

from kvcache_pool.api import Directory, Grant, LeaseLost, Priority, Stale
from kvcache_pool.buffers import Bytes
from kvcache_pool.leasing import Held, Leasing
from kvcache_pool.retrying import next_target
from kvcache_pool.transfers import Progress
from protocol.errors import DangoError
from protocol.ids import BlockHash, SegmentId

TRIES = 2
"""In a row, of writes to one segment: a connection may break. After that it is taken for lost."""

LEASES_TRIED = 2
"""What a lease that was lost had reserved may be somebody else's: all is written again, once."""

log = logging.getLogger("dango.pool")


async def store(
    leasing: Leasing,
    directory: Directory,
    known: list[BlockHash],
    fresh: list[BlockHash],
    rows: Mapping[BlockHash, Bytes],
    progress: Progress,
    priority: Priority,
) -> int:
    """Under a lease that keeps the known ones too: room for the fresh ones is not made from them. Returns how many
    were written. Raises PoolFull; what a segment says that fails again and again; LeaseLost."""
    for attempt in range(LEASES_TRIED):
        progress.done = len(known)
        ask = leasing.ask(known, len(fresh), near=leasing.near)
        try:
            async with AsyncExitStack() as leases:
                held = await leases.enter_async_context(leasing.leased(directory, ask))
                missing = [*known[len(held.of.sources) :], *fresh]  # some may have gone since
                progress.done = progress.total - len(missing)
                put = _Put(leasing, directory, leases, held, missing, rows, progress, priority)
                await put.write()
                await put.commit()
                return len(missing)
        except LeaseLost as error:
            if attempt + 1 == LEASES_TRIED:
                raise
            log.info("all is written again: %s", error)
    raise AssertionError("the last try returns or raises")


class _Put:
    """Blocks that are being written. Always: `_slots[n]` is where the nth goes, and those in `_todo` are not
    written there yet. The leases are another's to end."""

    def __init__(
        self,
        leasing: Leasing,
        directory: Directory,
        leases: AsyncExitStack,
        held: Held,
        names: list[BlockHash],
        rows: Mapping[BlockHash, Bytes],
        progress: Progress,
        priority: Priority,
    ) -> None:
        self._leasing = leasing
        self._directory = directory
        self._leases = leases
        self._names = names
        self._rows = rows
        self._progress = progress
        self._priority = priority
        self._slots = [(held, slot) for slot in range(len(names))]
        self._todo = list(range(len(names)))
        self._failures: Counter[SegmentId] = Counter()

    async def write(self) -> None:
        """Batch by batch."""
        while self._todo:
            batch = self._todo[self._leasing.batches(len(self._todo))[0]]
            for held in self._held_of(batch):
                await held.last()
            grants = [self._grant(number) for number in batch]
            blocks = [self._rows[self._names[number]] for number in batch]
            faults = await self._leasing.mover.store_blocks(grants, blocks, self._priority)
            done = {number for number, grant in zip(batch, grants, strict=True) if grant.segment not in faults}
            self._todo = [number for number in self._todo if number not in done]
            self._progress.done += len(done)
            for segment in {grant.segment for grant in grants} - faults.keys():
                del self._failures[segment]
            if faults:
                await self._after(faults)

    async def commit(self) -> None:
        """Name them."""
        for held in self._held_of(range(len(self._names))):
            mine = [number for number, (lease, _) in enumerate(self._slots) if lease is held]
            slots, names = [self._slots[number][1] for number in mine], [self._names[number] for number in mine]
            await self._directory.commit(held.of.lease, slots, names)

    async def _after(self, faults: Mapping[SegmentId, DangoError]) -> None:
        """See to it that the next try can go better. Raises the fault if it cannot."""
        for segment, error in faults.items():
            if isinstance(error, Stale):
                raise LeaseLost(f"what was reserved in {segment} is somebody else's: {error}") from error
            self._failures[segment] += 1
            log.info("segment %s failed, for the %d. time: %s", segment, self._failures[segment], error)
        lost = {segment for segment, failures in self._failures.items() if failures >= TRIES}
        if gone := lost & faults.keys():
            await self._move(lost, faults[next(iter(gone))])

    async def _move(self, lost: set[SegmentId], fault: DangoError) -> None:
        """What was or would be written to lost segments goes to another. Raises PoolFull, or `fault`."""
        numbers = [number for number in range(len(self._names)) if self._grant(number).segment in lost]
        near = next_target(await self._directory.segments(), lost)
        if near is None:
            raise fault
        ask = self._leasing.ask([], len(numbers), near=near)
        held = await self._leases.enter_async_context(self._leasing.leased(self._directory, ask))
        if any(grant.segment in lost for grant in held.of.targets):
            raise fault
        self._progress.done -= len(set(numbers) - set(self._todo))
        for slot, number in enumerate(numbers):
            self._slots[number] = (held, slot)
        self._todo = sorted({*self._todo, *numbers})

    def _grant(self, number: int) -> Grant:
        held, slot = self._slots[number]
        return held.of.targets[slot]

    def _held_of(self, numbers: Iterable[int]) -> Sequence[Held]:
        return list(dict.fromkeys(self._slots[number][0] for number in numbers))
