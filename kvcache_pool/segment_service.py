"""One node's segment over rpc: runs in and out, for readers and writers that map no memory of this host."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvcache_pool.api import Done, OpenStream, Priority, ReadLayer, Runs, Stale, WriteLayer
from kvcache_pool.mooncake_service import MooncakeService
from kvcache_pool.segment import Segment
from kvcache_pool.streams import Streams
from kvcache_pool.transfer.copiers import Copiers, hops
from kvcache_pool.transfer.mooncake_engine import MooncakeSettings
from kvcache_pool.transfer.stream import stream_host
from kvcache_pool.transfer.wire import GENERATIONS_MAX
from protocol.call import Answer
from protocol.errors import BadMessage
from protocol.message import Message
from protocol.rpc import Ask, Handler, at_once, handler

RUNS_MAX = 4096
"""Of one message between a reader or writer and a segment; far more than its bound on bytes allows."""


class SegmentService:
    """Answers for one segment's bytes. Owns copying threads until `close`; the segment is another's."""

    def __init__(self, segment: Segment, address: str = "", mooncake: MooncakeSettings | None = None) -> None:
        """Streams are taken at the host of `address`; at this one for others of this host, if it is empty. Runs
        are offered by Mooncake's engine too, if `mooncake` says how. Raises ValueError, OSError."""
        self._memory = segment.memory
        self.streams = Streams(segment.memory, stream_host(address))
        self._layout = segment.memory.geometry.layout
        self._mooncake: MooncakeService | None = None
        if mooncake is not None:
            self._mooncake = MooncakeService(segment.memory, stream_host(address), mooncake)
        self._copiers = Copiers()

    def handlers(self) -> dict[type[Message], Handler]:
        """For `Server`."""
        more = {} if self._mooncake is None else self._mooncake.handlers()
        return more | dict(
            [
                handler(ReadLayer, self._read),
                handler(WriteLayer, self._write),
                at_once(OpenStream, self.streams.tell),
            ]
        )

    async def _read(self, message: ReadLayer, _: Ask) -> Answer:
        """Send runs from where they lie; the reader verifies what arrives."""
        self._require_shape(message.layer, message.slots, message.generations)
        reason, frames, checksums = "", [], []
        for slot, generation in zip(message.slots, message.generations, strict=True):
            try:
                self._memory.require(slot, generation)
            except Stale as error:
                reason = str(error)
                break
            frames.append(self._memory.runs[slot, message.layer].data)
            checksums.append(int(self._memory.checksums[slot, message.layer]))
        return Answer(Runs(len(frames), checksums, reason), frames)

    async def _write(self, message: WriteLayer, ask: Ask) -> Done:
        self._require_shape(message.layer, message.slots, message.generations)
        if not len(ask.buffers) == len(message.checksums) == len(message.slots):
            raise BadMessage(f"{len(message.slots)} slots, {len(ask.buffers)} buffers")
        if any(buffer.nbytes != self._layout.run_bytes for buffer in ask.buffers):
            raise BadMessage(f"a run has {self._layout.run_bytes} bytes")
        for hop in hops(len(message.slots), self._layout.run_bytes):
            await self._copiers.run(Priority.STORE, partial(self._put, message, ask.buffers, hop))
        return Done()

    def _put(self, message: WriteLayer, buffers: Sequence[memoryview], hop: slice) -> None:
        rows = (message.slots[hop], message.generations[hop], message.checksums[hop], buffers[hop])
        for slot, generation, expected, buffer in zip(*rows, strict=True):
            run = np.frombuffer(buffer, np.uint8)
            self._memory.put_verified(message.layer, slot, generation, run, expected)

    def _require_shape(self, layer: int, slots: list[int], generations: list[int]) -> None:
        if not 0 <= layer < self._layout.layers:
            raise BadMessage(f"there is no layer {layer}")
        if not len(slots) == len(generations) <= RUNS_MAX:
            raise BadMessage(f"{len(slots)} slots, {len(generations)} generations")
        if not all(0 <= generation < GENERATIONS_MAX for generation in generations):
            raise BadMessage(f"a generation is not negative and below {GENERATIONS_MAX}")

    def close(self) -> None:
        """End the threads, and the streams."""
        self.streams.close()
        if self._mooncake is not None:
            self._mooncake.close()
        self._copiers.close()
