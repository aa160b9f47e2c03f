"""KV on the move in virtual time: who holds which block, and how long the bytes take on which wire.

Nothing of a block's real size is stored: a run is known by a fingerprint of 8 bytes, so that what is read can be
compared with what was written. Time passes by the real size.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache_pool.api import Grant, Place, Priority, Stale
from protocol.errors import PeerLost
from protocol.ids import Incarnation, SegmentId

PRINT_BYTES = 8
"""Bytes of a fingerprint, which stands for a run."""


class Wire:
    """A wire of so many bytes a second. Transfers go one after the other, in the order in which they are ready:
    one that is announced early and ready late holds nobody up."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._turn = asyncio.Lock()  # first in, first out
        self.busy_s = 0.0
        """Seconds in use since the start."""

    async def carry(self, size: int) -> None:
        """Returns when `size` bytes have passed."""
        seconds = size / self._bytes_s
        async with self._turn:
            await asyncio.sleep(seconds)
        self.busy_s += seconds


@dataclass
class SimSegment:
    """One node's memory, as fingerprints. What `announce` needs of a segment is here as well."""

    segment: SegmentId
    incarnation: Incarnation
    slots: int
    layers: int
    out: Wire
    """The node's network card, on the sending side."""
    host: str
    generation: int = 0
    alive: bool = True
    generations: npt.NDArray[np.int64] = field(init=False)
    prints: npt.NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.generations = np.zeros((self.slots, self.layers), np.int64)
        self.prints = np.zeros((self.slots, self.layers, PRINT_BYTES), np.uint8)


@dataclass
class Memory:
    """All segments of the world."""

    run_bytes: int
    """Of one layer of one block, as time counts it."""
    segments: dict[SegmentId, SimSegment] = field(default_factory=dict)
    corrupted: int = 0
    """Reads that found another generation than they were promised."""

    def reach(self, segment: SegmentId) -> SimSegment | None:
        """A segment that is alive."""
        found = self.segments.get(segment)
        return found if found is not None and found.alive else None


class SimMover:
    """A kvcache_pool.api.Mover for one instance on one host."""

    def __init__(self, memory: Memory, host: str, bus: Wire) -> None:
        self._memory = memory
        self._host = host
        self._bus = bus
        """Between this host's memory and its device."""

    def know(self, places: Sequence[Place]) -> None:
        """The memory knows all."""

    async def read(
        self,
        layer: int,
        grants: Sequence[Grant],
        out: npt.NDArray[np.uint8],
        pages: Sequence[int],
        priority: Priority,
    ) -> int:
        """See Mover."""
        good = 0
        for segment, start, end in _stretches(grants):
            held = self._memory.reach(segment)
            if held is None:
                return good
            size = (end - start) * self._memory.run_bytes
            await (self._bus if held.host == self._host else held.out).carry(size)
            if not held.alive:
                return good
            slots = [grant.slot for grant in grants[start:end]]
            wanted = [grant.generation for grant in grants[start:end]]
            right = held.generations[slots, layer] == wanted
            count = end - start if right.all() else int(np.argmin(right))
            out[list(pages[start : start + count])] = held.prints[slots[:count], layer]
            good += count
            if start + count < end:
                self._memory.corrupted += 1
                return good
        return good

    async def write(
        self,
        layer: int,
        grants: Sequence[Grant],
        source: npt.NDArray[np.uint8],
        pages: Sequence[int],
        priority: Priority,
    ) -> None:
        """See Mover."""
        await self._put(grants, slice(layer, layer + 1), source[list(pages)][:, None], 1)

    async def write_blocks(
        self, grants: Sequence[Grant], blocks: Sequence[npt.NDArray[np.uint8]], priority: Priority
    ) -> None:
        """See Mover."""
        await self._put(grants, slice(None), np.stack(blocks), len(blocks[0]))

    async def _put(self, grants: Sequence[Grant], layers: slice, prints: npt.NDArray[np.uint8], runs: int) -> None:
        """`prints` is [grants, runs, PRINT_BYTES]."""
        for segment, start, end in _stretches(grants):
            held = self._require(segment)
            size = (end - start) * runs * self._memory.run_bytes
            await self._bus.carry(size)
            held = self._require(segment)
            slots = [grant.slot for grant in grants[start:end]]
            generations = np.array([[grant.generation] for grant in grants[start:end]])
            if (held.generations[slots, layers] > generations).any():
                raise Stale(f"a slot of {segment} has been used again")
            held.generations[slots, layers] = generations
            held.generation = max(held.generation, int(generations.max()))
            held.prints[slots, layers] = prints[start:end]

    def _require(self, segment: SegmentId) -> SimSegment:
        held = self._memory.reach(segment)
        if held is None:
            raise PeerLost(f"the segment {segment} is gone")
        return held

    async def aclose(self) -> None:
        """Nothing is open."""


def _stretches(grants: Sequence[Grant]) -> list[tuple[SegmentId, int, int]]:
    """Runs of neighbouring grants in one segment: (segment, start, end)."""
    stretches: list[tuple[SegmentId, int, int]] = []
    start = 0
    for end in range(1, len(grants) + 1):
        if end == len(grants) or grants[end].segment != grants[start].segment:
            stretches.append((grants[start].segment, start, end))
            start = end
    return stretches
