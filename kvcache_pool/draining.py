"""A segment that is drained: what leaves it, where that goes, and what may be forgotten there. Pure.

    cached ──carried──> cached elsewhere too ──noted there, and idle here──> forgotten
      └──no free slot elsewhere, and colder than all that is there──> dropped: not what is pinned or leased

What was used last goes first. It takes a free slot, or that of the next to be evicted elsewhere if this was used
longer ago: what the pool loses by a drain is what it would have lost before, had it been so small.

Neither the slots of such a segment nor what they hold count for quotas: the pool is as small already, and what is
carried counts where it comes to. No drain waits for a quota. A tenant that has its quota elsewhere takes free
slots beyond it, but no other's place: its own that was used longer ago goes, or what would be carried. What is
pinned takes any.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvcache_pool.api import CannotDrain, PinKind
from kvcache_pool.slots import Block, Slots
from protocol.ids import SegmentId

LOOKS_MAX = 4096
"""Blocks that one call looks at. Those that must wait go behind the others, so that all have their turn."""


def require_drainable(segment: SegmentId, segments: Mapping[SegmentId, Slots]) -> Slots:
    """The segment. Raises CannotDrain, saying why."""
    slots = segments.get(segment)
    if slots is None:
        there = ", ".join(sorted(segments)) or "none"
        raise CannotDrain(f"there is no segment {segment[:80]}; there are: {there}")
    if not slots.draining and not any(other is not slots for other in staying(segments.values())):
        raise CannotDrain(f"{segment} cannot be drained: no other memory stays that could take its blocks")
    return slots


def begin(slots: Slots) -> None:
    """From now on the segment gives no slots, and its blocks leave, what was used last first."""
    slots.draining = True
    slots.strike()
    slots.behind.clear()
    leased = [block.slot for block in slots.used() if block.name is not None and block.leases]
    for slot in [*slots.idle, *leased]:
        if slot not in slots.moved:
            slots.leave_next(slot)


def end(slots: Slots) -> None:
    """It is a segment like any other again."""
    slots.draining = False
    slots.enlist()
    slots.leaving.clear()
    slots.moved.clear()


def staying(segments: Iterable[Slots]) -> list[Slots]:
    """Memory that is not drained."""
    return [slots for slots in segments if not slots.draining and not slots.on_disk]


def target_for(
    block: Block, stay: Sequence[Slots], last: Slots | None, planned: Mapping[Slots, int], *, at_quota: bool
) -> Slots | None:
    """Which of these segments takes a block: a free slot in the `last` that took one, so that chains stay
    together, or where most are; else the slot of what goes next there, if that is colder or this is pinned. What
    leaves a disk was not wanted in memory, so it takes free slots only, and none if its tenant is `at_quota`; from
    memory it then takes the slot of its tenant's own. `planned`: hard pins on their way."""
    kind = block.home.idle.kind(block.slot)
    if at_quota and block.home.on_disk and kind is None:
        return None
    if kind is PinKind.HARD:
        stay = [slots for slots in stay if slots.idle.hard_room > planned.get(slots, 0)]
    if last is not None and last in stay and last.free:
        return last
    free = max(stay, key=lambda slots: slots.free, default=None)
    if free is not None and free.free:
        return free
    if block.home.on_disk and kind is None:
        return None
    ages = [(age, n) for n, slots in enumerate(stay) if (age := slots.next_own(block.tenant)) is not None]
    if not at_quota or (kind is not None and not ages):
        ages = [(age, n) for n, slots in enumerate(stay) if (age := slots.next_to_go) is not None]
    coldest = min(ages, default=None)
    bound = kind is None and (at_quota or not block.leases)  # two in use do not drive each other out in turn
    if coldest is None or (bound and coldest[0] >= block.home.age(block.slot)):
        return None
    return stay[coldest[1]]


def pass_pin(block: Block, other: Block) -> bool:
    """Let another replica have a block's pin, if it has one. False if the other's segment can have no more."""
    pin, name = block.home.idle.pin_of(block.slot), block.name
    assert name is not None, "what is pinned has a name"
    if pin is None:
        return True
    if not other.home.idle.pin(other.slot, name, *pin):
        return False
    block.home.idle.unpin(block.slot, name)
    return True


def elsewhere(block: Block, replicas: Iterable[Block]) -> Block | None:
    """The replica of a block in memory that stays, if there is one."""
    others = (one for one in replicas if one.home is not block.home)
    return next((one for one in others if not one.home.draining and not one.home.on_disk), None)
