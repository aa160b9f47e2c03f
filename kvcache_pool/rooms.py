"""Where new blocks go. Pure."""

from collections.abc import Mapping, Sequence

from kvcache_pool.api import PoolFull
from kvcache_pool.slots import Block, Slots
from protocol.ids import SegmentId


def rooms_for(
    count: int, segments: Mapping[SegmentId, Slots], near: SegmentId | None, sources: Sequence[Block]
) -> list[tuple[Slots, int]]:
    """Which segments give how many slots: one if it can, the near one first. `sources` are about to be leased, so
    not to be evicted. Raises PoolFull."""
    spare = {segment: slots.room for segment, slots in segments.items()}
    for block in sources:
        spare[block.home.place.segment] -= block.home.idle.may_go(block.slot)
    if sum(spare.values()) < count:
        raise PoolFull(f"{count} blocks wanted, {sum(spare.values())} can be had")
    order = sorted(spare, key=lambda s: (s != near, -segments[s].free, -spare[s]))
    for segment in order:
        if spare[segment] >= count:
            return [(segments[segment], count)]
    shares = []
    for segment in order:
        share = min(count, spare[segment])
        shares.append((segments[segment], share))
        count -= share
    return shares
