"""Over the segment's service: runs are frames beside a message, sent from and verified in place.

Slower than a stream (`stream.py`), and needs nothing but the service's own address.

The checksum travels with each run from writer to segment to reader, and whoever puts a run into memory
verifies it there. So a frame whose memory was reused before the network took it is found out too.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvcache_pool.api import TRANSFER_S_MAX, Done, Grant, Place, Priority, ReadLayer, Runs, WriteLayer
from kvcache_pool.segment import Bytes, checksum
from kvcache_pool.transfer.copiers import Copiers, Got, Turns, hops
from kvcache_pool.transfer.copies import Span, Units
from protocol.errors import BadMessage
from protocol.rpc import Client
from protocol.transport import Transport

MESSAGES_AT_ONCE = 2
"""On one connection: one is on the wire while the other is being copied. More would only let what is less
urgent go before what is more."""


class TcpRoute:
    """The way to one segment anywhere. Owns one connection."""

    def __init__(self, place: Place, copiers: Copiers, transport: Transport) -> None:
        """Begin to connect; needs a running loop."""
        self.client = Client(transport, place.address).start()
        self._copiers = copiers
        self._turns = Turns(MESSAGES_AT_ONCE)
        self._run_bytes = place.layout.run_bytes

    async def read(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> Got:
        """How many leading units are good: a message carries one layer. Raises PeerLost and its like."""
        good = len(grants)
        for number in range(span.width):
            runs = [units[row][number] for row in rows[:good]]
            good = await self._read(span.first + number, grants[:good], runs, priority)
        return Got(good)

    async def write(
        self, span: Span, grants: Sequence[Grant], units: Units, rows: Sequence[int], priority: Priority
    ) -> None:
        """Raises Stale, Corrupt, PeerLost and its like."""
        for number in range(span.width):
            runs = [units[row][number] for row in rows]
            await self._write(span.first + number, grants, runs, priority)

    async def _read(self, layer: int, grants: Sequence[Grant], out: Sequence[Bytes], priority: Priority) -> int:
        done = 0
        for hop in hops(len(grants), self._run_bytes):
            wanted, to = grants[hop], out[hop]
            async with self._turns.turn(priority):
                message = ReadLayer(layer, *_slots(wanted))
                answer = await self.client.call_raw(message, within_s=TRANSFER_S_MAX)
                runs, frames = self._checked(answer.message, answer.buffers, len(wanted)), answer.buffers
                good = await self._copiers.run(priority, partial(_take, runs, frames, wanted, to))
            done += good
            if good < len(wanted):
                break
        return done

    async def _write(
        self, layer: int, grants: Sequence[Grant], source: Sequence[Bytes], priority: Priority
    ) -> None:
        for hop in hops(len(grants), self._run_bytes):
            async with self._turns.turn(priority):
                wanted, runs = grants[hop], source[hop]
                checksums = await self._copiers.run(priority, partial(_checksums, wanted, runs))
                message = WriteLayer(layer, *_slots(wanted), checksums)
                frames = [run.data for run in runs]
                await self.client.call(message, Done, *frames, within_s=TRANSFER_S_MAX)

    async def aclose(self) -> None:
        """Close the connection; calls in flight end in PeerLost."""
        await self.client.aclose()

    def _checked(self, message: object, buffers: Sequence[memoryview], wanted: int) -> Runs:
        """Raises BadMessage unless this answer has what it says, and no more than was asked for."""
        if not isinstance(message, Runs) or not message.valid == len(message.checksums) == len(buffers) <= wanted:
            raise BadMessage(f"{self.client.address} answered with other runs than it was asked for")
        if any(buffer.nbytes != self._run_bytes for buffer in buffers):
            raise BadMessage(f"{self.client.address} sent runs of another size than {self._run_bytes} bytes")
        return message


def _slots(grants: Sequence[Grant]) -> tuple[list[int], list[int]]:
    return [grant.slot for grant in grants], [grant.generation for grant in grants]


def _take(runs: Runs, buffers: Sequence[memoryview], grants: Sequence[Grant], out: Sequence[Bytes]) -> int:
    rows = zip(grants, buffers, runs.checksums, out, strict=False)  # there may be fewer runs than were asked for
    for count, (grant, buffer, expected, to) in enumerate(rows):
        np.copyto(to, np.frombuffer(buffer, np.uint8))
        if checksum(to, grant.generation) != expected:
            return count
    return runs.valid


def _checksums(grants: Sequence[Grant], rows: Sequence[Bytes]) -> list[int]:
    return [checksum(row, grant.generation) for grant, row in zip(grants, rows, strict=True)]
