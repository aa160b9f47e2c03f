"""Where new blocks go, and copies of cached ones. Pure.

New blocks go to memory; to a disk only what is saved there, whose asker says so (`near` is then that disk). A
segment that is drained gets none.

A tenant that would have more than its quota gives up blocks of its own first, where the new ones go as far as some
are there. Of others' it then takes no more than it was below its quota; at its quota, nothing.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvcache_pool.api import PoolFull, QuotaExceeded
from kvcache_pool.slots import Block, Slots
from protocol.ids import NO_TENANT, SegmentId, TenantId


class Room(NamedTuple):
    """What one segment does for a lease."""

    slots: Slots
    new: int
    """Blocks that go there."""
    own: int
    """Idle blocks of the lease's own tenant that go before."""


def rooms_for(
    count: int,
    segments: Mapping[SegmentId, Slots],
    near: SegmentId | None,
    sources: Sequence[Block],
    tenant: TenantId = NO_TENANT,
    over: int = 0,
) -> list[Room]:
    """Which segments give how many slots: one if it can, the near one first. `sources` are about to be leased, so
    not to be evicted; `over` blocks of `tenant` must go. Raises PoolFull, or of that QuotaExceeded."""
    home = segments.get(near) if near is not None else None
    to_disk = home is not None and home.on_disk
    able = {name: slots for name, slots in segments.items() if not slots.draining}
    spare = {name: slots.room for name, slots in able.items() if (name == near if to_disk else not slots.on_disk)}
    own = {name: able[name].idle.own(tenant) if over else 0 for name in spare}
    for block in sources:
        segment = block.home.place.segment
        if segment in spare and block.home.idle.may_go(block.slot):
            spare[segment] -= 1
            own[segment] -= over > 0
    if sum(own.values()) < over:
        most = max(0, count - over + sum(own.values()))
        raise QuotaExceeded(f"{count} blocks wanted, {most} can be had within the tenant's quota")
    if sum(spare.values()) < count:
        raise PoolFull(f"{count} blocks wanted, {sum(spare.values())} can be had")
    order = sorted(spare, key=lambda s: (s != near, -segments[s].free, -spare[s]))
    new = max(0, count - over)  # by so many the tenant grows: as many of the others' may go
    order.sort(key=lambda s: _most(segments[s].free, spare[s], min(over, own[s]), new) < count)
    rooms = []
    for segment in order:
        slots, goes = segments[segment], min(over, own[segment])
        share = min(count, _most(slots.free, spare[segment], goes, new))
        if share or goes:
            rooms.append(Room(slots, share, goes))
        count, over, new = count - share, over - goes, new - max(0, share - slots.free - goes)
    return rooms


def _most(free: int, spare: int, goes: int, new: int) -> int:
    """The slots that a segment can give, of `spare` ones: free ones, those of the tenant's blocks that go, and at
    most `new` more."""
    return free + goes + min(new, spare - free - goes)


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
