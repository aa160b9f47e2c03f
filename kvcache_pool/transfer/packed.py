"""A mover for a pool that holds KV compressed: callers have plain pages, and what travels and is stored is packed.

    write   pages ──gathered──> scratch, plain ──packed──> scratch, packed ──the mover below──> segment
    read    pages <─scattered── scratch, plain <─unpacked─ scratch, packed <─the mover below── segment

Long transfers go in hops, so that one is packed while another moves. Everything below knows packed runs only:
slots, checksums, transports and the disk tier are as they are without compression.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from kvcache_pool.aligned import aligned
from kvcache_pool.api import Blocks, Grant, Place, Priority
from kvcache_pool.codec import Bytes, Codec
from kvcache_pool.transfer.copiers import Copiers, Turns, leading, together
from kvcache_pool.transfer.mooncake_engine import MooncakeSettings
from kvcache_pool.transfer.mover import BlockMover, Fetched, PoolMover, Reach, leading_of, require_none
from protocol.blocks import BlockLayout
from protocol.errors import DangoError
from protocol.ids import SegmentId
from protocol.transport import Transport

HOP_BYTES = 1 << 20
"""Of packed runs, worked on in one go: some two milliseconds of a thread."""

HOPS_MAX = 2
"""Of one call at once: one is packed or unpacked while the other moves."""

SCRATCHES = 8
"""Hops of all calls at once; each takes HOP_BYTES, or one block, and the same unpacked."""

INLINE_BYTES = 1 << 16
"""So many plain bytes are packed in the event loop: that takes no longer than to wake a thread."""

T = TypeVar("T")


def mover_to(
    transport: Transport,
    host: str,
    reach: Reach,
    layout: BlockLayout,
    mooncake: MooncakeSettings = MooncakeSettings(),  # noqa: B008  it is frozen
) -> BlockMover:
    """The mover between plain pages and a pool of this layout, compressed or not."""
    below = PoolMover(transport, host, reach, mooncake)
    return below if layout.compression == "none" else PackedMover(below, layout)


class Scratch(NamedTuple):
    """Room for the runs of one hop, in both forms."""

    plain: Bytes
    packed: Bytes


class PackedMover:
    """A BlockMover over another one, whose runs are packed. Owns that, threads and scratch until `aclose`."""

    def __init__(self, below: BlockMover, layout: BlockLayout) -> None:
        """`layout` is the pool's. Raises ValueError if it is not compressed."""
        self._below = below
        self._codec = Codec(layout)
        self._layers = layout.layers
        self._run_bytes, self._plain_bytes = layout.run_bytes, layout.plain.run_bytes
        self._rows = max(layout.layers, HOP_BYTES // layout.run_bytes)
        """Runs in a scratch."""
        self._copiers = Copiers()
        self._turns = Turns(SCRATCHES)
        self._idle: list[Scratch] = []
        """Made at need, never more than there are turns, and kept: fresh memory costs as much as packing."""

    def know(self, places: Sequence[Place]) -> None:
        """See api.Mover."""
        self._below.know(places)

    def in_bulk(self, grants: Sequence[Grant]) -> bool:
        """See api.Mover."""
        return self._below.in_bulk(grants)

    async def read(
        self, layer: int, grants: Sequence[Grant], out: Bytes, pages: Sequence[int], priority: Priority
    ) -> int:
        """See api.Mover."""

        async def hop(part: slice, scratch: Scratch) -> int:
            packed = scratch.packed[: part.stop - part.start]
            good = await self._below.read(layer, grants[part], packed, range(len(packed)), priority)
            rows = list(pages[part][:good])
            await self._work(priority, good, partial(self._scatter, scratch, out, rows))
            return good

        cut = self._cut(len(grants), 1)
        return leading(cut, await self._each(cut, hop, priority))

    async def read_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> int:
        """See api.Mover."""
        return leading_of(await self.fetch_blocks(grants, blocks, priority), grants)

    async def fetch_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> Fetched:
        """See BlockMover."""

        async def hop(part: slice, scratch: Scratch) -> Fetched:
            packed = self._blocks(scratch.packed, part)
            got = await self._below.fetch_blocks(grants[part], packed, priority)
            if len(got.missing) < len(packed):
                into = [blocks[row] for row in range(part.start, part.stop)]
                await self._work(priority, len(into) * self._layers, partial(self._part, scratch, into))
            return got

        cut = self._cut(len(grants), self._layers)
        return _joined(cut, await self._each(cut, hop, priority), grants)

    async def write(
        self,
        layer: int,
        grants: Sequence[Grant],
        source: Bytes,
        pages: Sequence[int],
        priority: Priority,
        filled: int | None = None,
    ) -> None:
        """See api.Mover. Raises NotFinite too."""

        async def hop(part: slice, scratch: Scratch) -> None:
            packed = scratch.packed[: part.stop - part.start]
            tail = filled if part.stop == len(grants) else None
            gather = partial(self._gather, scratch, source, list(pages[part]), tail)
            await self._work(priority, len(packed), gather)
            await self._below.write(layer, grants[part], packed, range(len(packed)), priority)

        await self._each(self._cut(len(grants), 1), hop, priority)

    async def write_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> None:
        """See api.Mover. Raises NotFinite too."""
        require_none(await self.store_blocks(grants, blocks, priority))

    async def store_blocks(
        self, grants: Sequence[Grant], blocks: Blocks, priority: Priority
    ) -> dict[SegmentId, DangoError]:
        """See BlockMover. Raises NotFinite."""

        async def hop(part: slice, scratch: Scratch) -> dict[SegmentId, DangoError]:
            packed = self._blocks(scratch.packed, part)
            source = [blocks[row] for row in range(part.start, part.stop)]
            await self._work(priority, len(source) * self._layers, partial(self._join, scratch, source))
            return await self._below.store_blocks(grants[part], packed, priority)

        faults: dict[SegmentId, DangoError] = {}
        for found in await self._each(self._cut(len(grants), self._layers), hop, priority):
            faults |= found
        return faults

    async def aclose(self) -> None:
        """See api.Mover."""
        await self._below.aclose()
        self._copiers.close()

    # -- hops ---------------------------------------------------------------------------------------

    def _cut(self, count: int, width: int) -> list[slice]:
        """`count` units of `width` runs, as many in each hop as a scratch takes."""
        step = max(1, HOP_BYTES // (self._run_bytes * width))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    async def _each(
        self, cut: Sequence[slice], hop: Callable[[slice, Scratch], Awaitable[T]], priority: Priority
    ) -> list[T]:
        """Run all hops, a few at once, each with a scratch of its own."""
        few = asyncio.Semaphore(HOPS_MAX)

        async def one(part: slice) -> T:
            async with few, self._turns.turn(priority):
                scratch = self._idle.pop() if self._idle else self._scratch()
                try:
                    return await hop(part, scratch)
                finally:
                    self._idle.append(scratch)

        return await together([one(part) for part in cut])

    def _scratch(self) -> Scratch:
        sizes = (self._rows, self._plain_bytes), (self._rows, self._run_bytes)
        plain, packed = (aligned(*size) for size in sizes)
        return Scratch(plain, packed)

    async def _work(self, priority: Priority, runs: int, work: Callable[[], None]) -> None:
        if runs * self._plain_bytes <= INLINE_BYTES:
            work()
        else:
            await self._copiers.run(priority, work)

    def _blocks(self, runs: Bytes, part: slice) -> Bytes:
        """The first runs of a scratch as the blocks of a hop."""
        count = part.stop - part.start
        return runs[: count * self._layers].reshape(count, self._layers, -1)

    # -- work, in any thread ------------------------------------------------------------------------

    def _gather(self, scratch: Scratch, source: Bytes, pages: list[int], filled: int | None) -> None:
        if not 0 <= min(pages) <= max(pages) < len(source):
            raise IndexError(f"a page is outside the {len(source)} there are")
        plain = scratch.plain[: len(pages)]
        np.take(source, pages, axis=0, out=plain, mode="clip")  # to raise, it would take them by a copy
        if filled is not None:
            self._codec.blank(plain[-1], filled)
        self._codec.pack(plain, scratch.packed[: len(pages)])

    def _scatter(self, scratch: Scratch, out: Bytes, pages: list[int]) -> None:
        plain = scratch.plain[: len(pages)]
        self._codec.unpack(scratch.packed[: len(pages)], plain)
        out[pages] = plain

    def _join(self, scratch: Scratch, blocks: Sequence[Bytes]) -> None:
        plain = self._blocks(scratch.plain, slice(0, len(blocks)))
        for row, block in zip(plain, blocks, strict=True):
            row[:] = block
        runs = len(blocks) * self._layers
        self._codec.pack(scratch.plain[:runs], scratch.packed[:runs])

    def _part(self, scratch: Scratch, blocks: Sequence[Bytes]) -> None:
        runs = len(blocks) * self._layers
        self._codec.unpack(scratch.packed[:runs], scratch.plain[:runs])
        for row, block in zip(self._blocks(scratch.plain, slice(0, len(blocks))), blocks, strict=True):
            block[:] = row


def _joined(cut: Sequence[slice], parts: Sequence[Fetched], grants: Sequence[Grant]) -> Fetched:
    """What the hops of one call have brought, as one."""
    hops = [*zip(cut, parts, strict=True)]
    bad: dict[SegmentId, int] = {}
    for number in (hop.start + number for hop, part in hops for number in part.bad):
        bad.setdefault(grants[number].segment, number)
    missing = [hop.start + number for hop, part in hops for number in part.missing]
    return Fetched(missing, [*bad.values()], frozenset().union(*(part.lost for part in parts)))
