"""Reads a cached prefix into the caller's memory. What fails is read again from another replica, and only that."""

import logging
from collections.abc import Sequence

from kvcache_pool.api import Blocks, Directory, Found, LeaseLost, PoolFull, Priority
from kvcache_pool.leasing import Held, Leasing
from kvcache_pool.retrying import next_source
from kvcache_pool.transfers import Progress
from protocol.ids import BlockHash, SegmentId

FAULTS_MAX = 8
"""Of one load: after each, one block more is forgotten or one segment less is asked. More are no accident."""

log = logging.getLogger("dango.pool")


class Load:
    """One prefix that is being read. Always: what is not `_missing` and comes before `_end` is there, verified."""

    def __init__(
        self,
        leasing: Leasing,
        directory: Directory,
        names: Sequence[BlockHash],
        rows: Blocks,
        progress: Progress,
        priority: Priority,
    ) -> None:
        """`rows` has room for every name."""
        self._leasing = leasing
        self._directory = directory
        self._names = names
        self._rows = rows
        self._progress = progress
        self._priority = priority
        self._end = len(names)
        self._missing = list(range(len(names)))
        self._lost: set[SegmentId] = set()

    async def run(self, found: Found | None = None) -> int:
        """How many leading blocks are there. `found` is what the directory has just said of them. Raises PeerLost
        and its like if the directory is away, PoolFull and LeaseLost if it gives no lease time and again."""
        faults = 0
        while self._missing and faults < FAULTS_MAX:
            if found is None:
                found = await self._directory.lookup([self._names[place] for place in self._missing])
            count, near = next_source(found, self._lost, self._leasing.near)
            self._cut(found.reach)
            if count == 0:
                break
            found = None
            try:
                faults += not await self._read(self._missing[:count], near)
            except (PoolFull, LeaseLost) as error:  # some went meanwhile, and have no room; or it took too long
                faults += 1
                if faults == FAULTS_MAX:
                    raise
                log.info("leased anew: %s", error)
        return self._missing[0] if self._missing else self._end

    def _cut(self, reach: int) -> None:
        """Of what is missing, only so many leading ones are cached: the prefix ends there."""
        if reach < len(self._missing):
            self._end = self._missing[reach]
            del self._missing[reach:]

    async def _read(self, places: list[int], near: SegmentId | None) -> bool:
        """Read these, up to the first batch with a fault; False if there was one, or nothing to read."""
        names = [self._names[place] for place in places]
        async with self._leasing.leased(self._directory, self._leasing.ask(names, near=near)) as held:
            count = len(held.of.sources)
            for batch in self._leasing.batches(count):
                await held.last()
                if not await self._read_batch(held, batch, places[batch]):
                    return False
        return count > 0

    async def _read_batch(self, held: Held, batch: slice, places: list[int]) -> bool:
        grants = held.of.sources[batch]
        got = await self._leasing.mover.fetch_blocks(grants, _picked(self._rows, places), self._priority)
        self._progress.done += len(grants) - len(got.missing)
        failed = {places[number] for number in got.missing}
        done = {places[number] for number in range(len(grants))} - failed
        self._missing = [place for place in self._missing if place not in done]
        reached = self._leasing.reached
        reached.update(grant.segment for number, grant in enumerate(grants) if places[number] in done)
        self._lost |= got.lost
        bad = [grants[number] for number in got.bad]
        # A segment of which nothing was ever read may only be out of our reach: it keeps its blocks.
        self._lost.update(grant.segment for grant in bad if grant.segment not in reached)
        if forget := [grant for grant in bad if grant.segment in reached]:
            await self._directory.discard(forget)
        return not got.missing


def _picked(rows: Blocks, places: Sequence[int]) -> Blocks:
    """Those at `places`; where these are in a row, as they lie."""
    if places[-1] - places[0] + 1 == len(places):
        return rows[places[0] : places[-1] + 1]
    return [rows[place] for place in places]
