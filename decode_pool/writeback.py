"""Full blocks that are computed here go to the pool: the next turn of a chat finds them there.

Best effort: when the queue is full or the pool has no room, a block is simply not cached. The bytes
are copied out of the engine's pages when the block is full, so the pages' own life does not matter here.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcache_pool.api import Acquire, DirectoryLink, Grant, Mover, Priority, new_lease
from protocol.errors import DangoError
from protocol.ids import BlockHash, LeaseId, RequestId, SegmentId

BLOCKS_MAX = 64
"""Blocks that wait to be written: a few steps of a full batch; 23 MB of the default model's."""

log = logging.getLogger("dango.writeback")


@dataclass(frozen=True)
class Block:
    """A full block: the names of all blocks up to it, its own last, and its bytes [layers, 1, run_bytes]."""

    request: RequestId
    chain: list[BlockHash]
    runs: npt.NDArray[np.uint8]
    near: SegmentId | None = None
    """Where to store it if there is room; None: at the instance's home."""


class WriteBack:
    """One task and its bounded queue."""

    def __init__(self, mover: Mover, directory: DirectoryLink) -> None:
        self._mover = mover
        self._directory = directory
        self._queue: asyncio.Queue[Block] = asyncio.Queue(BLOCKS_MAX)
        self.near: SegmentId | None = None
        """The instance's home; heard from the registry."""
        self.written = 0
        self.dropped = 0

    def offer(self, block: Block) -> None:
        """Write this when there is time; dropped if too many wait."""
        if self._queue.full():
            self.dropped += 1
            return
        self._queue.put_nowait(block)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            block = await self._queue.get()
            try:
                await self._write(block)
                self.written += 1
            except DangoError as error:
                self.dropped += 1
                log.info("a block was not written back: %s", error, extra={"request": block.request})

    async def discard(self, grant: Grant) -> None:
        """A block of the pool that could not be read as it was written: it is forgotten, if that can be said."""
        with contextlib.suppress(DangoError):
            await self._directory.get().discard([grant])

    async def _write(self, block: Block) -> None:
        directory, chain = self._directory.get(), block.chain
        ask = Acquire(new_lease(), block.request, blocks=[], reuse=0, unnamed=1, near=block.near or self.near)
        try:
            lease = await directory.acquire(ask)
            self._mover.know(lease.places)
            await self._mover.write_blocks(lease.targets, [block.runs[:, 0]], Priority.WRITE_BACK)
            await directory.commit(lease.lease, [0], [chain[-1]])
        finally:
            await asyncio.shield(self._release(ask.lease, chain[:-1]))

    async def _release(self, lease: LeaseId, prefix: list[BlockHash]) -> None:
        with contextlib.suppress(DangoError):  # it then ends by itself; a cancellation must go on
            await self._directory.get().release(lease, prefix)
