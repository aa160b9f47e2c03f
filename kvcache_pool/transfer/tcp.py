"""Over the segment's service: runs are frames beside a message, sent from and verified in place.

The checksum travels with each run from writer to segment to reader, and whoever puts a run into memory
verifies it there. So a frame whose memory was reused before the network took it is found out too.
"""

from collections.abc import Sequence

import numpy as np

from kvcache_pool.api import TRANSFER_S_MAX, Done, Grant, Place, Priority, ReadLayer, Runs, WriteLayer
from kvcache_pool.segment import Bytes, checksum
from kvcache_pool.transfer.copiers import Copiers, Turns, hops
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
        self._client = Client(transport, place.address).start()
        self._copiers = copiers
        self._turns = Turns(MESSAGES_AT_ONCE)
        self._run_bytes = place.layout.run_bytes
        self._layers = place.layout.layers

    async def read(
        self, layer: int, grants: Sequence[Grant], out: Bytes, pages: Sequence[int], priority: Priority
    ) -> int:
        """As Mover.read, within this segment. Raises PeerLost and its like."""
        done = 0
        for hop in hops(len(grants), self._run_bytes):
            wanted = grants[hop]
            async with self._turns.turn(priority):
                message = ReadLayer(layer, *_slots(wanted))
                answer = await self._client.call_raw(message, within_s=TRANSFER_S_MAX)
                runs = self._checked(answer.message, answer.buffers, len(wanted))
                good = await self._copiers.run(
                    priority, _take, runs, answer.buffers, wanted[: runs.valid], out, pages[hop]
                )
            done += good
            if good < len(wanted):
                break
        return done

    async def write(
        self, layer: int, grants: Sequence[Grant], source: Bytes, pages: Sequence[int], priority: Priority
    ) -> None:
        """As Mover.write, within this segment."""
        for hop in hops(len(grants), self._run_bytes):
            async with self._turns.turn(priority):
                wanted, rows = grants[hop], [source[page] for page in pages[hop]]
                checksums = await self._copiers.run(priority, _checksums, wanted, rows)
                message = WriteLayer(layer, *_slots(wanted), checksums)
                frames = [row.data for row in rows]
                await self._client.call(message, Done, *frames, within_s=TRANSFER_S_MAX)

    async def write_blocks(self, grants: Sequence[Grant], blocks: Sequence[Bytes], priority: Priority) -> None:
        """As Mover.write_blocks, within this segment: a message carries one layer."""
        for layer in range(self._layers):
            rows = np.stack([block[layer] for block in blocks])
            await self.write(layer, grants, rows, range(len(rows)), priority)

    async def aclose(self) -> None:
        """Close the connection; calls in flight end in PeerLost."""
        await self._client.aclose()

    def _checked(self, message: object, buffers: Sequence[memoryview], wanted: int) -> Runs:
        """Raises BadMessage unless this answer has what it says, and no more than was asked for."""
        if not isinstance(message, Runs) or not message.valid == len(message.checksums) == len(buffers) <= wanted:
            raise BadMessage(f"{self._client.address} answered with other runs than it was asked for")
        if any(buffer.nbytes != self._run_bytes for buffer in buffers):
            raise BadMessage(f"{self._client.address} sent runs of another size than {self._run_bytes} bytes")
        return message


def _slots(grants: Sequence[Grant]) -> tuple[list[int], list[int]]:
    return [grant.slot for grant in grants], [grant.generation for grant in grants]


def _take(
    runs: Runs, buffers: Sequence[memoryview], grants: Sequence[Grant], out: Bytes, pages: Sequence[int]
) -> int:
    rows = zip(grants, buffers, runs.checksums, pages, strict=False)  # there may be fewer runs than pages
    for count, (grant, buffer, expected, page) in enumerate(rows):
        np.copyto(out[page], np.frombuffer(buffer, np.uint8))
        if checksum(out[page], grant.generation) != expected:
            return count
    return runs.valid


def _checksums(grants: Sequence[Grant], rows: Sequence[Bytes]) -> list[int]:
    return [checksum(row, grant.generation) for grant, row in zip(grants, rows, strict=True)]
