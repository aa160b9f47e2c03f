"""Where the part of a transfer goes that has failed: other segments. Pure."""

from collections.abc import Collection, Sequence

from kvcache_pool.api import Found, SegmentStats
from protocol.ids import SegmentId


def next_source(found: Found, lost: Collection[SegmentId], near: SegmentId | None) -> tuple[int, SegmentId | None]:
    """How many of some blocks, which are `found` so, to lease now, and near which segment.

    While no segment is lost all of them are had at once. After that only what one of the others has alone: a lease
    near that one names no lost segment, since of several replicas the near one is chosen.
    """
    if not lost:
        return found.reach, near
    others = {SegmentId(name): count for name, count in found.held.items() if name not in lost}
    if not others:
        return 0, None
    best = max(others, key=lambda name: (others[name], name == near))
    return others[best], best


def next_target(segments: Sequence[SegmentStats], lost: Collection[SegmentId]) -> SegmentId | None:
    """The segment to write to in place of those that are lost: of memory, the one with the most room. None where
    there is no other."""
    others = [one for one in segments if not one.on_disk and one.segment not in lost]
    return max(others, key=lambda one: one.free + one.cached - one.leased - one.pinned).segment if others else None
