"""The segment's end of Mooncake's Transfer Engine: its runs lie open to be read, and it reads what it is to write.

The tables of generations and checksums are not registered with the engine, and nobody is asked to write from
elsewhere. Whoever reaches the engine's ports may read all runs; he could spoil some, but not unnoticed.
"""

import threading
from functools import partial

from kvcache_pool.api import (
    Checksums,
    Done,
    GetChecksums,
    Grant,
    MooncakeAt,
    OpenMooncake,
    Priority,
    PullRuns,
)
from kvcache_pool.segment import Memory
from kvcache_pool.streams import NOWHERE
from kvcache_pool.transfer.copiers import HOP_BYTES, HOP_RUNS, Copiers
from kvcache_pool.transfer.copies import Copies, Span
from kvcache_pool.transfer.mooncake_engine import Buffer, Buffers, MooncakeSettings, TransferEngine
from kvcache_pool.transfer.wire import GENERATIONS_MAX
from protocol.errors import BadMessage
from protocol.message import Message
from protocol.rpc import Ask, Handler, at_once, handler

PULLS = 4
"""At once: two threads fetch and verify, and who has stopped in the middle keeps no other from it."""

SESSION_CHARS_MAX = 256
"""Of a host and a port."""


class MooncakeService:
    """Offers one segment's runs. Owns an engine, buffers and threads until `close`; the memory is another's."""

    def __init__(self, memory: Memory, host: str, settings: MooncakeSettings) -> None:
        """Others reach the engine at `host`. Raises ValueError, OSError."""
        self._copies = Copies(memory)
        self._layout = memory.geometry.layout
        self._engine = TransferEngine(host, settings)
        try:
            self._buffers = Buffers(self._engine, PULLS, self._layout.block_bytes)
            runs = memory.runs.ctypes.data
            self._engine.register(runs, memory.geometry.slots * memory.geometry.slot_bytes)
        except OSError:
            self._engine.close()
            raise
        self._at = MooncakeAt(self._engine.session, runs, settings.protocol)
        self._copiers = Copiers()

    def handlers(self) -> dict[type[Message], Handler]:
        """For `Server`."""
        return dict(
            [
                at_once(OpenMooncake, self._tell),
                at_once(GetChecksums, self._checksums),
                handler(PullRuns, self._pull),
            ]
        )

    def _tell(self, _message: OpenMooncake) -> MooncakeAt:
        return self._at

    def _checksums(self, message: GetChecksums) -> Checksums:
        span, grants = self._checked(message)
        good = grants[: self._copies.require(grants)]
        return Checksums(len(good), self._copies.checksums(span, good))

    async def _pull(self, message: PullRuns, _: Ask) -> Done:
        span, grants = self._checked(message)
        if len(message.checksums) != len(grants) * span.width or len(message.session) > SESSION_CHARS_MAX:
            raise BadMessage(f"{len(grants)} slots of {span.width} layers, {len(message.checksums)} checksums")
        async with self._buffers.one(Priority.STORE) as buffer:
            if buffer is None:
                raise BadMessage("all memory for what is to be written waits for writers that have stopped")
            stop = threading.Event()
            writing = partial(self._written, message, span, grants, buffer, stop)
            await self._copiers.run(Priority.STORE, writing, stop.set)
        return Done()

    def _written(
        self, message: PullRuns, span: Span, grants: list[Grant], buffer: Buffer, stop: threading.Event
    ) -> None:
        shape = (len(grants), span.width, self._layout.run_bytes)
        size = shape[0] * shape[1] * shape[2]
        if not self._engine.fetch(message.session, [(message.address, size)], buffer, stop):
            raise BadMessage(f"memory of {message.session} could not be read")
        self._copies.put_verified(span, grants, buffer.bytes[:size].reshape(shape), message.checksums)

    def _checked(self, message: GetChecksums | PullRuns) -> tuple[Span, list[Grant]]:
        """Raises BadMessage for layers that are not there, and for more than one hop."""
        span, layers = Span(message.first, message.width), self._layout.layers
        if not (span.first >= 0 and 1 <= span.width <= layers - span.first):
            raise BadMessage(f"there are {layers} layers, not {span.width} from {span.first}")
        count, unit = len(message.slots), span.width * self._layout.run_bytes
        if not 1 <= count == len(message.generations) <= max(1, min(HOP_RUNS, HOP_BYTES // unit)):
            raise BadMessage(f"{count} slots, {len(message.generations)} generations in one message")
        if not all(0 <= generation < GENERATIONS_MAX for generation in message.generations):
            raise BadMessage(f"a generation is not negative and below {GENERATIONS_MAX}")
        return span, [Grant(NOWHERE, *row) for row in zip(message.slots, message.generations, strict=True)]

    def close(self) -> None:
        """End the threads and the engine. Twice is no error."""
        self._copiers.close()
        self._engine.close()
