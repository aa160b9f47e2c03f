"""A mover with faults. Each fault is a value, told beforehand; the mover inside stays the real one."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcache_pool.api import Blocks, Grant, Mover, Place, Priority, Stale


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and when. Reads and writes are numbered from 0 in the order of their calls."""

    read_delay_s: Mapping[int, float] = field(default_factory=dict)
    """For a layer: how much later its reads end."""
    write_delay_s: Mapping[int, float] = field(default_factory=dict)
    short_reads: Mapping[int, int] = field(default_factory=dict)
    """For a read: how many runs are good at most; 0 fails it. The pages after that get garbage."""
    corrupt_layers: Mapping[int, int] = field(default_factory=dict)
    """For a layer: the index of the run that is bad in each of its reads."""
    failed_writes: frozenset[int] = frozenset()
    """These writes raise Stale and write nothing."""
    repeated_writes: frozenset[int] = frozenset()
    """These writes are done twice, as if a message came twice."""


class FaultyMover:
    """`inner`, with `faults`. Remembers what was called, as (act, layer, runs)."""

    def __init__(self, inner: Mover, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._reads = 0
        self._writes = 0
        self.calls: list[tuple[str, int, int]] = []

    def know(self, places: Sequence[Place]) -> None:
        self._inner.know(places)

    async def read(
        self,
        layer: int,
        grants: Sequence[Grant],
        out: npt.NDArray[np.uint8],
        pages: Sequence[int],
        priority: Priority,
    ) -> int:
        number, self._reads = self._reads, self._reads + 1
        self.calls.append(("read", layer, len(grants)))
        limits = (self._faults.short_reads.get(number), self._faults.corrupt_layers.get(layer))
        good = await self._inner.read(layer, grants, out, pages, priority)
        await asyncio.sleep(self._faults.read_delay_s.get(layer, 0.0))
        good = min([good, *(limit for limit in limits if limit is not None)])
        for page in pages[good:]:
            out[page] = 0xA5
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
        number, self._writes = self._writes, self._writes + 1
        self.calls.append(("write", layer, len(grants)))
        await asyncio.sleep(self._faults.write_delay_s.get(layer, 0.0))
        if number in self._faults.failed_writes:
            raise Stale(f"write {number} fails, as it was told to")
        for _ in range(2 if number in self._faults.repeated_writes else 1):
            await self._inner.write(layer, grants, source, pages, priority, filled)

    def in_bulk(self, grants: Sequence[Grant]) -> bool:
        return self._inner.in_bulk(grants)

    async def write_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> None:
        for layer, rows in enumerate(zip(*blocks, strict=True)):
            await self.write(layer, grants, np.stack(rows), range(len(grants)), priority)

    async def read_blocks(self, grants: Sequence[Grant], blocks: Blocks, priority: Priority) -> int:
        good = len(grants)
        for layer, rows in enumerate(zip(*blocks, strict=True)):
            out = np.stack(rows)
            good = min(good, await self.read(layer, grants, out, range(len(out)), priority))
            for row, run in zip(rows, out, strict=True):
                row[:] = run
        return good

    async def aclose(self) -> None:
        await self._inner.aclose()
