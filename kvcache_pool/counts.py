"""Counts of blocks over all segments. Pure."""

from collections.abc import Sequence

from kvcache_pool.api import SegmentStats, Stats
from kvcache_pool.tenants import Tenants


def stats_of(segments: Sequence[SegmentStats], leases: int, evicted: int, tenants: Tenants) -> Stats:
    """Of the pool: memory, and what is on disks apart."""
    memory = [one for one in segments if not one.on_disk]
    disks = [one for one in segments if one.on_disk]
    total, free, cached = (sum(counts) for counts in zip(*((0, 0, 0), *map(_counts, memory)), strict=True))
    disk_total, _, disk_cached = (sum(counts) for counts in zip(*((0, 0, 0), *map(_counts, disks)), strict=True))
    return Stats(
        total,
        free,
        cached,
        total - free - cached,
        sum(one.leased for one in memory),
        leases,
        evicted,
        sum(one.copies for one in memory),
        sum(one.pinned for one in segments),
        disk_total,
        disk_cached,
        len(tenants),
        tenants.largest,
        tenants.refused,
    )


def _counts(one: SegmentStats) -> tuple[int, int, int]:
    return one.total, one.free, one.cached
