"""The mover that services are given: picks the way to each segment, and hides what is bad or gone."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Protocol

from kvcache_pool.api import TRANSFER_S_MAX, Grant, Place, Priority
from kvcache_pool.segment import Bytes
from kvcache_pool.transfer.copiers import Copiers
from kvcache_pool.transfer.shm import ShmRoute
from kvcache_pool.transfer.tcp import TcpRoute
from protocol.errors import DangoError, DeadlineExceeded, PeerLost
from protocol.ids import SegmentId
from protocol.transport import Transport

log = logging.getLogger("dango.transfer")


class Reach(Enum):
    """How to get at segments."""

    AUTO = "auto"
    """Shared memory where host and file are ours, else the service."""
    SHM = "shm"
    TCP = "tcp"


class Route(Protocol):
    """The way to one segment. `read` may raise DangoError; both leave the deadline to their caller."""

    async def read(
        self, layer: int, grants: Sequence[Grant], out: Bytes, pages: Sequence[int], priority: Priority
    ) -> int: ...

    async def write(
        self, layer: int, grants: Sequence[Grant], source: Bytes, pages: Sequence[int], priority: Priority
    ) -> None: ...

    async def write_blocks(self, grants: Sequence[Grant], blocks: Sequence[Bytes], priority: Priority) -> None: ...

    async def aclose(self) -> None: ...


class PoolMover:
    """An api.Mover over all segments of the pool. Owns the ways and the copying threads until `aclose`."""

    def __init__(self, transport: Transport, host: str, reach: Reach = Reach.AUTO) -> None:
        self._transport = transport
        self._host = host
        self._reach = reach
        self._copiers = Copiers()
        self._places: dict[SegmentId, Place] = {}
        self._routes: dict[SegmentId, Route] = {}
        self._retired: list[Route] = []

    def know(self, places: Sequence[Place]) -> None:
        """Learn where segments are; one that has restarted is reached anew."""
        for place in places:
            if self._places.get(place.segment) != place:
                self._places[place.segment] = place
                old = self._routes.pop(place.segment, None)
                if old is not None:
                    self._retired.append(old)

    async def read(
        self, layer: int, grants: Sequence[Grant], out: Bytes, pages: Sequence[int], priority: Priority
    ) -> int:
        """See api.Mover."""

        async def part(segment: SegmentId, places: list[int]) -> int:
            """The index in `grants` of this segment's first bad run, or len(grants)."""
            mine, rows = [grants[i] for i in places], [pages[i] for i in places]
            good = 0
            try:
                async with asyncio.timeout(TRANSFER_S_MAX):
                    good = await self._route(segment).read(layer, mine, out, rows, priority)
            except (DangoError, TimeoutError) as error:
                log.warning("could not read layer %d from segment %s: %s", layer, segment, error)
            return places[good] if good < len(places) else len(grants)

        firsts = await self._each(grants, part)
        return min((first for first in firsts if isinstance(first, int)), default=len(grants))

    async def write(
        self, layer: int, grants: Sequence[Grant], source: Bytes, pages: Sequence[int], priority: Priority
    ) -> None:
        """See api.Mover."""

        async def put(route: Route, places: list[int]) -> None:
            mine, rows = [grants[i] for i in places], [pages[i] for i in places]
            await route.write(layer, mine, source, rows, priority)

        await self._put(grants, put)

    async def write_blocks(self, grants: Sequence[Grant], blocks: Sequence[Bytes], priority: Priority) -> None:
        """See api.Mover."""

        async def put(route: Route, places: list[int]) -> None:
            await route.write_blocks([grants[i] for i in places], [blocks[i] for i in places], priority)

        await self._put(grants, put)

    async def _put(self, grants: Sequence[Grant], put: Callable[[Route, list[int]], Awaitable[None]]) -> None:
        """Run `put` for each segment, with the indices in `grants` that are its own, within the deadline."""

        async def part(segment: SegmentId, places: list[int]) -> int:
            try:
                async with asyncio.timeout(TRANSFER_S_MAX):
                    await put(self._route(segment), places)
            except TimeoutError as error:
                raise DeadlineExceeded(f"writing to segment {segment} took over {TRANSFER_S_MAX} s") from error
            return len(places)

        await self._each(grants, part)

    async def _each(
        self, grants: Sequence[Grant], part: Callable[[SegmentId, list[int]], Awaitable[int]]
    ) -> list[int]:
        """Run `part` for each segment at once; when all have ended, raise the first error."""
        await self._close_retired()
        groups: dict[SegmentId, list[int]] = {}
        for position, grant in enumerate(grants):
            groups.setdefault(grant.segment, []).append(position)
        results = await asyncio.gather(*(part(*group) for group in groups.items()), return_exceptions=True)
        # Only when all have ended: until then they use the caller's memory.
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, int)]

    def _route(self, segment: SegmentId) -> Route:
        """The way to a segment, found at its first use. Raises PeerLost."""
        if segment not in self._routes:
            place = self._places.get(segment)
            if place is None:
                raise PeerLost(f"nobody has told where segment {segment} is")
            self._routes[segment] = self._open(place)
        return self._routes[segment]

    def _open(self, place: Place) -> Route:
        if self._reach is Reach.SHM:
            return ShmRoute(place, self._copiers)
        if self._reach is Reach.AUTO and place.host == self._host:
            try:
                return ShmRoute(place, self._copiers)
            except PeerLost as error:
                log.info("%s; trying its service", error)
        return TcpRoute(place, self._copiers, self._transport)

    async def _close_retired(self) -> None:
        while self._retired:
            await self._retired.pop().aclose()

    async def aclose(self) -> None:
        """See api.Mover."""
        self._retired.extend(self._routes.values())
        self._routes.clear()
        await self._close_retired()
        self._copiers.close()
