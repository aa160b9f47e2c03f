"""Through shared memory: one copy, between a page and the mapped segment. For processes on one host."""

import asyncio
from collections.abc import Sequence
from functools import partial

from kvcache_pool.api import Grant, Place, Priority, Tier
from kvcache_pool.geometry import Geometry
from kvcache_pool.segment import Memory
from kvcache_pool.transfer.copiers import INLINE_BYTES, Copiers, Got, hops, leading
from kvcache_pool.transfer.copies import Copies, Span, Units
from protocol.errors import PeerLost


class ShmRoute:
    """The way to one segment on this host. Owns the mapping, never the file."""

    def __init__(self, place: Place, copiers: Copiers) -> None:
        """Map it. Raises PeerLost if its file is gone or another."""
        geometry = Geometry(place.layout, place.slots)
        try:
            self._copies = Copies(Memory.attach(place.shm, geometry, place.incarnation))
        except (OSError, ValueError) as error:
            raise PeerLost(f"segment {place.segment} cannot be mapped: {error}") from error
        self._copiers = copiers
        self._in_memory = place.tier is Tier.MEMORY
        self._run_bytes = place.layout.run_bytes

    async def read(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> Got:
        """How many leading units are good. Hops go beside each other, whatever the ones before them found."""
        if self._short(span, grants):
            good = self._copies.get(span, grants, units, rows)
            await asyncio.sleep(0)  # a caller with a hundred layers lets others have the loop in between
            return Got(good)
        cut = hops(len(grants), span.width * self._run_bytes)

        def hop(part: slice) -> int:
            return self._copies.get(span, grants[part], units, rows[part])

        return Got(leading(cut, await self._copiers.run_all(priority, [partial(hop, part) for part in cut])))

    async def write(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> None:
        """Raises Stale."""
        if self._short(span, grants):
            self._copies.put(span, grants, units, rows)
            await asyncio.sleep(0)
            return
        cut = hops(len(grants), span.width * self._run_bytes)

        def hop(part: slice) -> None:
            self._copies.put(span, grants[part], units, rows[part])

        await self._copiers.run_all(priority, [partial(hop, part) for part in cut])

    def _short(self, span: Span, grants: Sequence[Grant]) -> bool:
        """What may be copied in the event loop. Not what lies on a disk: its pages may have to be read first."""
        return self._in_memory and len(grants) * span.width * self._run_bytes <= INLINE_BYTES

    async def aclose(self) -> None:
        """Nothing is owed: the mapping ends with its last user."""
