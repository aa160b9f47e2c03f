"""Over Mooncake's Transfer Engine: one-sided reads, with RDMA where a machine has it.

    read     GetChecksums ─────> segment's service          Its memory is read meanwhile, without its process. What
             memory ───────────> buffer ─copy─> pages       lies in the pages then is hashed and compared.
    write    pages ─copy─> buffer
             PullRuns ─────────> segment's service          It reads the buffer, verifies the checksums, and only
             buffer <─────────── the same process           then writes its slots: nobody else ever does.

So a late writer is refused as on every other way, and no one-sided write is made at all. A hop that fails goes
again, that hop alone, by the ordinary way; so do all for AGAIN_S where the engine does not get through.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvcache_pool.api import (
    DIRECTORY_S,
    TRANSFER_S_MAX,
    Checksums,
    Done,
    GetChecksums,
    Grant,
    MooncakeAt,
    OpenMooncake,
    Place,
    Priority,
    PullRuns,
    Stale,
)
from kvcache_pool.geometry import Geometry
from kvcache_pool.segment import Bytes
from kvcache_pool.transfer.copiers import Copiers, Got, Turns, hops, leading, together
from kvcache_pool.transfer.copies import Span, Units, digests, same
from kvcache_pool.transfer.mooncake_engine import Buffer, Buffers, MooncakeSettings, TransferEngine
from kvcache_pool.transfer.stream import AGAIN_S, StreamRoute, stream_host
from protocol.blocks import BlockLayout
from protocol.errors import BadMessage, DangoError, DeadlineExceeded, RemoteError
from protocol.rpc import Client

BUFFERS = 8
"""Of a process that reads and writes segments; 2 MiB each, or a block if that is more."""

HOPS_AT_ONCE = 2
"""With one segment: one is on the wire while the other is verified. A segment that has stopped keeps no more."""

PULL_S = TRANSFER_S_MAX / 2
"""For a segment to fetch a hop, so that the ordinary way has time if it cannot."""

log = logging.getLogger("dango.transfer")


class MooncakeEnd:
    """This process's engine and buffers, from the first use on. Owns them until `close`."""

    def __init__(self, settings: MooncakeSettings) -> None:
        """Raises ValueError that says what is missing."""
        settings.require()
        self.settings = settings
        self._buffers: Buffers | None = None

    def toward(self, address: str, layout: BlockLayout) -> Buffers:
        """For transfers with whoever is there; the first decides by which of its addresses this host is known.
        Raises OSError."""
        if self._buffers is None:
            engine = TransferEngine(_own_host(stream_host(address)), self.settings)
            self._buffers = Buffers(engine, BUFFERS, layout.block_bytes)
        return self._buffers

    def close(self) -> None:
        """When all its ways are closed."""
        if self._buffers is not None:
            self._buffers.engine.close()
            self._buffers = None


class Way(NamedTuple):
    """What transfers with one segment need."""

    there: MooncakeAt
    buffers: Buffers


