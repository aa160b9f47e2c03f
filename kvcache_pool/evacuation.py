"""A segment that is drained: its owner carries its blocks to wherever the directory has room for them.

    directory                          owner of the segment                          another segment
        │ <──────────── Carry ──────────────── │                                            │
        │ ── Carried: sources, targets ──────> │ read its own memory, verify                │
        │                                      │ ── write, with new checksums ────────────> │
        │ <──────── Commit, Release ────────── │
        │ forgets them here when their new segment has noted them and nobody reads them here any more

It goes on after any death: a new directory hears from the segment that it is drained, and a new life of the owner
reads it in its file. Until a block is committed elsewhere, it is where it was.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import numpy as np

from kvcache_pool.api import Carried, Carry, Directory, DirectoryLink, Mover, Priority, new_lease
from kvcache_pool.segment import Segment
from protocol.errors import DangoError
from protocol.ids import SegmentId
from protocol.transport import Transport

ROUND_BLOCKS = 64
"""Of one round, and ROUND_BYTES."""

ROUND_BYTES = 64 << 20
"""What a slow network moves within the deadline of a transfer, and a lease outlasts."""

PACE_S = 0.05
"""Between two rounds: 400 MB/s of a small model, with most of a core left for who reads and writes here."""

IDLE_S = 0.5
"""Until the next look, when nothing is to be carried."""

AVOID_S = 5.0
"""How long a segment that could not be written to is left alone: a dead one is given up by then."""

log = logging.getLogger("dango.evacuation")


class Evacuation:
    """Of one segment, whenever it is drained. The segment and the mover are another's."""

    def __init__(self, segment: Segment, mover: Mover) -> None:
        self._segment = segment
        self._mover = mover
        self._avoided: dict[SegmentId, float] = {}  # until when

    async def run(self, transport: Transport, directory: Callable[[], str | None]) -> None:
        """Until cancelled, at whichever directory there is."""
        link = DirectoryLink(transport)
        try:
            while True:
                await link.follow(directory())
                carried = 0
                if self._segment.draining:
                    try:
                        carried = await self.round(link.get())
                    except DangoError as error:  # the directory is away, or has no lease: later
                        log.info("nothing is carried out of %s: %s", self._segment.segment, error)
                await asyncio.sleep(PACE_S if carried else IDLE_S)
        finally:
            await link.aclose()

    async def round(self, directory: Directory) -> int:
        """Carry some blocks. Returns how many; 0 when nothing is to be carried now. Raises DangoError."""
        limit = max(1, min(ROUND_BLOCKS, ROUND_BYTES // self._segment.memory.geometry.layout.block_bytes))
        ask = Carry(new_lease(), self._segment.segment, limit, self._avoid())
        try:
            carried = await directory.carry(ask)
            if not carried.blocks:
                return 0
            self._mover.know(carried.places)
            good = await self._copy(directory, carried)
            await directory.commit(ask.lease, good, [carried.blocks[position] for position in good])
            return len(good)
        finally:
            await asyncio.shield(_release(directory, ask))

    def _avoid(self) -> list[SegmentId]:
        now = asyncio.get_running_loop().time()
        self._avoided = {segment: end for segment, end in self._avoided.items() if end > now}
        return [*self._avoided]

    async def _copy(self, directory: Directory, carried: Carried) -> list[int]:
        """Which of them are written whole."""
        layout = self._segment.memory.geometry.layout
        blocks = np.empty((len(carried.blocks), layout.layers, layout.run_bytes), np.uint8)
        good = await self._mover.read_blocks(carried.sources, blocks, Priority.WRITE_BACK)
        if good < len(blocks):  # bad: it is not wanted anywhere
            await directory.discard([carried.sources[good]])
        groups: dict[SegmentId, list[int]] = {}
        for position, grant in enumerate(carried.targets[:good]):
            groups.setdefault(grant.segment, []).append(position)
        written: list[int] = []
        for segment, group in groups.items():
            try:
                targets = [carried.targets[position] for position in group]
                await self._mover.write_blocks(targets, [blocks[p] for p in group], Priority.WRITE_BACK)
            except DangoError as error:
                log.warning("%d blocks cannot be carried to %s: %s", len(group), segment, error)
                self._avoided[segment] = asyncio.get_running_loop().time() + AVOID_S
            else:
                written += group
        return written


async def _release(directory: Directory, ask: Carry) -> None:
    with contextlib.suppress(DangoError):  # it then ends by itself
        await directory.release(ask.lease)
