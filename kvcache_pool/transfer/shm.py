"""Through shared memory: one copy, between a page and the mapped segment. For processes on one host."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvcache_pool.api import Grant, Place, Priority, Tier
from kvcache_pool.geometry import Geometry
from kvcache_pool.segment import Memory
from kvcache_pool.transfer.copiers import INLINE_BYTES, SLICED_BYTES, Copiers, Got, hops, leading
from kvcache_pool.transfer.copies import Copies, Span, Units
from protocol.errors import PeerLost

T = TypeVar("T")


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
        """How many leading units are good. Hops are done, whatever the ones before them found."""

        def hop(part: slice) -> int:
            return self._copies.get(span, grants[part], units, rows[part])

        return Got(leading(*await self._hops(span, len(grants), priority, hop)))

    async def write(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> None:
        """Raises Stale."""

        def hop(part: slice) -> None:
            self._copies.put(span, grants[part], units, rows[part])

        await self._hops(span, len(grants), priority, hop)

    async def _hops(
        self, span: Span, count: int, priority: Priority, hop: Callable[[slice], T]
    ) -> tuple[list[slice], list[T]]:
        """So many units, in hops, and the result of each hop."""
        unit_bytes, results = span.width * self._run_bytes, list[T]()
        if not self._in_loop(count * unit_bytes, priority):
            cut = hops(count, unit_bytes)
            return cut, await self._copiers.run_all(priority, [partial(hop, part) for part in cut])
        cut = hops(count, unit_bytes, most=INLINE_BYTES)
        for part in cut:
            results.append(hop(part))
            await asyncio.sleep(0)  # others have the loop in between; so with a caller of a hundred layers
        return cut, results

    def _in_loop(self, size: int, priority: Priority) -> bool:
        """What may be copied in the event loop. Not what lies on a disk: its pages may have to be read first."""
        waited_for = priority is not Priority.WRITE_BACK
        return self._in_memory and size <= (SLICED_BYTES if waited_for else INLINE_BYTES)

    async def aclose(self) -> None:
        """Nothing is owed: the mapping ends with its last user."""
