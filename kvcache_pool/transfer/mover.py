"""The mover that services are given: picks the way to each segment, and hides what is bad or gone."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from kvcache_pool.api import TRANSFER_S_MAX, Blocks, Grant, Mover, Place, Priority, Tier
from kvcache_pool.segment import Bytes
from kvcache_pool.transfer.copiers import Copiers, Got, together
from kvcache_pool.transfer.copies import Span, Units
from kvcache_pool.transfer.grain import in_bulk
from kvcache_pool.transfer.mooncake import MooncakeEnd, MooncakeRoute
from kvcache_pool.transfer.mooncake_engine import MooncakeSettings
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
    MOONCAKE = "mooncake"
    """Shared memory as AUTO, else Mooncake's Transfer Engine, and a stream where a segment is not offered so."""


class Fetched(NamedTuple):
    """What a read of whole blocks has brought, for who tries again. Numbers are indices in what was asked for."""

    missing: list[int]
    """Which are not there, in order; what lies in their memory is unspecified. All others are verified."""
    bad: list[int]
    """Of those: the first of each segment that its segment gave, and that is not what was written."""
    lost: frozenset[SegmentId]
    """Whose way failed."""


class BlockMover(Mover, Protocol):
    """A mover that tells of each block what became of it, for who tries again what failed."""

    async def fetch_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> Fetched:
        """As `read_blocks`, and tell which blocks of any segment are there, and what is wrong with the others."""
        ...

    async def store_blocks(
        self, grants: Sequence[Grant], blocks: Blocks, priority: Priority
    ) -> dict[SegmentId, DangoError]:
        """As `write_blocks`, to all segments that take them. Returns what each of the others says."""
        ...