class MooncakeRoute:
    """The way to one segment on another host. Owns its threads and the ordinary way; the engine is another's."""

    def __init__(self, place: Place, end: MooncakeEnd, client: Client, ordinary: StreamRoute) -> None:
        """`client` is of the segment's service, and `ordinary` closes it."""
        self._place = place
        self._geometry = Geometry(place.layout, place.slots)
        self._end = end
        self._client = client
        self._ordinary = ordinary
        self._threads = Copiers()
        self._turns = Turns(HOPS_AT_ONCE)
        self._way: Way | None = None
        self._rests_until = 0.0
        self._opening = asyncio.Lock()

    async def read(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> Got:
        """How many leading units are good. Raises PeerLost and its like if none is."""
        way = await self._found()
        if way is None:
            return await self._ordinary.read(span, grants, units, rows, priority)
        cut = hops(len(grants), span.width * self._place.layout.run_bytes)
        parts = [Hop(span, grants[part], units, rows[part]) for part in cut]
        got = await together([self._read(way, hop, priority) for hop in parts])
        good = leading(cut, [one.good for one in got])
        fault = next(
            (one.fault for one, part in zip(got, parts, strict=True) if one.good < len(part.grants)), None
        )
        if fault is not None and not good:
            raise fault
        return Got(good, fault)

    async def write(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> None:
        """Raises Stale, Corrupt, PeerLost and its like."""
        way = await self._found()
        if way is None:
            await self._ordinary.write(span, grants, units, rows, priority)
            return
        cut = hops(len(grants), span.width * self._place.layout.run_bytes)
        parts = [Hop(span, grants[part], units, rows[part]) for part in cut]
        await together([self._write(way, hop, priority) for hop in parts])

    async def _read(self, way: Way, hop: "Hop", priority: Priority) -> Got:
        good = -1
        async with self._turns.turn(priority), way.buffers.one(priority) as buffer:
            if buffer is not None and self._way is way:
                try:
                    good = await self._verified(way, hop, buffer, priority)
                except DangoError as error:
                    return Got(0, error)
        if good == len(hop.grants):
            return Got(good)
        if good < 0 and self._way is way:
            self._rest(f"its memory could not be read in {way.there.session}")
        try:
            return await self._ordinary.read(hop.span, hop.grants, hop.units, hop.rows, priority)
        except DangoError as error:
            return Got(0, error)

    async def _verified(self, way: Way, hop: "Hop", buffer: Buffer, priority: Priority) -> int:
        """How many leading units are good; -1 if they could not be fetched."""
        stop, wanted = threading.Event(), hop.pieces(way.there.address, self._geometry)
        fetching = self._threads.run(priority, partial(_fetch, way, hop, wanted, buffer, stop), stop.set)
        both: list[Coroutine[Any, Any, Any]] = [self._noted(hop), fetching]
        noted, found = await together(both)
        if found is None:
            return -1
        runs = noted.valid * hop.span.width
        return same(found[:runs], noted.checksums, hop.span.width)

    async def _noted(self, hop: "Hop") -> Checksums:
        """Raises BadMessage unless the answer has what it says, and no more than was asked for."""
        ask = GetChecksums(*hop.span, *hop.slots())
        noted = await self._client.call(ask, Checksums, within_s=TRANSFER_S_MAX)
        if not 0 <= noted.valid <= len(hop.grants) or len(noted.checksums) != noted.valid * hop.span.width:
            raise BadMessage(f"{self._client.address} answered with other checksums than it was asked for")
        return noted

    async def _write(self, way: Way, hop: "Hop", priority: Priority) -> None:
        async with self._turns.turn(priority), way.buffers.one(priority) as buffer:
            if buffer is not None and self._way is way:
                found = await self._threads.run(priority, partial(hop.pack, buffer))
                where = way.buffers.engine.session, buffer.address
                try:
                    pull = PullRuns(*where, *hop.span, *hop.slots(), found)
                    await self._client.call(pull, Done, within_s=PULL_S)
                    return
                except Stale:
                    raise
                except (RemoteError, DeadlineExceeded) as error:
                    self._rest(f"it could not take runs from {where[0]}: {error}")
        await self._ordinary.write(hop.span, hop.grants, hop.units, hop.rows, priority)

    async def _found(self) -> Way | None:
        """How transfers go; None while they cannot. Raises PeerLost if the service is not there either."""
        if self._way is None and self._now() >= self._rests_until:
            async with self._opening:
                if self._way is None and self._now() >= self._rests_until:
                    await self._open()
        return self._way

    async def _open(self) -> None:
        try:
            there = await self._client.call(OpenMooncake(), MooncakeAt, within_s=DIRECTORY_S)
            if there.protocol != self._end.settings.protocol:
                raise BadMessage(f"it speaks {there.protocol}, and here it is {self._end.settings.protocol}")
            self._way = Way(there, self._end.toward(self._place.address, self._place.layout))
        except (RemoteError, BadMessage, OSError) as error:
            self._rest(str(error))

    def _rest(self, why: str) -> None:
        segment = self._place.segment
        log.warning("segment %s is not reached by Mooncake's engine for %g s: %s", segment, AGAIN_S, why)
        self._way = None
        self._rests_until = self._now() + AGAIN_S

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def aclose(self) -> None:
        """Transfers end in GIVE_UP_S, or by cancellation."""
        self._way = None
        await asyncio.to_thread(self._threads.close)
        await self._ordinary.aclose()


class Hop(NamedTuple):
    """What goes through one buffer."""

    span: Span
    grants: Sequence[Grant]
    units: Units
    rows: Sequence[int]

    def slots(self) -> tuple[list[int], list[int]]:
        """And generations."""
        return [grant.slot for grant in self.grants], [grant.generation for grant in self.grants]

    def pieces(self, runs: int, geometry: Geometry) -> list[tuple[int, int]]:
        """(address, bytes) in the segment's process, where its runs begin at `runs`. Neighbours are one piece."""
        first, size = self.span.first * geometry.layout.run_bytes, self.span.width * geometry.layout.run_bytes
        found: list[tuple[int, int]] = []
        for _, slot, _ in self.grants:
            address = runs + slot * geometry.slot_bytes + first
            if found and sum(found[-1]) == address:
                found[-1] = found[-1][0], found[-1][1] + size
            else:
                found.append((address, size))
        return found

    def pack(self, buffer: Buffer) -> list[int]:
        """Copy to the buffer. Returns the checksums of what lies there now."""
        packed = self._in(buffer)
        for place, row in zip(packed, self.rows, strict=True):
            np.copyto(place, self.units[row])
        return digests(self.grants, packed, range(len(packed)))

    def unpack(self, buffer: Buffer) -> list[int]:
        """Copy from the buffer. Returns the checksums of what lies in the units now."""
        for place, row in zip(self._in(buffer), self.rows, strict=True):
            np.copyto(self.units[row], place)
        return digests(self.grants, self.units, self.rows)

    def _in(self, buffer: Buffer) -> Bytes:
        """[units, width, run_bytes]"""
        shape = (len(self.rows), *self.units[self.rows[0]].shape)
        return buffer.bytes[: int(np.prod(shape))].reshape(shape)


def _fetch(
    way: Way, hop: Hop, pieces: Sequence[tuple[int, int]], buffer: Buffer, stop: threading.Event
) -> list[int] | None:
    """In a thread: the checksums of what came, in the units by then; None if it did not."""
    if way.buffers.engine.fetch(way.there.session, pieces, buffer, stop):
        return hop.unpack(buffer)
    return None


def _own_host(other: str) -> str:
    """The address of this host that leads to the other. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((other, 9))  # nothing is sent
        return str(sock.getsockname()[0])
