"""Blocks that a client copies or moves to a segment of its choice: it copies them itself, under a lease."""

import numpy as np

from kvcache_pool.api import Directory, Mover, Priority, SegmentStats
from kvcache_pool.leasing import Held, Leasing
from protocol.blocks import BlockLayout
from protocol.ids import BlockHash, SegmentId

BATCH_BYTES = 64 << 20
"""Held in memory, and copied in one go, which has a transfer's deadline."""


class Moving:
    """One client's copying between segments. The mover and the leases are another's."""

    def __init__(self, mover: Mover, leasing: Leasing, layout: BlockLayout) -> None:
        self._mover = mover
        self._leasing = leasing
        self._layout = layout

    async def to(self, directory: Directory, names: list[BlockHash], segment: SegmentId, *, moves: bool) -> int:
        """Copy the cached prefix of these to the segment, as far as there is room. What moves is forgotten
        elsewhere afterwards. Returns how many of them the segment has now. Raises ValueError for a segment that
        takes nothing."""
        require_taker(segment, await directory.segments())
        names = [*dict.fromkeys(names)]
        reach = (await directory.lookup(names)).reach if names else 0
        if not reach:
            return 0
        ask = self._leasing.ask(names[:reach], near=segment, copies=reach, moves=moves)
        async with self._leasing.leased(directory, ask) as held:
            there = sum(grant.segment == segment for grant in held.of.sources)
            return there + await self._copy(directory, held, names)

    async def _copy(self, directory: Directory, held: Held, names: list[BlockHash]) -> int:
        """All that the lease has room for, batch by batch; up to the first that is bad, which is forgotten."""
        lease, done = held.of, 0
        step = max(1, BATCH_BYTES // self._layout.block_bytes)
        for start in range(0, len(lease.copies), step):
            await held.last()
            batch = lease.copies[start : start + step]
            sources = [lease.sources[copy.source] for copy in batch]
            blocks = np.empty((len(batch), self._layout.layers, self._layout.run_bytes), np.uint8)
            good = await self._mover.read_blocks(sources, blocks, Priority.WRITE_BACK)
            targets = [copy.target for copy in batch[:good]]
            await self._mover.write_blocks(targets, blocks[:good], Priority.WRITE_BACK)
            slots = range(len(lease.targets) + start, len(lease.targets) + start + good)
            await directory.commit(lease.lease, [*slots], [names[copy.source] for copy in batch[:good]])
            done += good
            if good < len(batch):
                await directory.discard([sources[good]])
                break
        return done


def require_taker(segment: SegmentId, there: list[SegmentStats]) -> None:
    """Raises ValueError, saying why, for a segment that blocks cannot be copied to."""
    found = next((one for one in there if one.segment == segment), None)
    if found is None:
        names = ", ".join(sorted(one.segment for one in there)) or "none"
        raise ValueError(f"there is no segment {segment[:80]}; there are: {names}")
    if found.on_disk:
        raise ValueError(f"{segment} is a disk tier: blocks get there by being saved from the memory beside it")
    if found.draining:
        raise ValueError(f"{segment} is drained, and takes no blocks")