class Route(Protocol):
    """The way to one segment. `read` may raise DangoError; both leave the deadline to their caller."""

    async def read(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> Got: ...

    async def write(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> None: ...

    async def aclose(self) -> None: ...


class PoolMover:
    """A BlockMover over all segments of the pool. Owns the ways and the copying threads until `aclose`."""

    def __init__(
        self,
        transport: Transport,
        host: str,
        reach: Reach = Reach.AUTO,
        mooncake: MooncakeSettings = MooncakeSettings(),  # noqa: B008  it is frozen
    ) -> None:
        """Raises ValueError where Mooncake's engine is wanted, and not installed."""
        self._transport = transport
        self._host = host
        self._reach = reach
        self._mooncake = MooncakeEnd(mooncake) if reach is Reach.MOONCAKE else None
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
        return leading_of(await self._get(Span(layer, 1), grants, out[:, None], pages, priority), grants)

    async def read_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> int:
        """See api.Mover."""
        return leading_of(await self.fetch_blocks(grants, blocks, priority), grants)

    async def fetch_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> Fetched:
        """As `read_blocks`, and tell which blocks of any segment are there, and what is wrong with the others."""
        return await self._get(self._whole(grants), grants, blocks, range(len(grants)), priority)

    def in_bulk(self, grants: Sequence[Grant]) -> bool:
        """See api.Mover."""
        segments = {grant.segment for grant in grants}
        sizes = [place.layout.block_bytes for name in segments if (place := self._places.get(name)) is not None]
        return in_bulk(len(grants), max(sizes, default=0), mapped=all(map(self._is_mapped, segments)))

    def _is_mapped(self, segment: SegmentId) -> bool:
        try:
            return isinstance(self._route(segment), ShmRoute)
        except PeerLost:  # a read will say so
            return False

    async def write(
        self,
        layer: int,
        grants: Sequence[Grant],
        source: Bytes,
        pages: Sequence[int],
        priority: Priority,
        filled: int | None = None,
    ) -> None:
        """See api.Mover. Pages go whole, however much of them is filled."""
        require_none(await self._put(Span(layer, 1), grants, source[:, None], pages, priority))

    async def write_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> None:
        """See api.Mover."""
        require_none(await self.store_blocks(grants, blocks, priority))

    async def store_blocks(
        self, grants: Sequence[Grant], blocks: Blocks, priority: Priority
    ) -> dict[SegmentId, DangoError]:
        """As `write_blocks`, but what it would raise is told of each segment that it failed for."""
        return await self._put(self._whole(grants), grants, blocks, range(len(grants)), priority)

    def _whole(self, grants: Sequence[Grant]) -> Span:
        """All layers: of one pool all segments have the same layout."""
        known = (self._places[grant.segment].layout.layers for grant in grants if grant.segment in self._places)
        return Span(0, next(known, 1))

    async def _get(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> Fetched:
        fetched, lost = Fetched([], [], frozenset()), set()

        async def part(segment: SegmentId, places: Sequence[int]) -> None:
            mine, its_rows, got = _pick(grants, places), _pick(rows, places), Got(0)
            try:
                async with asyncio.timeout(TRANSFER_S_MAX):
                    got = await self._route(segment).read(span, mine, units, its_rows, priority)
            except DangoError as error:
                got = Got(0, error)
            except TimeoutError:
                got = Got(0, DeadlineExceeded(f"it took over {TRANSFER_S_MAX} s"))
            fetched.missing.extend(places[got.good :])
            if got.fault is not None:
                lost.add(segment)
                log.warning("could not read layer %d from segment %s: %s", span.first, segment, got.fault)
            elif got.good < len(places):
                fetched.bad.append(places[got.good])

        await self._each(grants, part)
        return fetched._replace(missing=sorted(fetched.missing), lost=frozenset(lost))

    async def _put(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> dict[SegmentId, DangoError]:
        faults: dict[SegmentId, DangoError] = {}

        async def part(segment: SegmentId, places: Sequence[int]) -> None:
            mine, its_rows = _pick(grants, places), _pick(rows, places)
            try:
                async with asyncio.timeout(TRANSFER_S_MAX):
                    await self._route(segment).write(span, mine, units, its_rows, priority)
            except DangoError as error:
                faults[segment] = error
            except TimeoutError:
                text = f"writing to segment {segment} took over {TRANSFER_S_MAX} s"
                faults[segment] = DeadlineExceeded(text)

        await self._each(grants, part)
        return faults

    async def _each(
        self, grants: Sequence[Grant], part: Callable[[SegmentId, Sequence[int]], Coroutine[Any, Any, None]]
    ) -> None:
        """Run `part` for each segment, with the indices in `grants` that are its own, at once."""
        await self._close_retired()
        if len({grant.segment for grant in grants}) == 1:
            await part(grants[0].segment, range(len(grants)))
            return
        groups: dict[SegmentId, list[int]] = {}
        for position, grant in enumerate(grants):
            groups.setdefault(grant.segment, []).append(position)
        await together([part(segment, places) for segment, places in groups.items()])

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
        if self._reach in (Reach.AUTO, Reach.MOONCAKE) and place.host == self._host:
            try:
                return ShmRoute(place, self._copiers)
            except PeerLost as error:
                log.info("%s; trying its service", error)
        service = TcpRoute(place, self._copiers, self._transport)
        if self._reach is Reach.SERVICE:
            return service
        stream = StreamRoute(place, service)
        if self._mooncake is None or place.tier is not Tier.MEMORY:
            return stream
        return MooncakeRoute(place, self._mooncake, service.client, stream)

    async def _close_retired(self) -> None:
        while self._retired:
            await self._retired.pop().aclose()

    async def aclose(self) -> None:
        """See api.Mover."""
        self._retired.extend(self._routes.values())
        self._routes.clear()
        await self._close_retired()
        if self._mooncake is not None:
            self._mooncake.close()
        self._copiers.close()


def leading_of(fetched: Fetched, grants: Sequence[Grant]) -> int:
    """How many leading ones are there."""
    return fetched.missing[0] if fetched.missing else len(grants)


def require_none(faults: Mapping[SegmentId, DangoError]) -> None:
    """Raises the first fault, if there is one."""
    for error in faults.values():
        raise error


def _pick(values: Sequence[T], places: Sequence[int]) -> Sequence[T]:
    """Those at `places`; all of them as they are, where there is only one segment."""
    return values if len(places) == len(values) else [values[place] for place in places]
