"""The mover that services are given: picks the way to each segment, and hides what is bad or gone."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

from kvcache_pool.api import TRANSFER_S_MAX, Blocks, Grant, Place, Priority
from kvcache_pool.segment import Bytes
from kvcache_pool.transfer.copiers import Copiers, together
from kvcache_pool.transfer.copies import Span, Units
from kvcache_pool.transfer.shm import ShmRoute
from kvcache_pool.transfer.stream import StreamRoute
from kvcache_pool.transfer.tcp import TcpRoute
from protocol.errors import DangoError, DeadlineExceeded, PeerLost
from protocol.ids import SegmentId
from protocol.transport import Transport

log = logging.getLogger("dango.transfer")
T = TypeVar("T")


class Reach(Enum):
    """How to get at segments."""

    AUTO = "auto"
    """Shared memory where host and file are ours, else a stream, else the service."""
    SHM = "shm"
    TCP = "tcp"
    """A stream, and the service where none can be had."""
    SERVICE = "service"


class Route(Protocol):
    """The way to one segment. `read` may raise DangoError; both leave the deadline to their caller."""

    async def read(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> int: ...

    async def write(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> None: ...

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
        return await self._get(Span(layer, 1), grants, out[:, None], pages, priority)

    async def read_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> int:
        """See api.Mover."""
        return await self._get(self._whole(grants), grants, blocks, range(len(grants)), priority)

    async def write(
        self, layer: int, grants: Sequence[Grant], source: Bytes, pages: Sequence[int], priority: Priority
    ) -> None:
        """See api.Mover."""
        await self._put(Span(layer, 1), grants, source[:, None], pages, priority)

    async def write_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> None:
        """See api.Mover."""
        await self._put(self._whole(grants), grants, blocks, range(len(grants)), priority)

    def _whole(self, grants: Sequence[Grant]) -> Span:
        """All layers: of one pool all segments have the same layout."""
        known = (self._places[grant.segment].layout.layers for grant in grants if grant.segment in self._places)
        return Span(0, next(known, 1))

    async def _get(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> int:
        async def part(segment: SegmentId, places: Sequence[int]) -> int:
            """The index in `grants` of this segment's first bad unit, or len(grants)."""
            mine, its_rows = _pick(grants, places), _pick(rows, places)
            good = 0
            try:
                async with asyncio.timeout(TRANSFER_S_MAX):
                    good = await self._route(segment).read(span, mine, units, its_rows, priority)
            except (DangoError, TimeoutError) as error:
                log.warning("could not read layer %d from segment %s: %s", span.first, segment, error)
            return places[good] if good < len(places) else len(grants)

        return min(await self._each(grants, part), default=len(grants))

    async def _put(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> None:
        async def part(segment: SegmentId, places: Sequence[int]) -> None:
            mine, its_rows = _pick(grants, places), _pick(rows, places)
            try:
                async with asyncio.timeout(TRANSFER_S_MAX):
                    await self._route(segment).write(span, mine, units, its_rows, priority)
            except TimeoutError as error:
                raise DeadlineExceeded(f"writing to segment {segment} took over {TRANSFER_S_MAX} s") from error

        await self._each(grants, part)

    async def _each(
        self, grants: Sequence[Grant], part: Callable[[SegmentId, Sequence[int]], Coroutine[Any, Any, T]]
    ) -> list[T]:
        """Run `part` for each segment, with the indices in `grants` that are its own, at once."""
        await self._close_retired()
        if len({grant.segment for grant in grants}) == 1:
            return [await part(grants[0].segment, range(len(grants)))]
        groups: dict[SegmentId, list[int]] = {}
        for position, grant in enumerate(grants):
            groups.setdefault(grant.segment, []).append(position)
        return await together([part(segment, places) for segment, places in groups.items()])

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
        service = TcpRoute(place, self._copiers, self._transport)
        return service if self._reach is Reach.SERVICE else StreamRoute(place, service)

    async def _close_retired(self) -> None:
        while self._retired:
            await self._retired.pop().aclose()

    async def aclose(self) -> None:
        """See api.Mover."""
        self._retired.extend(self._routes.values())
        self._routes.clear()
        await self._close_retired()
        self._copiers.close()


def _pick(values: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    """Those at `places`; all of them as they are, where there is only one segment."""
    return values if len(places) == len(values) else [values[place] for place in places]
