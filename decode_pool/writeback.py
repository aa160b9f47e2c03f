"""Full blocks that are filled here go to the pool: the next turn of a chat finds them there.

Best effort: when the queue is full, or the pool or the tenant's quota has no room, a block is simply not cached.
The bytes are copied out of the engine's pages when the block is full, so the pages' own life does not matter here.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache_pool.api import Acquire, DirectoryLink, Grant, Mover, Priority, new_lease
from protocol.errors import DangoError
from protocol.ids import NO_TENANT, BlockHash, Ids, LeaseId, RequestId, SegmentId, TenantId, token_ids

BLOCKS_MAX = 64
"""Blocks that wait to be written: a few steps of a full batch, or a long prompt; 23 MB of the default model's.
What one step fills may be more, if nothing else waits."""

log = logging.getLogger("dango.writeback")


@dataclass(frozen=True)
class Filled:
    """Full blocks in a row: the names of all up to their last, and their bytes [layers, blocks, run_bytes]."""

    request: RequestId
    chain: list[BlockHash]
    runs: npt.NDArray[np.uint8]
    tokens: Ids = field(default_factory=token_ids)
    """Theirs; empty: not known."""
    near: SegmentId | None = None
    """Where to store them if there is room; None: at the instance's home."""
    tenant: TenantId = NO_TENANT
    """Whose they are."""

    @property
    def count(self) -> int:
        """How many they are, the last of the chain."""
        return len(self.runs[0])


class WriteBack:
    """One task and its bounded queue."""

    def __init__(self, mover: Mover, directory: DirectoryLink) -> None:
        self._mover = mover
        self._directory = directory
        self._queue: asyncio.Queue[Filled | Grant] = asyncio.Queue(BLOCKS_MAX)
        self._waiting = 0
        """Blocks in the queue."""
        self.near: SegmentId | None = None
        """The instance's home; heard from the registry."""
        self.written = 0
        self.dropped = 0
        """Both in blocks."""

    def offer(self, filled: Filled) -> None:
        """Write these when there is time; dropped if too many wait."""
        if self._queue.full() or (self._waiting and self._waiting + filled.count > BLOCKS_MAX):
            self.dropped += filled.count
            return
        self._waiting += filled.count
        self._queue.put_nowait(filled)

    def forget(self, bad: Grant) -> None:
        """A block of the pool that could not be read as it was written shall not be found again. Best effort."""
        if not self._queue.full():
            self._queue.put_nowait(bad)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            filled = await self._queue.get()
            if isinstance(filled, Grant):
                await self._discard(filled)
                continue
            self._waiting -= filled.count
            try:
                await self._write(filled)
                self.written += filled.count
            except DangoError as error:
                self.dropped += filled.count
                log.info("%d blocks not written back: %s", filled.count, error, extra={"request": filled.request})

    async def _discard(self, bad: Grant) -> None:
        with contextlib.suppress(DangoError):
            await self._directory.get().discard([bad])

    async def _write(self, filled: Filled) -> None:
        directory, chain, count = self._directory.get(), filled.chain, filled.count
        near = filled.near or self.near
        ask = Acquire(new_lease(), filled.request, [], reuse=0, unnamed=count, near=near, tenant=filled.tenant)
        try:
            lease = await directory.acquire(ask)
            self._mover.know(lease.places)
            blocks = [filled.runs[:, block] for block in range(count)]
            await self._mover.write_blocks(lease.targets, blocks, Priority.WRITE_BACK)
            told: tuple[Ids, BlockHash | None] | tuple[()] = ()
            if lease.wants_tokens and filled.tokens:
                told = filled.tokens, chain[-count - 1] if len(chain) > count else None
            await directory.commit(lease.lease, list(range(count)), chain[-count:], *told)
        finally:
            await asyncio.shield(self._release(ask.lease, chain[:-count]))

    async def _release(self, lease: LeaseId, prefix: list[BlockHash]) -> None:
        with contextlib.suppress(DangoError):  # it then ends by itself; a cancellation must go on
            await self._directory.get().release(lease, prefix)
