"""Through shared memory: one copy, between a page and the mapped segment. For processes on one host."""

from collections.abc import Sequence

from kvcache_pool.api import Corrupt, Grant, Place, Priority, Stale
from kvcache_pool.geometry import Geometry
from kvcache_pool.segment import Bytes, Memory
from kvcache_pool.transfer.copiers import Copiers, hops
from protocol.errors import PeerLost


class ShmRoute:
    """The way to one segment on this host. Owns the mapping, never the file."""

    def __init__(self, place: Place, copiers: Copiers) -> None:
        """Map it. Raises PeerLost if its file is gone or another."""
        geometry = Geometry(place.layout, place.slots)
        try:
            self._memory = Memory.attach(place.shm, geometry, place.incarnation)
        except (OSError, ValueError) as error:
            raise PeerLost(f"segment {place.segment} cannot be mapped: {error}") from error
        self._copiers = copiers
        self._run_bytes = place.layout.run_bytes
        self._block_bytes = place.layout.block_bytes

    async def read(
        self, layer: int, grants: Sequence[Grant], out: Bytes, pages: Sequence[int], priority: Priority
    ) -> int:
        """As Mover.read, within this segment."""
        done = 0
        for hop in hops(len(grants), self._run_bytes):
            wanted = grants[hop]
            good = await self._copiers.run(priority, self._get, layer, wanted, out, pages[hop])
            done += good
            if good < len(wanted):
                break
        return done

    async def write(
        self, layer: int, grants: Sequence[Grant], source: Bytes, pages: Sequence[int], priority: Priority
    ) -> None:
        """As Mover.write, within this segment."""
        for hop in hops(len(grants), self._run_bytes):
            await self._copiers.run(priority, self._put, layer, grants[hop], source, pages[hop])

    async def write_blocks(self, grants: Sequence[Grant], blocks: Sequence[Bytes], priority: Priority) -> None:
        """As Mover.write_blocks, within this segment."""
        for hop in hops(len(grants), self._block_bytes):
            await self._copiers.run(priority, self._put_blocks, grants[hop], blocks[hop])

    def _get(self, layer: int, grants: Sequence[Grant], out: Bytes, pages: Sequence[int]) -> int:
        for count, (grant, page) in enumerate(zip(grants, pages, strict=True)):
            try:
                self._memory.get(layer, grant.slot, grant.generation, out[page])
            except (Stale, Corrupt):
                return count
        return len(grants)

    def _put(self, layer: int, grants: Sequence[Grant], source: Bytes, pages: Sequence[int]) -> None:
        for grant, page in zip(grants, pages, strict=True):
            self._memory.put(layer, grant.slot, grant.generation, source[page])

    def _put_blocks(self, grants: Sequence[Grant], blocks: Sequence[Bytes]) -> None:
        for grant, block in zip(grants, blocks, strict=True):
            for layer, run in enumerate(block):
                self._memory.put(layer, grant.slot, grant.generation, run)

    async def aclose(self) -> None:
        """Nothing is owed: the mapping ends with its last user."""
