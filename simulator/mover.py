"""KV on the move in virtual time: who holds which block, and how long the bytes take on which wire.

Nothing of a block's real size is stored: a run is known by a fingerprint of 8 bytes, so that what is read can be
compared with what was written. Time passes by the real size.
"""

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache_pool.api import Blocks, Grant, Note, Place, Priority, Stale
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
    draining: bool = False
    alive: bool = True
    notes: dict[int, Note] = field(default_factory=dict)
    generations: "list[array[int]]" = field(init=False)
    """Of each layer, by slots. Not numpy's: most transfers are of a few blocks."""
    prints: "list[array[int]]" = field(init=False)
    """Likewise; a fingerprint as one number."""

    def __post_init__(self) -> None:
        self.generations = [_zeros(self.slots) for _ in range(self.layers)]
        self.prints = [_zeros(self.slots) for _ in range(self.layers)]

    def note(self, note: Note) -> None:
        """What a slot holds, for the next directory."""
        if note.name:
            self.notes[note.slot] = note
        else:
            self.notes.pop(note.slot, None)

    def noted(self) -> list[Note]:
        """The notes that are still true, the block that was written first of all first."""
        true = [
            note
            for note in self.notes.values()
            if all(generations[note.slot] == note.generation for generations in self.generations)
        ]
        return sorted(true, key=lambda note: note.generation)

    def get(self, layer: int, grants: Sequence[Grant]) -> list[int]:
        """The fingerprints of the leading runs that have the right generation."""
        generations, prints = self.generations[layer], self.prints[layer]
        found = []
        for _, slot, generation in grants:
            if generations[slot] != generation:
                break
            found.append(prints[slot])
        return found

    def put(self, layer: int, grants: Sequence[Grant], found: Sequence[int]) -> None:
        """Write these fingerprints. Raises Stale, and then has written nothing."""
        generations, prints = self.generations[layer], self.prints[layer]
        highest = self.generation
        for _, slot, generation in grants:
            if generations[slot] > generation:
                raise Stale(f"a slot of {self.segment} has been used again")
            highest = max(highest, generation)
        for (_, slot, generation), print_ in zip(grants, found, strict=True):
            generations[slot], prints[slot] = generation, print_
        self.generation = highest


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
        good, prints = 0, _numbers(out)
        for segment, start, end in _stretches(grants):
            held = self._memory.reach(segment)
            if held is None:
                return good
            size = (end - start) * self._memory.run_bytes
            await (self._bus if held.host == self._host else held.out).carry(size)
            if not held.alive:
                return good
            found = held.get(layer, grants[start:end])
            good += len(found)
            prints[list(pages[start:good])] = found
            if good < end:
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
        filled: int | None = None,
    ) -> None:
        """See Mover."""
        await self._put(grants, {layer: _numbers(source)[list(pages)].tolist()})

    async def write_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> None:
        """See Mover."""
        layers = enumerate(zip(*blocks, strict=True))
        await self._put(grants, {layer: _numbers(np.stack(runs)).tolist() for layer, runs in layers})

    async def read_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> int:
        """See Mover."""
        good = len(grants)
        for layer in range(len(blocks[0]) if grants else 0):
            out = np.stack([block[layer] for block in blocks])
            good = min(good, await self.read(layer, grants, out, range(len(grants)), priority))
            for block, run in zip(blocks, out, strict=True):
                block[layer] = run
        return good

    def in_bulk(self, grants: Sequence[Grant]) -> bool:
        """See Mover: a wire takes as long either way."""
        return False

    async def _put(self, grants: Sequence[Grant], layers: Mapping[int, list[int]]) -> None:
        """Write, in each of these layers, a fingerprint for each grant."""
        for segment, start, end in _stretches(grants):
            self._require(segment)
            await self._bus.carry((end - start) * len(layers) * self._memory.run_bytes)
            held = self._require(segment)
            for layer, prints in layers.items():
                held.put(layer, grants[start:end], prints[start:end])

    def _require(self, segment: SegmentId) -> SimSegment:
        held = self._memory.reach(segment)
        if held is None:
            raise PeerLost(f"the segment {segment} is gone")
        return held

    async def aclose(self) -> None:
        """Nothing is open."""


def _zeros(count: int) -> "array[int]":
    return array("q", bytes(8 * count))


def _numbers(prints: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Fingerprints, [count, PRINT_BYTES], as numbers: the same memory."""
    return prints.view(np.int64)[:, 0]


def _stretches(grants: Sequence[Grant]) -> list[tuple[SegmentId, int, int]]:
    """Runs of neighbouring grants in one segment: (segment, start, end)."""
    stretches: list[tuple[SegmentId, int, int]] = []
    start = 0
    for end in range(1, len(grants) + 1):
        if end == len(grants) or grants[end].segment != grants[start].segment:
            stretches.append((grants[start].segment, start, end))
            start = end
    return stretches
