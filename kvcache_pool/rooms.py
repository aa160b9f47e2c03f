"""Where new blocks go, and copies of cached ones. Pure.

New blocks go to memory; to a disk only what is saved there, whose asker says so (`near` is then that disk). A
segment that is drained gets none.
"""

from collections.abc import Mapping, Sequence

from kvcache_pool.api import PoolFull
from kvcache_pool.slots import Block, Slots
from protocol.ids import SegmentId


def rooms_for(
    count: int, segments: Mapping[SegmentId, Slots], near: SegmentId | None, sources: Sequence[Block]
) -> list[tuple[Slots, int]]:
    """Which segments give how many slots: one if it can, the near one first. `sources` are about to be leased, so
    not to be evicted. Raises PoolFull."""
    home = segments.get(near) if near is not None else None
    to_disk = home is not None and home.on_disk
    able = {name: slots for name, slots in segments.items() if not slots.draining}
    spare = {name: slots.room for name, slots in able.items() if (name == near if to_disk else not slots.on_disk)}
    for block in sources:
        if block.home.place.segment in spare:
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


def copies_for(copies: int, slots: Slots, sources: Sequence[Block], *, moves: bool = False) -> list[int]:
    """Which sources get a slot in this segment too, as far as there is room: those that other memory has. What is
    on a disk comes to memory otherwise: see tiers.py. What moves comes from anywhere, and is no copy."""
    elsewhere = [source for source, block in enumerate(sources) if block.home is not slots]
    if slots.on_disk or slots.draining:
        return []
    if moves:
        return elsewhere[: min(copies, slots.room)]
    in_memory = [source for source in elsewhere if not sources[source].home.on_disk]
    return in_memory[: min(copies, slots.copies_room)]


def with_copies(sources: list[Block], copies: dict[int, Block]) -> list[Block]:
    """Each source with its copy, so that both are used, and one day evicted, in the order of the prompt."""
    if not copies:
        return sources
    return [block for n, source in enumerate(sources) for block in (source, copies.get(n)) if block is not None]
